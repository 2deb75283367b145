"""What tests of the web page's server share: recordings on a tape, answers about them, a server over a socket."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp

import rolltape
from rolltape.records.rollout import Rollout, Status
from rolltape.view.rollout.rollout_answers import RolloutAnswers
from rolltape.view.serve import served
from rolltape.view.served_runs import ServedRun
from sessions import Recording, whole


@contextlib.contextmanager
def answers_for(path: Path, *, search: bool = True) -> Iterator[RolloutAnswers]:
    """Answers about a run as it is now."""
    run = ServedRun("run", str(path))
    try:
        run.catch_up(words=search)
        yield RolloutAnswers(run)
    finally:
        run.close()


def record(path: Path, given: Sequence[tuple[Rollout, Sequence[Recording]]], **fields: Any) -> list[str]:
    """Put rollouts that were made in memory on a tape, as attempts at one task; their ids."""
    ids = []
    with rolltape.open(path, name="run") as tape:
        for attempt, (rollout, recordings) in enumerate(given):
            recorder = tape.rollout(task_id="task", attempt=attempt, **fields)
            ids.append(recorder.id)
            for recording in recordings:
                head = recording.head
                session = recorder.session(tool_ids_matter=head.tool_ids_matter, stop_ids=head.stop_ids)
                for turn in recording.turns:
                    session.record_turn(**whole(turn))
            if rollout.status is Status.FINISHED:
                recorder.finish(reward=rollout.reward)
            elif rollout.status is Status.FAILED:
                recorder.fail("it broke")
            if rollout.outcome.filtered is not None:
                tape.filter(recorder.id, rollout.outcome.filtered)
    return ids


class Asking:
    """Asks a server that runs."""

    def __init__(self, client: aiohttp.ClientSession) -> None:
        self.client = client

    async def json(self, path: str, **given: Any) -> Any:
        async with self.client.get(path, **given) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def bytes(self, path: str) -> bytes:
        async with self.client.get(path) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.read()

    async def refused(self, path: str, **given: Any) -> tuple[int, str]:
        async with self.client.get(path, **given) as answer:
            return answer.status, (await answer.json())["error"]["message"]

    async def until(self, path: str, condition: Callable[[Any], bool]) -> Any:
        """What a path answers once it is as expected."""
        async with asyncio.timeout(60):
            while not condition(answer := await self.json(path)):
                await asyncio.sleep(0.1)
            return answer

    async def caught_up(self, name: str) -> Any:
        """The overview, once everything is read and derived."""
        return await self.until(f"/api/{name}/overview", lambda one: one["read_through"] and not one["pending"])


@contextlib.asynccontextmanager
async def asking(*paths: Path, **given: Any) -> AsyncIterator[Asking]:
    async with served([str(path) for path in paths], **given) as there, aiohttp.ClientSession(there.address) as client:
        yield Asking(client)

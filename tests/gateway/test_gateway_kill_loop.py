"""Workers killed again and again under streaming agents: every task ends, and no reply is lost or doubled.

ROLLTAPE_KILLS is the number of kills.
"""

import asyncio
import contextlib
import itertools
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest

import rolltape
from gateways import eventually, scripted, user
from killable_gateway import (
    POINTS,
    TAKE_OVER_POINTS,
    Ask,
    Broken,
    KillableGateway,
    by_anthropic,
    by_itself,
    by_openai,
)
from rolltape.cli import run as rolltape_command
from rolltape.records.rollout import Rollout, Status
from rolltape.records.turn import Finish
from scripted_engine import Asked, Json, Said, Step
from served_gateways import free_port

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("ROLLTAPE_KILLS", "20"))
WORKERS = 3
AGENTS: tuple[Ask, ...] = (by_openai, by_anthropic, by_itself) * 2
TURNS = 4
SEED = 0


class Task(NamedTuple):
    """What an agent has done: the session, and the replies that it got whole."""

    opened: Json
    replies: list[str]


class Loop:
    """Agents at work at a gateway until enough kills have been made."""

    def __init__(self, gateway: KillableGateway) -> None:
        self.gateway = gateway
        self.tasks: list[Task] = []
        self.kills: Counter[str] = Counter()
        self.broken = 0
        self._names = itertools.count()
        self._chance = random.Random(SEED)
        self._enough = False

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for ask in AGENTS:
                group.create_task(self._work(ask))
            group.create_task(self._kill())

    async def _kill(self) -> None:
        """Kill at every point of a turn, of a taking over, at any time, and all at once, over and over."""
        points = itertools.cycle(POINTS)
        takeovers = itertools.cycle(TAKE_OVER_POINTS)
        ways = itertools.cycle([*["point", "any time", "point", "taking over", "point"] * 2, "all"])
        restarts = itertools.cycle([("all", self.gateway.kill_all), ("parent", self.gateway.kill_parent)])
        while self.kills.total() < KILLS:
            replies = self._replies()
            await eventually(lambda at=replies: self._replies() > at, 60)  # type: ignore[misc]
            match next(ways):
                case "point":
                    self.gateway.arm(point := next(points))
                    await self.gateway.kill_held(60)
                    self.kills[point] += 1
                case "any time":
                    await self._kill_any()
                case "taking over":
                    await self._kill_who_takes_over(next(takeovers))
                case "all":
                    await asyncio.sleep(self._chance.uniform(0, 0.5))
                    who, kill = next(restarts)
                    await asyncio.to_thread(kill)
                    await asyncio.to_thread(self.gateway.start)
                    self.kills[who] += 1
        self._enough = True

    async def _kill_who_takes_over(self, point: str) -> None:
        """Kill workers until a session of one of them is taken over, and then who does that."""
        self.gateway.arm(point)
        while self.kills.total() < KILLS - 1:
            await self._kill_any()
            with contextlib.suppress(TimeoutError):
                await self.gateway.kill_held(3)
                self.kills[point] += 1
                return
        self.gateway.disarm()

    def _replies(self) -> int:
        return sum(len(task.replies) for task in self.tasks)

    async def _kill_any(self) -> None:
        await asyncio.sleep(self._chance.uniform(0, 0.5))
        await eventually(lambda: len(self.gateway.workers()) > 0, 60)
        self.gateway.kill_worker(self._chance.choice(self.gateway.workers()))
        self.kills["any time"] += 1

    async def _work(self, ask: Ask) -> None:
        """Do one task after the other; the one that is begun when the killing ends is finished."""
        while not self._enough:
            opened = await self._open()
            task = Task(opened, [])
            self.tasks.append(task)
            messages = [user(f"Task {opened['task']}, turn 0.")]
            for turn in range(1, TURNS + 1):
                said = await self._ask(ask, opened["key"], messages)
                task.replies.append(said)
                messages += [{"role": "assistant", "content": said}, user(f"Turn {turn}.")]
            await self._finish(opened)

    async def _ask(self, ask: Ask, key: str, messages: list[Json]) -> str:
        while True:
            try:
                return await ask(self.gateway.url, key, messages)
            except Broken:
                self.broken += 1
                await asyncio.sleep(0.1)

    async def _open(self) -> Json:
        """A session for a task of its own: whether one whose answer did not come was opened, nobody knows."""
        while True:
            name = f"t{next(self._names)}"
            status, body = await self._call("/sessions", {"task_id": name})
            if status == 200:
                return {"task": name, **body}

    async def _finish(self, opened: Json) -> None:
        status = 0
        while status not in (200, 404):  # 404: it has ended, and the answer did not come
            status, _ = await self._call(f"/sessions/{opened['session']}/finish", {"reward": 1.0, "samples": False})

    async def _call(self, path: str, body: Json) -> tuple[int, Json]:
        try:
            headers = {"Authorization": "Bearer admin"}
            async with (
                aiohttp.ClientSession() as http,
                http.post(self.gateway.url + path, json=body, headers=headers) as answer,
            ):
                return answer.status, await answer.json()
        except (aiohttp.ClientError, ConnectionError):
            await asyncio.sleep(0.1)
            return 0, {}


def reply_text(asked: Asked) -> Step:
    """A reply that no other request gets, of some length, at some pace."""
    chance = random.Random(asked.number)
    words = " ".join(f"word{chance.randrange(100)}" for _ in range(chance.randrange(1, 25)))
    return Step(f"Reply #{asked.number}: {words}", token_delay_s=chance.choice([0, 0.001, 0.004]))


def check_rollout(rollout: Rollout, task: Task, said: dict[tuple[int, ...], Said]) -> None:
    """All that the agent got is on the tape, once, in order, as the engine gave it."""
    assert (rollout.status, rollout.reward) == (Status.FINISHED, 1.0)
    whole = [turn for turn in rollout.turns if turn.facts.finish is Finish.STOP]
    assert [turn.reply and turn.reply.to_dict()["content"] for turn in whole] == task.replies
    asked = [turn.facts.extra["request"] for turn in whole]
    assert len(set(asked)) == len(asked), "one request has two replies"
    for turn in whole:
        given = said[tuple(turn.sampled_ids.tolist())]
        assert turn.prompt_ids.tolist() == given.asked.prompt_ids
        assert turn.logprobs is not None
        assert turn.logprobs.tolist() == pytest.approx(given.logprobs, rel=1e-6)


async def test_no_kill_loses_or_doubles_a_reply_and_every_agent_finishes(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    with scripted(reply_text, conversation=lambda asked: asked.number).in_thread() as engine:
        gateway = KillableGateway(run, engine, free_port(), WORKERS)
        gateway.start()
        loop = Loop(gateway)
        try:
            await loop.run()
            assert await asyncio.to_thread(gateway.stop) == 0, gateway.log[-3000:]
        finally:
            if gateway.process.poll() is None:
                gateway.kill_all()
    took_s = time.monotonic() - began
    rollouts = {rollout.id: rollout for rollout in rolltape.read(run).rollouts()}
    said = {tuple(one.ids): one for one in engine.said}
    for task in loop.tasks:
        assert len(task.replies) == TURNS
        check_rollout(rollouts[task.opened["rollout"]], task, said)
    assert loop.kills.total() == KILLS
    assert rolltape_command(["check", str(run)]) == 0, capsys.readouterr()
    turns = [turn for task in loop.tasks for turn in rollouts[task.opened["rollout"]].turns]
    kinds = Counter(turn.facts.finish.value for turn in turns)
    resumed = sum("resumes" in turn.facts.extra for turn in turns)
    with capsys.disabled():
        print(
            f"\n{KILLS} kills in {took_s:.0f} s: {dict(loop.kills)}; {len(loop.tasks)} tasks, {dict(kinds)}, "
            f"{resumed} went on from what was sampled; agents asked again {loop.broken} times; "
            f"{len(list((run / 'journals').glob('*.sqlite')))} journals; {engine.requests} requests of the engine",
            file=sys.stderr,
        )
    assert "Traceback" not in gateway.log

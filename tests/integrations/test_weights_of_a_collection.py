"""A trainer hands weights to a collection of another process, which it finds by the run."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import rolltape
from engines.fake_vllm import FakeVllm, Reply, Token
from live_jobs import SUMS
from rolltape.collect.collector import Collector
from rolltape.collect.settings import CollectSettings
from rolltape.errors import BadRequest
from rolltape.gateway.admin_key import find_gateway, find_gateways, read_admin_key
from rolltape.gateway.request import SamplingParams
from rolltape.groups import Group
from rolltape.integrations import LiveGroups
from rolltape.tiny import shipped_model


@contextlib.asynccontextmanager
async def collecting(run: Path, *, max_ahead: int | None, **settings: Any) -> AsyncIterator[asyncio.Task[None]]:
    """A collection of one attempt at each of two sums."""
    given: dict[str, Any] = {
        "source": "sums",
        "group_size": 1,
        "model": str(shipped_model()),
        "thinking": False,
        "sampling": SamplingParams(temperature=1.0, max_tokens=8),
        **settings,
    }
    with rolltape.open(run) as tape:
        limit = None if max_ahead is None else rolltape.RunAheadLimit(tape, max_groups=max_ahead)
        collector = Collector(CollectSettings(**given), tape, run_ahead=limit, is_open=True)

        async def run_all() -> None:
            async with asyncio.TaskGroup() as running:
                running.create_task(collector.run())
                await asyncio.gather(*map(collector.attempt, SUMS[:2]))
                collector.close()

        task = asyncio.ensure_future(run_all())
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.wait({task})


def versions(group: Group) -> set[tuple[str, str]]:
    return {version for sample in group.samples for version in sample.versions}


async def test_the_gateway_of_a_collection_that_runs_ahead_takes_weights_from_the_trainer(tmp_path: Path) -> None:
    run = tmp_path / "run"
    async with collecting(run, max_ahead=1) as task:
        with LiveGroups(run) as live:
            (first,) = await live.request(limit=1)
            await asyncio.to_thread(live.update_weights, shipped_model(), "newer")
            first.done()  # the second task begins
            (second,) = await live.request(limit=1)
            second.done()
        await task
    assert versions(first).isdisjoint(versions(second))
    assert versions(second) == {("newer", "newer")}
    assert find_gateway(str(run)) is None


async def test_without_a_limit_a_collection_keeps_no_key(tmp_path: Path) -> None:
    async with collecting(tmp_path / "run", max_ahead=None) as task:
        await task
    assert read_admin_key(tmp_path / "run") is None


async def test_all_collections_of_a_run_get_the_weights_of_an_engine_that_they_share(tmp_path: Path) -> None:
    run = tmp_path / "run"
    async with FakeVllm(Reply([Token(5), Token(6)], "length")) as server:
        engines = {"engines": (f"vllm:{server.url}",)}
        async with (
            collecting(run, max_ahead=1, **engines),
            collecting(run, max_ahead=1, source="others", **engines),
        ):
            async with asyncio.timeout(60):
                while len(list(find_gateways(str(run)))) < 2:
                    await asyncio.sleep(0.01)
            with LiveGroups(run) as live:
                await asyncio.to_thread(live.update_weights, "/checkpoints/1", "v1")
                for _ in range(4):
                    (group,) = await live.request(limit=1)
                    group.done()
    assert [path for path, _ in server.weight_calls].count("/collective_rpc") == 2
    turns = [turn for rollout in rolltape.read(run).rollouts() for turn in rollout.turns]
    recorded = [segment.last_version for turn in turns for segment in turn.facts.segments]
    assert recorded.count("v1") == server.sampled_from.count("/checkpoints/1") > 0


@pytest.mark.parametrize(
    ("folder", "version", "message"),
    [
        (Path("weights"), 3, "version is 3, of type int; give a text such as '20'"),
        (Path("weights"), "", "version is '', of type str"),
        (7, "3", "folder is 7, of type int; give the path of a checkpoint"),
    ],
)
@pytest.mark.parametrize("follows", [False, True])
def test_what_can_be_no_folder_or_version_is_refused_by_name(
    tmp_path: Path, folder: Any, version: Any, message: str, follows: bool
) -> None:
    settings = None if follows else CollectSettings(source="sums", model=str(shipped_model()))
    live = LiveGroups(tmp_path / "run", collect=settings)
    with pytest.raises(BadRequest, match=message):
        live.update_weights(folder, version)

"""An engine that restarts comes back with the weights of its start, and gets the current ones before any turn."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from engines.fake_vllm import FakeVllm, Reply, Token
from gateways import Rig, eventually, scripted
from rolltape.gateway.engines import pool as pool_module
from rolltape.gateway.engines.vllm import VllmEngine
from rolltape.gateway.gateway import Gateway
from rolltape.records.turn import Turn
from rolltape.tiny import shipped_model

REPLY = Reply([Token(5), Token(6)], "length")
FIRST, SECOND = "/checkpoints/1", "/checkpoints/2"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_FIRST_PROBE_S", 0.02)


@contextlib.asynccontextmanager
async def gateway_before(run: Path, *servers: FakeVllm) -> AsyncIterator[Rig]:
    async with contextlib.AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server)
        engines = [VllmEngine(server.url) for server in servers]
        gateway = await stack.enter_async_context(Gateway(engine=engines, model=shipped_model(), tape=run))
        yield Rig(gateway, scripted(()), run, await stack.enter_async_context(aiohttp.ClientSession()))


def versions(turns: list[Turn]) -> list[str | None]:
    return [segment.first_version for turn in turns for segment in turn.facts.segments]


async def test_an_engine_that_was_down_loads_the_current_weights_before_it_is_given_a_turn(run: Path) -> None:
    server = FakeVllm(REPLY, tells_version=False)
    async with gateway_before(run, server) as it:
        opened = await it.open()
        await it.gateway.update_weights(FIRST, "v1")
        await it.ask(opened, "hello", max_tokens=2)
        await server.stop()
        asking = it.asking(opened, "are you there?", max_tokens=2)
        await eventually(lambda: not it.gateway.status()["engines"][0]["up"])
        await server.start()
        assert (await asking).status == 200
        await it.finish(opened)
    assert server.sampled_from == [FIRST, FIRST]
    assert versions(it.turns()) == ["v1", "v1"]


async def test_a_restart_that_no_request_met_is_noticed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_WATCH_S", 0.02)
    server = FakeVllm(REPLY)
    async with gateway_before(run, server) as it:
        await it.gateway.update_weights(FIRST, "v1")
        await server.stop()
        await server.start()
        await eventually(lambda: server.folder == FIRST)
        await eventually(lambda: it.gateway.status()["engines"][0]["up"])
        assert server.weight_version == "v1"


async def test_an_engine_that_cannot_load_them_is_given_no_turns_and_its_state_says_why(run: Path) -> None:
    servers = [FakeVllm(REPLY, tells_version=False) for _ in range(2)]
    async with gateway_before(run, *servers) as it:
        await it.gateway.update_weights(FIRST, "v1")
        first = await it.open()
        await it.ask(first, "hello", max_tokens=2)
        restarted, other = servers if servers[0].bodies else servers[::-1]
        await restarted.stop()
        restarted.loads = False
        await it.ask(first, "hello again", max_tokens=2)
        await restarted.start()
        state = it.gateway.status()["engines"][servers.index(restarted)]
        await eventually(lambda: any("collective_rpc" in str(one["error"]) for one in it.gateway.status()["engines"]))
        assert not state["up"]
        await it.ask(await it.open(task_id="other"), "hello too", max_tokens=2)
        restarted.loads = True
        await eventually(lambda: restarted.folder == FIRST)
    assert (len(restarted.sampled_from), other.sampled_from) == (1, [FIRST, FIRST])


async def test_an_engine_that_is_down_during_an_update_gets_the_weights_when_it_is_back(run: Path) -> None:
    servers = [FakeVllm(REPLY, tells_version=False) for _ in range(2)]
    async with gateway_before(run, *servers) as it:
        await it.gateway.update_weights(FIRST, "v1")
        await servers[0].stop()
        await it.gateway.update_weights(SECOND, "v2")
        assert it.gateway.status()["version"] == "v2"
        await servers[0].start()
        await eventually(lambda: servers[0].folder == SECOND)


async def test_weights_that_a_trainer_gave_an_engine_while_the_gateway_was_paused_stay(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_WATCH_S", 0.02)
    server = FakeVllm(REPLY)
    async with gateway_before(run, server) as it:
        await it.gateway.update_weights(FIRST, "v1")
        await it.gateway.pause()
        server.folder, server.weight_version = SECOND, "v2"
        await it.gateway.resume()
        assert it.gateway.status()["version"] == "v2"
        calls = len(server.weight_calls)
        await server.stop()
        opened = await it.open()
        asking = it.asking(opened, "hello", max_tokens=2)
        await eventually(lambda: not it.gateway.status()["engines"][0]["up"])
        await server.start()
        assert (await asking).status == 200
        assert len(server.weight_calls) == calls

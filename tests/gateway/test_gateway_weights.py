"""Weights change under running agents: requests wait, replies go on, and each segment has its version."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

import rolltape
from gateways import Api, Rig, eventually, rig, scripted, slowly, streamed_text_of, text_of
from rolltape.cli import run as rolltape_command
from rolltape.records.turn import Turn
from scripted_engine import Mishap

LONG = "one two three four five six seven eight nine ten eleven twelve"


def versions(turn: Turn) -> list[tuple[str | None, str | None]]:
    return [(segment.first_version, segment.last_version) for segment in turn.facts.segments]


async def change_weights(it: Rig, version: str, *, told: bool = True) -> int:
    """As a trainer does it, over HTTP."""
    paused = (await it.call("POST", "/weights/pause")).json
    assert (paused["paused"], paused["in_flight"]) == (True, 0)
    await it.http.post(f"{it.engine.url}/update_weight_version", json={"new_version": version})
    resumed = (await it.call("POST", "/weights/resume", {"version": version} if told else {})).json
    assert (resumed["paused"], resumed["version"]) == (False, version)
    interrupted: int = paused["interrupted"]
    return interrupted


@pytest.mark.parametrize("api", list(Api))
@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_goes_on_over_two_changes_and_the_agent_sees_one(run: Path, api: Api, stream: bool) -> None:
    async with rig(run, slowly(LONG, 0.04)) as it:
        opened = await it.open()
        asking = it.asking(opened, "hello", api, stream=stream)
        for change, version in enumerate(["v1", "v2"], 1):
            await it.requested(change)
            await asyncio.sleep(0.25)
            assert await change_weights(it, version, told=version == "v1") == 1
        answer = await asking
        assert (streamed_text_of if stream else text_of)(api, answer) == LONG
        assert it.engine.violations == []
        done = await it.finish(opened)
        assert done["turns"] == 1
    (turn,) = it.turns()
    assert versions(turn) == [("v0", "v0"), ("v1", "v1"), ("v2", "v2")]
    said = it.engine.said
    assert turn.sampled_ids.tolist() == [token for one in said for token in one.ids]
    assert turn.logprobs is not None
    assert turn.logprobs.tolist() == [value for one in said for value in one.logprobs]
    assert [segment.stop - segment.start for segment in turn.facts.segments] == [len(one.ids) for one in said]
    assert rolltape.read(run).versions() == ("v0", "v1", "v2")
    assert rolltape_command(["check", str(run)]) == 0


async def test_what_is_announced_counts_where_the_engine_does_not_say(run: Path) -> None:
    engine = scripted(slowly(LONG, 0.04), version=None)  # as one behind a router may not
    async with rig(run, engine) as it:
        opened = await it.open()
        asking = it.asking(opened, "hello")
        await it.requested(1)
        await asyncio.sleep(0.2)
        await it.gateway.pause()
        await it.gateway.resume("w1")
        assert text_of(Api.CHAT, await asking) == LONG
        announced = await it.call("POST", "/weights", {"version": "w2"})
        assert announced.json["version"] == "w2"
        await it.ask(opened, "hello again")
        await it.finish(opened)
    first, second = it.turns()
    assert versions(first) == [(None, None), ("w1", "w1")]
    assert versions(second) == [("w2", "w2")]
    assert rolltape.read(run).versions() == ("w1", "w2")


async def test_requests_wait_while_it_is_paused_and_a_stream_starts_meanwhile(run: Path) -> None:
    async with rig(run, lambda _: "ok", keepalive_s=0.05) as it:
        opened = await it.open()
        assert await it.gateway.pause() == 0
        asking = it.asking(opened, "hello", stream=True)
        await asyncio.sleep(0.3)
        assert not asking.done()
        assert it.engine.requests == 0
        await it.gateway.resume()
        answer = await asking
        assert streamed_text_of(Api.CHAT, answer) == "ok"
        assert answer.raw.count(b"\n: ") + answer.raw.count(b"\n:\n") >= 1


async def test_a_second_pause_finds_replies_that_had_just_been_let_on(run: Path) -> None:
    async with rig(run, slowly(LONG)) as it:
        opened = await it.open()
        asking = it.asking(opened, "hello")
        await it.requested(1)
        for _ in range(5):
            await it.gateway.pause()
            await it.gateway.resume()
        await it.gateway.pause()
        held = it.engine.requests
        await asyncio.sleep(0.1)
        assert it.engine.requests == held
        await it.gateway.resume()
        assert text_of(Api.CHAT, await asking) == LONG


@pytest.mark.parametrize("mishaps", [[Mishap.ABORTED], [Mishap.ABORTED, Mishap.ABORTED, Mishap.ABORTED]])
async def test_a_reply_that_the_engine_itself_aborts_goes_on(run: Path, mishaps: Sequence[Mishap]) -> None:
    engine = scripted([LONG])
    engine.mishaps |= dict(enumerate(mishaps))
    async with rig(run, engine) as it:
        opened = await it.open()
        assert text_of(Api.CHAT, await it.ask(opened, "hello")) == LONG
        assert it.engine.violations == []
        await it.finish(opened)
    (turn,) = it.turns()
    assert len(turn.facts.segments) == len(mishaps) + 1


async def test_a_trainer_that_aborts_all_by_itself_loses_nothing(run: Path) -> None:
    async with rig(run, slowly(LONG, 0.04)) as it:
        opened = await it.open()
        asking = it.asking(opened, "hello")
        await it.requested(1)
        await asyncio.sleep(0.2)
        update = {"model_path": "/w", "abort_all_requests": True, "weight_version": "v1"}
        await it.http.post(f"{it.engine.url}/update_weights_from_disk", json=update)
        assert text_of(Api.CHAT, await asking) == LONG
        await it.finish(opened)
    (turn,) = it.turns()
    # Nobody said when the change was: what came after it is known to lie between the two.
    assert versions(turn) == [("v0", "v0"), ("v0", "v1")]


async def test_an_engine_that_does_not_let_go_is_left_behind(run: Path) -> None:
    engine = scripted(["ok"])
    engine.mishaps[0] = Mishap.HANG
    async with rig(run, engine, patience={"let_go_s": 0.2, "look_every_s": 0.1}) as it:
        opened = await it.open()
        engine._running = _Deaf()
        asking = it.asking(opened, "hello")
        await it.requested(1)
        assert await it.gateway.pause() == 1
        await it.gateway.resume()
        assert text_of(Api.CHAT, await asking) == "ok"
        await eventually(lambda: len(it.engine.aborted) >= 1)


class _Deaf(dict[str, asyncio.Event]):
    """What is under way, to an engine that hears of no abort."""

    def __contains__(self, key: object) -> bool:
        return False

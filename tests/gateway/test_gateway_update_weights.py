"""The gateway hands weights to its engines: replies in flight go on under the new ones, and nothing is made up."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
import pytest

import rolltape
from engines.fake_vllm import FakeVllm, Reply, Token
from gateways import Api, Rig, eventually, rig, scripted, slowly, streamed_text_of, text_of
from rolltape.cli import run as rolltape_command
from rolltape.errors import BadRequest, EngineError
from rolltape.gateway.engines.inprocess import InProcessEngine
from rolltape.gateway.engines.protocol import Engine, Generated, Generation
from rolltape.gateway.engines.vllm import VllmEngine
from rolltape.gateway.gateway import Gateway
from rolltape.records.turn import Turn
from rolltape.tiny import Sampling, TinyEngine, shipped_model
from tiny.checkpoints import LIKE_SHIPPED, write_checkpoint

LONG = "one two three four five six seven eight nine ten eleven twelve"


def versions(turn: Turn) -> list[tuple[str | None, str | None]]:
    return [(segment.first_version, segment.last_version) for segment in turn.facts.segments]


async def updated(it: Rig, folder: str | Path, version: str) -> int:
    """Hand over weights as a trainer in another process does; how many replies were interrupted."""
    answer = (await it.call("POST", "/weights/update", {"folder": str(folder), "version": version})).json
    assert (answer["paused"], answer["version"]) == (False, version)
    interrupted: int = answer["interrupted"]
    return interrupted


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_in_flight_goes_on_under_the_weights_that_were_handed_over(run: Path, stream: bool) -> None:
    async with rig(run, scripted(slowly(LONG))) as it:
        it.engine.allowance = asyncio.Semaphore(3)
        opened = await it.open()
        asking = it.asking(opened, "hello", stream=stream)
        await eventually(lambda: it.engine.requests == 1 and it.engine.allowance.locked())  # type: ignore[union-attr]
        assert await updated(it, "/checkpoints/1", "v1") == 1
        it.engine.allowance = None
        assert (streamed_text_of if stream else text_of)(Api.CHAT, await asking) == LONG
        assert (it.engine.loaded, it.engine.flushed) == (["/checkpoints/1"], 1)
        await it.finish(opened)
    (turn,) = it.turns()
    assert versions(turn) == [("v0", "v0"), ("v1", "v1")]
    assert rolltape.read(run).versions() == ("v0", "v1")
    assert rolltape_command(["check", str(run)]) == 0


class WatchedEngine(InProcessEngine):
    """The tiny engine with a random model, which does not soon end a reply; `samples` says that it is at it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(TinyEngine(folder, version="0"))
        self.samples = asyncio.Event()

    async def generate(self, wanted: Generation) -> Generated:
        self.samples.clear()

        def on_sampled(ids: Sequence[int]) -> None:
            assert wanted.on_sampled is not None
            wanted.on_sampled(ids)
            self.samples.set()

        return await super().generate(msgspec.structs.replace(wanted, on_sampled=on_sampled))


@contextlib.asynccontextmanager
async def gateway_before(run: Path, engine: Engine) -> AsyncIterator[Rig]:
    async with (
        Gateway(engine=engine, model=shipped_model(), tape=run) as gateway,
        aiohttp.ClientSession() as http,
    ):
        yield Rig(gateway, scripted(()), run, http)


def checkpoint(folder: Path, seed: int) -> Path:
    shape = {**LIKE_SHIPPED, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 160}
    return write_checkpoint(folder, seed=seed, **shape)


async def test_the_tiny_engine_samples_by_each_of_the_weights_that_it_is_given(run: Path, tmp_path: Path) -> None:
    folders = [checkpoint(tmp_path / str(seed), seed) for seed in range(3)]
    engine = WatchedEngine(folders[0])
    async with gateway_before(run, engine) as it:
        opened = await it.open()
        asking = it.asking(opened, "hello", stream=True, max_tokens=400)
        for version in (1, 2):
            await engine.samples.wait()
            assert await it.gateway.update_weights(folders[version], str(version)) == 1
            engine.samples.clear()
        assert (await asking).status == 200
        await it.finish(opened)
    (turn,) = it.turns()
    assert versions(turn) == [("0", "0"), ("1", "1"), ("2", "2")]
    assert turn.logprobs is not None
    ids = [*turn.prompt_ids.tolist(), *turn.sampled_ids.tolist()]
    start = len(turn.prompt_tokens)
    for segment, folder in zip(turn.facts.segments, folders, strict=True):
        async with TinyEngine(folder) as scorer:
            scoring = Sampling(max_tokens=0, prompt_logprobs_from=start + segment.start)
            scored = await scorer.generate(ids[: start + segment.stop], scoring)
        np.testing.assert_allclose(
            turn.logprobs[segment.start : segment.stop], np.array(scored.prompt_logprobs, np.float64), atol=1e-4
        )


async def test_after_a_load_that_failed_replies_wait_until_weights_are_there(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = checkpoint(tmp_path / "0", 0)
    async with gateway_before(run, InProcessEngine(TinyEngine(folder, version="0"))) as it:
        opened = await it.open()
        with pytest.raises(EngineError, match=r"nowhere.*the gateway is paused"):
            await it.gateway.update_weights(tmp_path / "nowhere", "1")
        refused = await it.call("POST", "/weights/update", {"folder": str(tmp_path / "nowhere"), "version": "1"})
        assert (refused.status, "the gateway is paused" in refused.error) == (500, True)
        assert not [record for record in caplog.records if record.exc_info]
        assert it.gateway.status()["paused"]
        asking = it.asking(opened, "hello", max_tokens=3)
        await eventually(lambda: it.gateway.status()["in_flight"] == 1)
        assert await it.gateway.update_weights(folder, "1") == 0
        assert (await asking).status == 200
        await it.finish(opened)
    (turn,) = it.turns()
    assert versions(turn) == [("1", "1")]
    assert rolltape.read(run).versions() == ("0", "1")


async def test_vllm_has_the_version_that_was_handed_over_with_its_weights(run: Path) -> None:
    reply = Reply([Token(5), Token(6)], "length")
    async with FakeVllm(reply) as server, gateway_before(run, VllmEngine(server.url)) as it:
        opened = await it.open()
        await it.ask(opened, "hello", max_tokens=2)
        await updated(it, "/checkpoints/1", "v1")
        await it.ask(opened, "hello again", max_tokens=2)
        await it.finish(opened)
    first, second = it.turns()
    assert (versions(first), versions(second)) == ([(None, None)], [("v1", "v1")])


async def test_where_an_engine_cannot_load_weights_nothing_is_paused(run: Path) -> None:
    engines = ["llamacpp:http://127.0.0.1:9", "tiny"]
    async with Gateway(engine=engines, model=shipped_model(), tape=run) as gateway:
        with pytest.raises(BadRequest, match=r"llamacpp.*pause the gateway"):
            await gateway.update_weights("/checkpoints/1", "1")
        assert not gateway.status()["paused"]


async def test_a_trainer_that_does_not_wait_for_the_answer_leaves_nothing_half_done(run: Path) -> None:
    async with rig(run) as it:
        it.engine.hold_loads()
        asking = asyncio.ensure_future(updated(it, "/checkpoints/1", "v1"))
        await eventually(lambda: it.engine.loaded == ["/checkpoints/1"])
        asking.cancel()
        await asyncio.wait({asking})
        resuming = asyncio.ensure_future(it.gateway.resume())
        await it.call("GET", "/status")
        assert it.gateway.status()["paused"]
        it.engine.thaw()
        await resuming
        assert not it.gateway.status()["paused"]
        assert it.gateway.status()["version"] == "v1"


async def test_a_version_that_is_no_text_is_refused_before_anything_changes(run: Path) -> None:
    async with rig(run) as it:
        for wrong in (5, "", None):
            with pytest.raises(BadRequest, match="give a text such as '20'"):
                it.gateway.announce(wrong)  # type: ignore[arg-type]
        await it.gateway.pause()
        with pytest.raises(BadRequest, match="version is 5, of type int"):
            await it.gateway.resume(5)  # type: ignore[arg-type]
        await it.gateway.resume("7")
        assert it.gateway.status()["version"] == "7"

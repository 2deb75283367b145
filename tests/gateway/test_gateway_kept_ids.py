"""The ids that top-p kept come from SGLang's API, and stay beside their tokens however a reply is cut and joined."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
from aiohttp import web

from gateways import Rig, scripted
from rolltape.gateway.engines.protocol import Generated, Generation
from rolltape.gateway.engines.sglang.engine import SglangEngine
from rolltape.gateway.gateway import Gateway
from rolltape.gateway.turn.generate import PartialGeneration
from rolltape.gateway.turn.replies import join_side_arrays, keep_ids
from rolltape.records.turn import Finish, LogprobKind
from rolltape.tiny import TinyEngine, shipped_model
from rolltape.tiny.server import EngineServer
from tiny.checkpoints import LIKE_SHIPPED, write_checkpoint


class WatchedEngine(SglangEngine):
    """It says when a reply has begun."""

    def __init__(self, url: str) -> None:
        super().__init__(url, kept_ids=True)
        self.samples = asyncio.Event()

    async def generate(self, wanted: Generation) -> Generated:
        def on_sampled(ids: Sequence[int]) -> None:
            assert wanted.on_sampled is not None
            wanted.on_sampled(ids)
            self.samples.set()

        return await super().generate(msgspec.structs.replace(wanted, on_sampled=on_sampled))


@contextlib.asynccontextmanager
async def random_model(folder: Path) -> AsyncIterator[str]:
    """The address of a model that does not soon end a reply, behind SGLang's API."""
    write_checkpoint(folder, seed=0, **{**LIKE_SHIPPED, "num_hidden_layers": 1, "hidden_size": 64})
    async with TinyEngine(folder, "v0") as engine:
        runner = web.AppRunner(EngineServer(engine, folder).app(), handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        await runner.cleanup()


async def test_a_reply_that_was_interrupted_has_the_kept_ids_of_all_its_tokens(run: Path, tmp_path: Path) -> None:
    async with random_model(tmp_path / "model") as url, aiohttp.ClientSession() as http:
        engine = WatchedEngine(url)
        async with Gateway(engine=engine, model=shipped_model(), tape=run) as gateway:
            it = Rig(gateway, scripted(()), run, http)
            opened = await it.open()
            asking = it.asking(opened, "hello", stream=True, max_tokens=300, top_p=0.2)
            for _ in range(2):
                await engine.samples.wait()
                assert await gateway.pause() == 1
                engine.samples.clear()
                await gateway.resume()
            assert (await asking).status == 200
            await it.finish(opened)
    (turn,) = it.turns()
    assert turn.facts.logprob_kind is LogprobKind.AFTER_TRUNCATION
    kept = turn.side["kept_ids"]
    assert kept.counts is not None
    assert (kept.start, len(kept.counts)) == (len(turn.prompt_tokens), len(turn.sampled_ids))
    rows = np.split(kept.values, np.cumsum(kept.counts)[:-1])
    assert all(token in row for token, row in zip(turn.sampled_ids, rows, strict=True))


def part(start: int, rows: list[list[int]]) -> PartialGeneration:
    ids = np.arange(len(rows), dtype=np.int32)
    counts = np.array([len(row) for row in rows], np.int32)
    values = np.array([token for row in rows for token in row], np.int32)
    side = {"kept_ids": {"start": start, "values": values, "counts": counts}} if rows else {}
    given = Generated(ids=ids, logprobs=None, finish=Finish.ABORT, side_arrays=side)
    return PartialGeneration(scripted(()), given, None, None)  # type: ignore[arg-type]


def test_ragged_side_arrays_are_joined_and_cut_by_tokens_and_not_by_values() -> None:
    parts = [part(5, [[1, 2, 3], [4]]), part(7, [[5], [6, 7, 8], [9]])]
    joined = join_side_arrays(parts)["kept_ids"]
    assert (joined["start"], joined["counts"].tolist()) == (5, [3, 1, 1, 3, 1])
    assert joined["values"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    cut = join_side_arrays(keep_ids(parts, 5, 4))["kept_ids"]
    assert (cut["counts"].tolist(), cut["values"].tolist()) == ([3, 1, 1, 3], [1, 2, 3, 4, 5, 6, 7, 8])

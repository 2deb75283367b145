"""Engines that refuse for a while: asked again ever more slowly, for a stated time, by a clock that the test moves."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from gateways import QUICK, Api, eventually, rig, scripted, text_of
from rolltape.doctor.engine.probing import generation
from rolltape.errors import EngineFailed
from rolltape.gateway.engines.pool import EnginePool
from rolltape.gateway.engines.sglang.engine import SglangEngine
from rolltape.gateway.settings import Patience
from rolltape.gateway.turn.generate import Generator, PartialGeneration, ReplySoFar
from rolltape.gateway.weights import Weights
from rolltape.tiny import shipped_model
from scripted_engine import Mishap, ScriptedEngine, load_tokenizer


class Clock:
    """A time that passes when somebody sleeps."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.time_s

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time_s += seconds


class Asking:
    """One generation after the other from a scripted engine, by a clock of its own."""

    def __init__(self, server: ScriptedEngine, pool: EnginePool, retry_s: float) -> None:
        self.server = server
        self.clock = Clock()
        self.weights = Weights(pool, lambda _: None)
        patience = Patience(retry_s=retry_s)
        self._generator = Generator(pool, self.weights, patience, now=self.clock.now, sleep=self.clock.sleep)

    async def ask(self) -> list[PartialGeneration]:
        reply = ReplySoFar()
        wanted = generation([1, 2, 3], stop_ids=[self.server.end_id])
        await self._generator.run(wanted, reply)
        return reply.parts


@asynccontextmanager
async def asking(mishaps: dict[int, Mishap], *, retry_s: float = 60.0) -> AsyncIterator[Asking]:
    tokenizer: Tokenizer = load_tokenizer(shipped_model())
    async with ScriptedEngine(tokenizer, lambda _: "ok") as server:
        server.mishaps |= mishaps
        pool = EnginePool([SglangEngine(server.url)])
        try:
            yield Asking(server, pool, retry_s)
        finally:
            await pool.close()


async def test_errors_that_pass_are_outlasted_with_pauses_that_grow_and_vary() -> None:
    async with asking(dict.fromkeys(range(7), Mishap.ERROR_500)) as it:
        (part,) = await it.ask()
        assert part.given.ids.tolist() == it.server.said[-1].ids
        bounds = [0.1 * 2**tries for tries in range(7)]
        assert all(most / 2 <= pause <= most for pause, most in zip(it.clock.slept, bounds, strict=True))
        assert len({pause / most for pause, most in zip(it.clock.slept, bounds, strict=True)}) > 1


async def test_an_engine_is_given_up_when_the_stated_time_is_over() -> None:
    async with asking(dict.fromkeys(range(999), Mishap.ERROR_500), retry_s=40) as it:
        with pytest.raises(EngineFailed, match=r"errors of the engine in 40 s.*answered 500.*--engine-retry"):
            await it.ask()
        assert it.clock.time_s == pytest.approx(40)
        assert 8 <= it.server.requests <= 16


async def test_what_an_engine_asks_to_wait_is_waited() -> None:
    async with asking(dict.fromkeys(range(3), Mishap.BUSY)) as it:
        await it.ask()
        assert it.clock.slept == [7.0, 7.0, 7.0]


async def test_an_engine_that_asks_for_more_than_the_stated_time_is_given_up_at_once() -> None:
    async with asking({0: Mishap.BUSY}, retry_s=5) as it:
        with pytest.raises(EngineFailed, match="asks to wait 7 s"):
            await it.ask()
        assert it.clock.slept == []


async def test_an_engine_that_aborts_every_reply_at_once_is_given_up_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with asking(dict.fromkeys(range(9999), Mishap.ABORTED_AT_ONCE)) as it:
        with pytest.raises(EngineFailed, match=r"in 60 s.*aborts the reply before the first token"):
            await it.ask()
        assert it.clock.time_s == pytest.approx(60)
        assert it.server.requests < 30
    assert "aborts the reply before the first token" in caplog.text


async def test_a_reply_that_goes_on_after_aborts_has_its_time_anew() -> None:
    mishaps = {0: Mishap.ERROR_500, 1: Mishap.ABORTED, 2: Mishap.ERROR_500}
    async with asking(mishaps, retry_s=0.11) as it:  # less than two pauses, if they added up
        parts = await it.ask()
        assert [part.given.finish.value for part in parts] == ["abort", "stop"]
        assert len(it.clock.slept) == 2


async def test_errors_that_time_does_not_heal_are_not_retried() -> None:
    async with asking({0: Mishap.REFUSED}) as it:
        with pytest.raises(EngineFailed, match=r"an error of the engine.*400"):
            await it.ask()
        assert it.clock.slept == []


async def test_a_caller_who_leaves_is_not_waited_for(run: Path) -> None:
    engine = scripted(["ok"])
    engine.mishaps |= dict.fromkeys(range(99), Mishap.BUSY)
    async with rig(run, engine, patience={**QUICK, "retry_s": 3600}) as it:
        opened = await it.open()
        asked = it.asking(opened, "hello")
        await eventually(lambda: engine.requests == 1)
        asked.cancel()
        await asyncio.wait([asked])
        done = await it.finish(opened)
        assert done["turns"] == 1


async def test_a_session_says_whether_an_engine_keeps_it_waiting(run: Path) -> None:
    engine = scripted(["ok", "ok"])
    engine.mishaps |= {0: Mishap.HANG, 1: Mishap.REFUSED}
    async with rig(run, engine) as it:
        session = await it.gateway.open_session(task_id="t")
        assert session.engine_wait() == (0, 0.0, None)
        opened = {"session": session.id, "key": session.key}
        hanging = it.asking(opened, "hello")
        await eventually(lambda: engine.requests == 1)
        waits = session.engine_wait()
        assert (waits.turns, waits.error) == (1, None)
        assert waits.longest_s > 0
        hanging.cancel()
        await eventually(lambda: session.engine_wait().turns == 0)
        assert (await it.ask(opened, "again")).status == 502
        await eventually(lambda: session.engine_wait().error is not None)
        assert "answered 400" in (session.engine_wait().error or "")
        assert text_of(Api.CHAT, await it.ask(opened, "once more")) == "ok"
        assert session.engine_wait() == (0, 0.0, None)


async def test_an_engine_that_is_busy_leaves_the_session_to_another(run: Path) -> None:
    busy, free = (ScriptedEngine(load_tokenizer(shipped_model()), lambda _: "ok") for _ in range(2))
    busy.mishaps |= dict.fromkeys(range(99), Mishap.BUSY)
    async with busy, free:
        pool = EnginePool([SglangEngine(server.url) for server in (busy, free)])
        it = Asking(busy, pool, retry_s=5)
        (part,) = await it.ask()
        assert part.engine is pool.engines[1]
        assert (busy.requests, free.requests) == (1, 1)
        assert sum(it.clock.slept) < 1  # not the seconds that the busy one asked for
        await it.ask()
        assert busy.requests == 1
        await pool.close()


def test_the_old_name_of_the_stated_time_still_holds() -> None:
    with pytest.warns(DeprecationWarning, match="retry_s"):
        assert Patience(no_engine_s=5.0).retry_s == 5.0

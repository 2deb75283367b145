"""Several engines as one: sessions keep to theirs, and move when it is down."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest
from tokenizers import Tokenizer

from rolltape.doctor.engine.probing import generation
from rolltape.errors import EngineDied, EngineError, EngineFault, EngineUnreachable
from rolltape.gateway.engines import pool as pool_module
from rolltape.gateway.engines.pool import EnginePool
from rolltape.gateway.engines.sglang.engine import SglangEngine
from rolltape.gateway.turn.generate import describe_generated
from scripted_engine import ScriptedEngine


@contextlib.asynccontextmanager
async def serving(tokenizer: Tokenizer, count: int) -> AsyncIterator[tuple[list[ScriptedEngine], EnginePool]]:
    servers = [ScriptedEngine(tokenizer, lambda asked: "fine", context=1000 + at) for at in range(count)]
    for server in servers:
        await server.listen()
    pool = EnginePool([SglangEngine(server.url) for server in servers])
    try:
        yield servers, pool
    finally:
        await pool.close()
        for server in servers:
            await server.refuse()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


async def test_sessions_stick_and_new_ones_go_where_the_fewest_are(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, 2) as (_, pool):
        one, two = pool.engines
        assert [pool.pick("a"), pool.pick("b"), pool.pick("c")] == [one, two, one]
        assert [pool.pick("a"), pool.pick("b"), pool.pick("c")] == [one, two, one]
        pool.release("a")
        pool.release("c")
        pool.release("never seen")
        assert [row.sessions for row in pool.health()] == [0, 1]
        assert pool.pick("d") is one


async def test_an_engine_that_goes_away_loses_its_sessions_and_comes_back(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_FIRST_PROBE_S", 0.02)
    async with serving(tokenizer, 2) as (servers, pool):
        one, two = pool.engines
        assert pool.pick("a") is one
        await servers[0].refuse()
        pool.failed(one, EngineUnreachable("gone"))
        assert pool.pick("a") is two
        assert [row.up for row in pool.health()] == [False, True]
        await servers[0].listen()
        await until(lambda: pool.health()[0].up)
        assert pool.health()[0].error is None
        assert pool.pick("a") is two  # it stays where its prefix is cached
        assert pool.pick("b") is one


async def test_an_error_alone_puts_no_engine_aside_unless_it_fails_to_answer(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_FIRST_PROBE_S", 0.02)
    async with serving(tokenizer, 1) as (servers, pool):
        (engine,) = pool.engines
        pool.failed(engine, EngineFault("nonsense"))
        assert pool.pick("a") is engine
        await until(lambda: pool.health()[0].facts is not None)
        assert pool.health()[0].up
        await servers[0].refuse()
        pool.failed(engine, EngineFault("nonsense"))
        await until(lambda: not pool.health()[0].up)
        with pytest.raises(EngineUnreachable, match="none of 1 engines is up"):
            pool.pick("a")


async def test_all_that_wait_for_an_engine_share_the_look_whether_it_answers(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, 1) as ((server,), pool):
        (engine,) = pool.engines
        server.freeze()
        looks = [asyncio.ensure_future(pool.still_answers(engine, 60.0)) for _ in range(5)]
        await until(lambda: server.looks == 1)
        looks.append(asyncio.ensure_future(pool.still_answers(engine, 60.0)))
        looks[0].cancel()  # the others go on waiting
        server.thaw()
        await asyncio.gather(*looks[1:])
        await pool.still_answers(engine, 60.0)  # it answered a moment ago
        assert server.looks == 1
        with pytest.raises(asyncio.CancelledError):
            await looks[0]


async def test_all_down_is_said_with_every_reason(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, 2) as (servers, pool):
        for server in servers:
            await server.refuse()
        rows = await pool.look()
        assert [row.up for row in rows] == [False, False]
        with pytest.raises(EngineUnreachable, match=f"{servers[0].url}.*{servers[1].url}"):
            pool.pick("a")


async def test_what_all_of_them_share(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, 2) as (_, pool):
        assert pool.context is None
        rows = await pool.look()
        assert [row.facts.context for row in rows if row.facts] == [1000, 1001]
        assert pool.context == 1000
        assert "temperature" in pool.applies
        assert pool.token_faithful
        pool.failed(pool.engines[1], EngineDied("half way"))
        assert pool.health()[1].error == "half way"


def test_a_pool_of_none_is_refused() -> None:
    with pytest.raises(EngineError, match="at least one"):
        EnginePool([])


async def test_what_an_engine_gives_is_said_in_one_line(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, 1) as (servers, pool):
        (engine,) = pool.engines
        wanted = generation([1], stop_ids=[servers[0].end_id])
        line = describe_generated(engine, wanted, await engine.generate(wanted))
        assert line == f"{engine.name}: ids, logprobs after temperature, the stop id kept, weight version v0"

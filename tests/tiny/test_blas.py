"""BLAS has one thread while an engine runs, and gets its own back."""

import asyncio
from pathlib import Path

from threadpoolctl import (  # type: ignore[import-not-found, import-untyped, unused-ignore]
    ThreadpoolController,
    threadpool_limits,
)

from rolltape.tiny import Sampling, TinyEngine
from rolltape.tiny.linear import one_blas_thread


def threads() -> set[int]:
    return {library.get_num_threads() for library in ThreadpoolController().select(user_api="blas").lib_controllers}


async def test_engines_that_overlap_each_run_on_one_thread_and_the_last_gives_them_back(small: Path) -> None:
    before = threads()
    sampling = Sampling(seed=1, max_tokens=3, stop_ids=())
    first, second = TinyEngine(small), TinyEngine(small)
    assert threads() == before
    async with first:
        await first.generate([1], sampling)
        assert threads() == {1}
        await second.__aenter__()
    await second.generate([1], sampling)
    assert threads() == {1}
    await second.close()
    assert threads() == before


async def test_it_holds_again_when_something_else_changed_it(small: Path) -> None:
    async with TinyEngine(small) as engine:
        await engine.generate([1], Sampling(max_tokens=1))
        with threadpool_limits(limits=2, user_api="blas"):
            reply = asyncio.create_task(engine.generate([1], Sampling(max_tokens=50, stop_ids=())))
            await reply
            assert threads() == {1}


async def test_it_holds_where_another_thread_has_set_a_limit_and_keeps_it(small: Path) -> None:
    before = threads()
    with threadpool_limits(limits=1, user_api="blas"), threadpool_limits(limits=2, user_api="blas"):
        async with TinyEngine(small) as engine:
            await engine.generate([1], Sampling(max_tokens=1))
            assert threads() == {1}
    assert threads() == before


def test_a_thread_of_its_own_can_take_it_after_the_main_thread_let_go() -> None:
    before = threads()
    with one_blas_thread():
        assert threads() == {1}
    assert threads() == before

    def inside() -> set[int]:
        with one_blas_thread():
            return threads()

    assert asyncio.run(asyncio.to_thread(inside)) == {1}
    assert threads() == before

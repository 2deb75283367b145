"""What prompts begin with in common is read once, and the replies are those of an engine that reads it each time."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltape.records.turn import Finish
from rolltape.tiny import EngineReply, InFlightPolicy, Sampling, TinyEngine
from rolltape.tiny.attention import Cache
from rolltape.tiny.checkpoint import ModelConfig
from rolltape.tiny.prefixes import PROMPT_PIECE, Prefixes
from tiny.test_engine import ENDLESS, live_caches, resident_mb
from tiny.test_invariance import bits

PIECE_MB = 1 / 8  # of the small checkpoint
SHORT = Sampling(seed=7, max_tokens=12, stop_ids=())


def ids(seed: int, count: int) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(0, 320, count).tolist()
    return drawn


@asynccontextmanager
async def cold_and_warm(folder: Path) -> AsyncIterator[tuple[TinyEngine, TinyEngine]]:
    """One engine that keeps nothing, one that does."""
    async with TinyEngine(folder, prefix_cache_mb=0) as cold, TinyEngine(folder) as warm:
        yield cold, warm


@pytest.mark.parametrize("folder", ["small", "shaped"])
async def test_each_turn_of_a_dialogue_takes_over_the_whole_pieces_of_the_last(
    folder: str, request: pytest.FixtureRequest
) -> None:
    samplings = [
        Sampling(temperature=0, max_tokens=40, stop_ids=()),
        Sampling(seed=1, max_tokens=40, stop_ids=()),
        Sampling(seed=2, temperature=0.7, top_p=0.9, max_tokens=40, stop_ids=()),
        Sampling(seed=3, top_k=20, max_tokens=40, stop_ids=(), top_logprobs=3),
    ]
    async with cold_and_warm(request.getfixturevalue(folder)) as (cold, warm):
        said, before = ids(0, 300), 0
        for turn, sampling in enumerate(samplings):
            first, again = await cold.generate(said, sampling), await warm.generate(said, sampling)
            assert bits(first) == bits(again)
            assert first.top_logprobs == again.top_logprobs
            assert (first.cached_tokens, again.cached_tokens) == (0, before // PROMPT_PIECE * PROMPT_PIECE)
            before = len(said)
            said = [*said, *again.ids.tolist(), *ids(turn, 100)]


async def test_branches_share_what_they_have_in_common_and_nothing_else(small: Path) -> None:
    async with cold_and_warm(small) as (cold, warm):
        trunk = ids(0, 300)
        branches = [[*trunk, *ids(index, 150)] for index in range(1, 7)]
        expected = [bits(await cold.generate(branch, SHORT)) for branch in branches]
        await warm.generate(trunk, SHORT)
        replies = await asyncio.gather(*(warm.generate(branch, SHORT) for branch in branches))
        assert [bits(reply) for reply in replies] == expected
        assert [reply.cached_tokens for reply in replies] == [256] * 6
        assert (await warm.generate([trunk[0] + 1, *trunk[1:]], SHORT)).cached_tokens == 0
        assert (await warm.generate([*trunk[:200], *ids(9, 100)], SHORT)).cached_tokens == 128


async def test_many_replies_to_one_prompt_read_it_once(small: Path) -> None:
    async with cold_and_warm(small) as (cold, warm):
        samplings = [Sampling(seed=seed, max_tokens=12, stop_ids=()) for seed in range(8)]
        prompt = ids(0, 600)
        expected = [bits(await cold.generate(prompt, sampling)) for sampling in samplings]
        replies = await asyncio.gather(*(warm.generate(prompt, sampling) for sampling in samplings))
        assert [bits(reply) for reply in replies] == expected
        assert sum(reply.cached_tokens for reply in replies) == 7 * 512


async def test_the_last_token_and_those_that_are_scored_are_always_read(small: Path) -> None:
    async with cold_and_warm(small) as (cold, warm):
        prompt = ids(0, 384)
        await warm.generate(prompt, SHORT)
        for first, cached in ((None, 256), (0, 0), (1, 0), (128, 0), (129, 128), (256, 128), (257, 256), (999, 256)):
            sampling = Sampling(seed=1, max_tokens=5, stop_ids=(), prompt_logprobs_from=first)
            reply = await warm.generate(prompt, sampling)
            assert reply.cached_tokens == cached
            assert reply.prompt_logprobs == (await cold.generate(prompt, sampling)).prompt_logprobs


async def test_the_least_recently_used_gives_way(small: Path) -> None:
    async with TinyEngine(small, prefix_cache_mb=4 * PIECE_MB) as engine:
        first, second, third = ids(1, 300), ids(2, 300), ids(3, 300)

        async def cached(prompt: list[int]) -> int:
            return (await engine.generate(prompt, SHORT)).cached_tokens

        assert [await cached(prompt) for prompt in (first, second, first)] == [0, 0, 256]
        assert [await cached(prompt) for prompt in (third, first, third, second)] == [0, 256, 256, 0]
        longer = ids(4, 1000)
        assert await cached(longer) == 0
        assert await cached(longer) == 512  # of a prompt larger than the room, its beginning stays
        assert len(engine._batch.weights.prefixes) == 4


async def test_other_weights_begin_without_any(small: Path, small_next: Path) -> None:
    prompt = ids(0, 300)
    async with TinyEngine(small_next) as fresh:
        expected = bits(await fresh.generate(prompt, SHORT))
    async with TinyEngine(small, "1") as engine:
        await engine.generate(prompt, SHORT)
        await engine.announce("1b")
        assert (await engine.generate(prompt, SHORT)).cached_tokens == 256  # the same weights by another name
        older = asyncio.create_task(engine.generate(ids(5, 1500), SHORT))
        await asyncio.sleep(0.01)
        await engine.load_weights(small_next, "2", in_flight=InFlightPolicy.FINISH)
        reply = await engine.generate(prompt, SHORT)
        assert (bits(reply), reply.cached_tokens, reply.version) == (expected, 0, "2")
        assert (await older).version == "1b"
        # What was read meanwhile with the weights of before is not taken for these.
        assert (await engine.generate(ids(5, 1500), SHORT)).cached_tokens == 0
        assert (await engine.generate(prompt, SHORT)).cached_tokens == 256
        await engine.drop_prefixes()
        assert (await engine.generate(prompt, SHORT)).cached_tokens == 0


async def test_what_an_aborted_request_has_read_is_there_for_the_next(small: Path) -> None:
    async with cold_and_warm(small) as (cold, warm):
        prompt = ids(0, 3500)
        task = asyncio.create_task(warm.generate(prompt, SHORT))
        while len(warm._batch.weights.prefixes) < 3:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await warm.pause()  # answers between two steps, after the abort
        assert live_caches() == 0
        await warm.resume()
        reply = await warm.generate(prompt, SHORT)
        assert 3 * PROMPT_PIECE <= reply.cached_tokens < 3500
        assert bits(reply) == bits(await cold.generate(prompt, SHORT))
        async with aclosing(warm.stream(prompt, ENDLESS)) as pieces:
            async for _ in pieces:
                break
        assert (await warm.generate(prompt, SHORT)).cached_tokens == 27 * PROMPT_PIECE


async def test_a_piece_of_a_stream_says_how_much_was_taken_over(small: Path) -> None:
    async with TinyEngine(small) as engine:
        await engine.generate(ids(0, 300), SHORT)
        assert {piece.cached_tokens async for piece in engine.stream(ids(0, 300), SHORT)} == {256}


async def test_it_can_be_turned_off(small: Path) -> None:
    async with TinyEngine(small, prefix_cache_mb=0) as engine:
        for _ in range(2):
            assert (await engine.generate(ids(0, 300), SHORT)).cached_tokens == 0
        assert len(engine._batch.weights.prefixes) == 0


@pytest.mark.slow
async def test_64_at_once_with_random_cancellations_share_and_do_not_leak(small: Path) -> None:
    trunks = [ids(index, 400) for index in range(4)]
    prompts = [[*trunks[index % 4][: 100 + 5 * index], *ids(index, index)] for index in range(64)]
    samplings = [Sampling(seed=index, max_tokens=20, stop_ids=()) for index in range(64)]
    async with TinyEngine(small, prefix_cache_mb=0) as cold:
        expected = [
            bits(await cold.generate(prompt, sampling)) for prompt, sampling in zip(prompts, samplings, strict=True)
        ]
    dice = random.Random(0)
    async with TinyEngine(small, max_running=48, prefix_cache_mb=7 * PIECE_MB) as engine:

        async def one(index: int) -> EngineReply | None:
            task = asyncio.create_task(engine.generate(prompts[index], samplings[index]))
            if dice.random() < 0.5:
                await asyncio.sleep(dice.random() * 0.3)
                task.cancel()
            done = (await asyncio.gather(task, return_exceptions=True))[0]
            if not isinstance(done, EngineReply):
                assert isinstance(done, asyncio.CancelledError)
                return None
            assert done.finish is Finish.LENGTH
            assert bits(done) == expected[index]
            return done

        async def round_of_64() -> list[EngineReply]:
            return [reply for reply in await asyncio.gather(*map(one, range(64))) if reply is not None]

        assert any(reply.cached_tokens for reply in await round_of_64())
        before = resident_mb()
        for _ in range(4):
            await round_of_64()
        await engine.pause()
        assert live_caches() == 0
        assert resident_mb() - before < 20
        prefixes = engine._batch.weights.prefixes
        assert sorted([*prefixes._slots.values(), *prefixes._free]) == list(range(7))


LEAST = ModelConfig(
    hidden_size=2,
    intermediate_size=2,
    layers=1,
    heads=1,
    kv_heads=1,
    head_dim=2,
    vocab_size=2,
    context=512,
    rope_theta=1.0,
    norm_eps=0.0,
    tied=True,
    eos_ids=(),
)


def filled(prompt: list[int]) -> Cache:
    """A cache as if the prompt were read: what stands at a place tells of all ids before it."""
    cache = Cache(LEAST, len(prompt))
    cache.values[:] = np.cumsum(np.array(prompt) * (1 + np.arange(len(prompt))))[:, None]
    return cache


@given(data=st.data())
def test_what_is_taken_is_what_was_kept_for_the_same_ids(data: st.DataObject) -> None:
    room = data.draw(st.integers(1, 6))
    prefixes = Prefixes(LEAST, room * 2 * PROMPT_PIECE * 2 * 4 / 2**20)
    for _ in range(data.draw(st.integers(1, 12))):
        pieces = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=4))
        prompt = [token for piece in pieces for token in [piece] * PROMPT_PIECE]
        keys, read = prefixes.keys(prompt), filled(prompt)
        mine = Cache(LEAST, len(prompt))
        count = prefixes.take(keys, 0, mine)
        upto = count * PROMPT_PIECE
        np.testing.assert_array_equal(mine.values[..., :upto, :], read.values[..., :upto, :])
        for index in range(count, len(keys)):
            prefixes.keep(keys[: index + 1], read)
        assert len(prefixes) <= room
        assert prefixes.take(keys, 0, mine) >= min(len(keys), room)

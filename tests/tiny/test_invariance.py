"""A reply does not depend on what else is in the batch, to the last bit."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from rolltape.tiny import EngineReply, Sampling, TinyEngine
from rolltape.tiny import linear as linear_module
from rolltape.tiny.attention import Cache, TokenSpan
from rolltape.tiny.linear import Linear, one_blas_thread, proven_row_counts
from rolltape.tiny.model import Qwen3


def bits(reply: EngineReply) -> tuple[list[int], bytes, bytes]:
    return reply.ids.tolist(), reply.raw_logprobs.tobytes(), reply.tempered_logprobs.tobytes()


def request(index: int, vocab: int) -> tuple[list[int], Sampling]:
    """Prompts from one id to several pieces, sampled in every way."""
    rng = np.random.default_rng(index)
    sampling = Sampling(
        seed=index,
        temperature=[1.0, 0.7, 0.0, 1.3][index % 4],
        top_p=[1.0, 0.9][index % 2],
        top_k=[None, 20, None][index % 3],
        max_tokens=int(rng.integers(1, 60)),
        stop_ids=(),
    )
    return rng.integers(0, vocab, rng.choice([1, 3, 40, 127, 128, 129, 300])).tolist(), sampling


@pytest.mark.parametrize("folder", ["small", "shaped"])
async def test_replies_are_the_same_alone_and_in_any_company(folder: str, request_: pytest.FixtureRequest) -> None:
    async with TinyEngine(request_.getfixturevalue(folder)) as engine:
        asked = [request(index, engine.config.vocab_size) for index in range(24)]
        alone = [bits(await engine.generate(prompt, sampling)) for prompt, sampling in asked]
        for seed in range(2):
            rng = np.random.default_rng(seed)
            order = rng.permutation(len(asked))
            delays = rng.exponential(0.05, len(asked))

            async def late(
                index: int, delays: "np.ndarray[tuple[int], np.dtype[np.float64]]" = delays
            ) -> tuple[list[int], bytes, bytes]:
                await asyncio.sleep(delays[index])
                return bits(await engine.generate(*asked[index]))

            together = await asyncio.gather(*(late(index) for index in order))
            assert together == [alone[index] for index in order]


@pytest.fixture
def request_(request: pytest.FixtureRequest) -> pytest.FixtureRequest:
    return request


def test_a_row_has_the_same_logits_whatever_rows_stand_beside_it(shaped: Path) -> None:
    model = Qwen3(shaped)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 4096, (24, 70)).tolist()

    def after(rows: list[int], length: int) -> dict[int, bytes]:
        caches = {row: Cache(model.config, 80) for row in rows}
        model.forward([TokenSpan(caches[row], ids[row][:length], 0, 0) for row in rows])
        logits = model.forward([TokenSpan(caches[row], [ids[row][length]], length, 1) for row in rows])
        return {row: logits[place].tobytes() for place, row in enumerate(rows)}

    with one_blas_thread():
        for length in (1, 5, 64):
            alone = {row: after([row], length)[row] for row in range(24)}
            for count in (2, 3, 5, 9, 17, 24):
                rows = rng.permutation(24)[:count].tolist()
                assert after(rows, length) == {row: alone[row] for row in rows}


@pytest.mark.parametrize("depth", [10, 60, 64, 128, 160, 256])
def test_row_counts_are_shown_to_agree_before_they_are_used(depth: int) -> None:
    counts = proven_row_counts(depth)
    assert counts == (1,) or 4 in counts
    assert list(counts) == sorted(set(counts))


def test_a_blas_that_treats_rows_differently_gets_one_row_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = np.random.default_rng(0).standard_normal((300, 400), dtype=np.float32)
    rows = np.random.default_rng(1).standard_normal((8, 400), dtype=np.float32)
    usual = Linear(weight)(rows)
    monkeypatch.setattr(linear_module, "proven_row_counts", lambda depth: (1,))
    one_by_one = Linear(weight)
    assert one_by_one.tile == 1
    np.testing.assert_allclose(one_by_one(rows), usual, rtol=1e-5, atol=1e-4)
    assert one_by_one(rows)[3].tobytes() == one_by_one(rows[3:4])[0].tobytes()


def test_columns_are_the_weights(shaped: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((300, 400), dtype=np.float32)
    np.testing.assert_array_equal(Linear(weight).columns(np.array([0, 131, 299])), weight[[0, 131, 299]])

"""Sampling follows the distribution that temperature, top-k and top-p leave."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import chisquare  # type: ignore[import-untyped, unused-ignore]

from rolltape.errors import SamplingError
from rolltape.tiny import Sampling, TinyEngine
from rolltape.tiny.sampling import Draws, choose, kept, pick


def plain_reference(weights: npt.NDArray[np.float64], top_k: int | None, top_p: float) -> list[int]:
    """Sort everything; keep the k best; of those keep ids until their share reaches top-p."""
    order = sorted(range(len(weights)), key=lambda token: -weights[token])[:top_k]
    total = math.fsum(weights[order])
    chosen: list[int] = []
    share = 0.0
    for token in order:
        if share >= top_p and chosen:
            break
        chosen.append(token)
        share += weights[token] / total
    return sorted(chosen)


def test_top_k_and_top_p_keep_what_a_plain_reference_keeps() -> None:
    rng = np.random.default_rng(0)
    for trial in range(400):
        size = int(rng.integers(1, 500))
        weights = np.exp(rng.standard_normal(size) * rng.uniform(0.1, 5))
        weights /= weights.sum()
        top_k = None if trial % 3 == 0 else int(rng.integers(1, size + 5))
        top_p = 1.0 if trial % 4 == 0 else float(rng.uniform(0.01, 0.999))
        ids = kept(weights, Sampling(top_k=top_k, top_p=top_p))
        assert (list(range(size)) if ids is None else ids.tolist()) == plain_reference(weights, top_k, top_p)


def test_ties_with_the_kth_are_kept() -> None:
    ids = kept(np.array([0.1, 0.3, 0.3, 0.3]), Sampling(top_k=2))
    assert ids is not None
    assert ids.tolist() == [1, 2, 3]


def test_an_id_without_weight_is_never_picked() -> None:
    weights = np.array([0.0, 0.5, 0.0, 0.5, 0.0])
    picked = {pick(weights, None, uniform) for uniform in (0.0, 0.25, 0.5, 0.75, math.nextafter(1, 0))}
    assert picked == {1, 3}


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.6}, {"temperature": 1.5, "top_k": 5}, {"top_p": 0.8}, {"top_k": 6, "top_p": 0.7}],
    ids=str,
)
def test_sampled_ids_follow_the_distribution(settings: dict[str, Any]) -> None:
    logits = np.random.default_rng(3).standard_normal(12).astype(np.float32) * np.float32(0.7)
    sampling = Sampling(**settings)
    probabilities = np.exp(logits.astype(np.float64) / sampling.temperature)
    probabilities /= probabilities.sum()
    allowed = plain_reference(probabilities, sampling.top_k, sampling.top_p)
    expected = np.zeros(12)
    expected[allowed] = probabilities[allowed] / probabilities[allowed].sum()
    count = 20_000
    choices = choose(np.tile(logits, (count, 1)), [sampling] * count, [Draws(seed, 7) for seed in range(count)])
    observed = np.bincount([choice.id for choice in choices if choice is not None], minlength=12)
    assert observed[expected == 0].sum() == 0
    assert chisquare(observed[allowed], expected[allowed] * count).pvalue > 1e-4


def test_one_stream_of_draws_is_uniform_over_positions() -> None:
    draws = Draws(5, 0)
    observed, _ = np.histogram([draws.next() for _ in range(20_000)], bins=20, range=(0, 1))
    assert chisquare(observed).pvalue > 1e-4


def test_draws_are_a_function_of_seed_and_position() -> None:
    whole = Draws(9, 0)
    values = [whole.next() for _ in range(50)]
    for start in (1, 2, 3, 4, 7, 49):
        assert Draws(9, start).next() == values[start]
    assert Draws(10, 0).next() != values[0]


async def test_the_engine_samples_the_models_distribution_on_a_slice(small: Path) -> None:
    """The first token of many replies, against the logprobs that the engine reports for the likeliest ids."""
    async with TinyEngine(small) as engine:
        prompt = [5, 9, 20]
        first = await engine.generate(prompt, Sampling(seed=0, max_tokens=1, stop_ids=(), top_logprobs=320))
        probabilities = np.zeros(engine.config.vocab_size)
        for entry in first.top_logprobs[0]:
            probabilities[entry.id] = math.exp(entry.raw)
        assert probabilities.sum() == pytest.approx(1, abs=1e-4)
        best = np.argsort(-probabilities)[:20]
        counts = np.zeros(engine.config.vocab_size)
        for seed in range(1500):
            reply = await engine.generate(prompt, Sampling(seed=seed, max_tokens=1, stop_ids=()))
            counts[reply.ids[0]] += 1
    observed = [*counts[best], counts.sum() - counts[best].sum()]
    expected = [*probabilities[best], 1 - probabilities[best].sum()]
    assert chisquare(observed, np.array(expected) * 1500).pvalue > 1e-4


async def test_greedy_takes_the_best_and_reports_raw_logprobs(small: Path) -> None:
    async with TinyEngine(small) as engine:
        sampling = Sampling(temperature=0, max_tokens=30, stop_ids=(), top_logprobs=1)
        reply = await engine.generate([1, 2, 3], sampling)
        assert reply.ids.tolist() == [top[0].id for top in reply.top_logprobs]
        assert reply.tempered_logprobs.tobytes() == reply.raw_logprobs.tobytes()
        again = await engine.generate([1, 2, 3], sampling)
        assert again.ids.tolist() == reply.ids.tolist()


async def test_a_reply_cut_and_continued_is_the_uninterrupted_one(small: Path) -> None:
    async with TinyEngine(small) as engine:
        whole = await engine.generate([4, 5], Sampling(seed=11, max_tokens=40, stop_ids=()))
        head = await engine.generate([4, 5], Sampling(seed=11, max_tokens=15, stop_ids=()))
        rest = await engine.generate([4, 5, *head.ids.tolist()], Sampling(seed=11, max_tokens=25, stop_ids=()))
        assert [*head.ids.tolist(), *rest.ids.tolist()] == whole.ids.tolist()
        np.testing.assert_allclose(rest.raw_logprobs, whole.raw_logprobs[15:], atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": 0},
        {"seed": -1},
        {"seed": 2**64},
        {"max_tokens": -1},
        {"top_logprobs": -1},
        {"stop_strings": ("a", "")},
    ],
    ids=str,
)
def test_parameters_out_of_range_are_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(SamplingError, match=next(iter(settings))):
        Sampling(**settings)

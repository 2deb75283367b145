"""Measures the distribution of an engine's logprobs: raw, after temperature, or after truncation.

Each place is sampled twice: at temperature 0.5 with top-k 3, and at temperature 1 without truncation, where all kinds
are equal. The second sample gives the most likely ids with their raw logprobs. From these the logprob of the first
sample's id under each kind is computed. The kind that is closest over all places is the measured one.
"""

import math
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
import numpy as np

from rolltape.doctor.engine.probing import EngineProbe
from rolltape.gateway.engines.protocol import TOP_LOGPROBS
from rolltape.records.turn import LogprobKind

TEMPERATURE = 0.5
TOP_K = 3
PLACES = 12  # wanted number of places
_PROMPTS = 6
_STEPS = range(0, 24, 3)  # places along a greedy reply, where a model has some uncertainty
_TOPS = 20  # vLLM's default maximum
_TRIES = 6  # samples per place at temperature 1, if the engine does not list the most likely ids
_KNOWN = 0.1  # nats: the largest effect of unlisted ids on a tempered logprob
_CLEAR = 0.2  # nats: kinds with a smaller difference cannot be distinguished at a place
_NEAR = 0.15  # nats, on average: the largest difference by half-precision arithmetic
_ENOUGH_PLACES = 3


class MeasuredKind(msgspec.Struct, frozen=True, kw_only=True):
    """The kind that fits best, and the average distance of each kind from the engine's logprobs."""

    kind: LogprobKind | None  # None if none fits, or if too few places distinguish the kinds
    places: int  # at which the kinds differ
    distances: Mapping[LogprobKind, float] = {}  # only RAW for an engine that does not list the most likely ids


async def measure_kind(probe: EngineProbe) -> MeasuredKind:
    """Sample twice at places with some uncertainty, and return the kind that explains the logprobs."""
    setting: dict[str, Any] = {"temperature": TEMPERATURE}
    if "top_k" in probe.engine.applies:
        setting["top_k"] = TOP_K
    by_place: list[dict[LogprobKind, float]] = []
    async for prompt in _places(probe):
        given = await probe.sample(prompt, max_tokens=1, **setting)
        if given.logprobs is None or len(given.ids) != 1 or math.isnan(given.logprobs[0]):
            continue
        expected = _expected(await _raw_logprobs(probe, prompt), int(given.ids[0]), setting.get("top_k"))
        if not expected or max(expected.values()) - min(expected.values()) <= _CLEAR:
            continue
        kinds = expected if TOP_LOGPROBS in probe.engine.applies else [LogprobKind.RAW]
        by_place.append({kind: abs(float(given.logprobs[0]) - expected[kind]) for kind in kinds})
        if len(by_place) == PLACES:
            break
    return _closest(by_place)


async def _places(probe: EngineProbe) -> AsyncIterator[list[int]]:
    for _ in range(_PROMPTS):
        prompt = probe.noise(24)
        reply = (await probe.sample(prompt, temperature=0.0, max_tokens=_STEPS.stop)).ids.tolist()
        for step in _STEPS:
            if step < len(reply):
                yield [*prompt, *reply[:step]]


def _closest(by_place: list[dict[LogprobKind, float]]) -> MeasuredKind:
    if len(by_place) < _ENOUGH_PLACES:
        return MeasuredKind(kind=None, places=len(by_place))
    distances = {kind: float(np.mean([one[kind] for one in by_place])) for kind in by_place[0]}
    best = min(distances, key=lambda kind: distances[kind])
    return MeasuredKind(kind=best if distances[best] <= _NEAR else None, places=len(by_place), distances=distances)


async def _raw_logprobs(probe: EngineProbe, prompt: list[int]) -> dict[int, float]:
    """The raw logprobs of the most likely next ids."""
    if TOP_LOGPROBS in probe.engine.applies:
        given = await probe.sample(prompt, max_tokens=1, temperature=1.0, top_logprobs=_TOPS)
        if not len(given.ids):
            return {}
        ids, values = (given.side_arrays[f"top_{_TOPS}_{what}"]["values"][0].tolist() for what in ("ids", "logprobs"))
        return {token: value for token, value in zip(ids, values, strict=True) if token >= 0}
    seen: dict[int, float] = {}
    for _ in range(_TRIES):
        given = await probe.sample(prompt, max_tokens=1, temperature=1.0)
        if given.logprobs is not None:
            pairs = zip(given.ids.tolist(), given.logprobs.tolist(), strict=True)
            seen |= {token: value for token, value in pairs if not math.isnan(value)}
    return seen


def _expected(raw: Mapping[int, float], token: int, top_k: int | None) -> dict[LogprobKind, float]:
    """The logprob of an id under each kind that can be computed."""
    if token not in raw:
        return {}
    tempered = {one: value / TEMPERATURE for one, value in raw.items()}
    known = _log_sum(list(tempered.values()))
    # The other ids are at most as likely as the least of these, and together they have the rest of the mass.
    rest = max(1.0 - math.exp(_log_sum(list(raw.values()))), 1e-9)
    others = math.log(rest) + min(raw.values()) * (1 / TEMPERATURE - 1)
    added = float(np.logaddexp(known, others)) - known
    if added > _KNOWN and len(raw) >= _TOPS:
        return {}
    expected = {LogprobKind.RAW: raw[token], LogprobKind.AFTER_TEMPERATURE: tempered[token] - known - added / 2}
    if top_k is not None:
        kept = sorted(tempered.values(), reverse=True)[:top_k]
        expected[LogprobKind.AFTER_TRUNCATION] = tempered[token] - _log_sum(kept)
    return expected


def _log_sum(values: list[float]) -> float:
    return float(np.logaddexp.reduce(values))

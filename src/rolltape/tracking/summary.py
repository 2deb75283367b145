"""Summarizes the rollouts of one split at one step, and names the numbers of a summary as metrics."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from rolltape.records.fork import ForkCause
from rolltape.records.rollout import Status, StopReason
from rolltape.records.sample import Fate
from rolltape.records.trace import Trace
from rolltape.samples import Linearized
from rolltape.samples.credit import unit_of

_COUNT = "/rollouts/count"
_FIELDS = {"min": "minimum", "max": "maximum"}
_LENGTHS = ("turns", "sampled_tokens", "trained_tokens", "context_tokens")


class Spread(msgspec.Struct, frozen=True):
    """The distribution of the finite values among some numbers."""

    count: int
    mean: float
    std: float
    minimum: float
    median: float
    maximum: float


class StepSummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The rollouts of one split at one step. A field is absent or empty where it is not known."""

    rollouts: int
    rejected: int = 0  # missing from the batch, and not among `rollouts`
    filtered: int = 0  # kept out of training
    statuses: dict[Status, int] = {}
    stop_reasons: dict[StopReason, int] = {}
    rewards: Spread | None = None
    rewards_not_finite: int = 0
    reward_terms: dict[str, float] = {}  # means
    turns: Spread | None = None  # per rollout, as are the next three
    sampled_tokens: Spread | None = None
    trained_tokens: Spread | None = None
    context_tokens: Spread | None = None  # the longest prompt with its reply
    fates: dict[Fate, int] = {}  # the ledger: sampled tokens by fate
    forks: dict[ForkCause, int] = {}
    staleness: dict[int, int] = {}  # trained tokens by how many versions they are behind the newest of the step


class ShownStep(msgspec.Struct, frozen=True, kw_only=True):
    """What a tracker shows of one split at one step: a few traces, and a summary of all rollouts."""

    split: str
    step: int
    traces: tuple[Trace, ...] = ()
    summary: StepSummary | None = None  # None: only traces are given
    view_url: str | None = None  # where `rolltape view` serves the run; None: not known, or there is no run

    def __iter__(self) -> Iterator[Trace]:
        return iter(self.traces)

    def __len__(self) -> int:
        return len(self.traces)


class StepTally:
    """Adds rollouts to a summary one at a time, and keeps only their numbers.

    `versions` are the weight versions of the run in their order.
    """

    def __init__(self, versions: Sequence[str]) -> None:
        self._versions = versions
        self._statuses: Counter[Status] = Counter()
        self._stop_reasons: Counter[StopReason] = Counter()
        self._filtered = 0
        self._rewards: list[float] = []
        self._terms: dict[str, list[float]] = {}
        self._lengths: dict[str, list[float]] = {}  # by the field of the summary
        self._fates: Counter[Fate] = Counter()
        self._forks: Counter[ForkCause] = Counter()
        self._trained_by: Counter[str] = Counter()  # tokens by the weight version that sampled them

    def add(self, made: Linearized) -> None:
        """Count a rollout."""
        outcome, turns = made.rollout.outcome, made.rollout.turns
        totals = made.ledger.totals()
        self._statuses[outcome.status] += 1
        if outcome.stop_reason is not None:
            self._stop_reasons[outcome.stop_reason] += 1
        self._filtered += outcome.filtered is not None
        if outcome.reward is not None:
            self._rewards.append(outcome.reward)
        for name, value in outcome.reward_terms.items():
            self._terms.setdefault(name, []).append(value)
        lengths = {
            "turns": len(turns),
            "sampled_tokens": made.ledger.sampled,
            "trained_tokens": totals.get(Fate.TRAINED, 0),
            "context_tokens": max((len(turn.tokens) for turn in turns), default=0),
        }
        for name, length in lengths.items():
            self._lengths.setdefault(name, []).append(length)
        self._fates.update(totals)
        self._forks.update(fork.cause for fork in made.forks)
        self._trained_by.update(_trained_versions(made))

    def summary(self) -> StepSummary:
        """The summary of all rollouts that were added."""
        rewards = compute_spread(self._rewards)
        terms = {name: compute_spread(values) for name, values in self._terms.items()}
        lengths: dict[str, Any] = {name: compute_spread(values) for name, values in self._lengths.items()}
        used = self._trained_by
        return StepSummary(
            rollouts=self._statuses.total(),
            filtered=self._filtered,
            statuses=dict(self._statuses),
            stop_reasons=dict(self._stop_reasons),
            rewards=rewards,
            rewards_not_finite=len(self._rewards) - (rewards.count if rewards else 0),
            reward_terms={name: spread.mean for name, spread in terms.items() if spread is not None},
            fates=dict(self._fates),
            forks=dict(self._forks),
            staleness=compute_staleness({at: used[name] for at, name in enumerate(self._versions) if name in used}),
            **lengths,
        )


def compute_spread(values: Iterable[float]) -> Spread | None:
    """The spread of the finite values, or None if there are none."""
    finite = np.array([value for value in values if math.isfinite(value)], dtype=np.float64)
    if not len(finite):
        return None
    unit = unit_of(float(np.abs(finite).max()))
    scaled = finite / unit
    return Spread(
        count=len(finite),
        mean=math.fsum(scaled) / len(finite) * unit,
        std=float(scaled.std()) * unit,
        minimum=float(finite.min()),
        median=float(np.median(scaled)) * unit,
        maximum=float(finite.max()),
    )


def compute_staleness(tokens: Mapping[int, int]) -> dict[int, int]:
    """Tokens by how far their version is behind the newest. `tokens` are by the place of their version in the order."""
    newest = max(tokens, default=0)
    return {newest - place: count for place, count in sorted(tokens.items(), reverse=True)}


def _trained_versions(made: Linearized) -> Counter[str]:
    """The trained tokens of each weight version. If a token lies between two versions, the older one counts."""
    segments = {turn.id: turn.facts.segments for turn in made.rollout.turns}
    counts: Counter[str] = Counter()
    for entry in made.ledger.entries:
        if entry.fate is not Fate.TRAINED:
            continue
        for segment in segments[entry.turn]:
            tokens = min(entry.stop, segment.stop) - max(entry.start, segment.start)
            if tokens > 0 and segment.first_version is not None:
                counts[segment.first_version] += tokens
    return counts


def step_metrics(shown: ShownStep) -> dict[str, float]:
    """The metrics of a step under the name of its split: `train/reward/mean`, `train/ledger/trained`, …"""
    if shown.summary is None:
        return {}
    return {f"{shown.split}/{name}": value for name, value in _named_numbers(shown.summary)}


def parse_count_metric(metric: str) -> str | None:
    """The split of a metric that counts rollouts, which every step has, or None if it is another metric."""
    return metric.removesuffix(_COUNT) if metric.endswith(_COUNT) else None


def steps_in(stored: Iterable[tuple[str, int]]) -> set[tuple[str, int]]:
    """The splits and steps whose summary a tracker holds, given its metrics by name with their steps."""
    found = ((parse_count_metric(metric), step) for metric, step in stored)
    return {(split, step) for split, step in found if split is not None}


def _named_numbers(summary: StepSummary) -> Iterator[tuple[str, float]]:
    if summary.rewards is not None:
        yield from _name_spread("reward", summary.rewards, ("mean", "std", "min", "median", "max"))
    if summary.rewards_not_finite:
        yield "reward/not_finite", summary.rewards_not_finite
    for name, mean in summary.reward_terms.items():
        yield f"reward_terms/{name}", mean
    yield _COUNT[1:], summary.rollouts
    yield "rollouts/rejected", summary.rejected
    yield "rollouts/filtered", summary.filtered
    for status in (Status.FINISHED, Status.FAILED, Status.LOST):
        yield f"rollouts/{status}", summary.statuses.get(status, 0)
    for reason, count in summary.stop_reasons.items():
        yield f"stopped/{reason}", count
    for name in _LENGTHS:
        if (lengths := getattr(summary, name)) is not None:
            yield from _name_spread(name, lengths, ("mean", "max"))
    yield from _name_shares(summary)
    for cause, count in summary.forks.items():
        yield f"forks/{cause}", count
    trained = sum(summary.staleness.values())
    if trained:
        yield "staleness/mean", sum(behind * count for behind, count in summary.staleness.items()) / trained
        yield "staleness/max", max(summary.staleness)


def _name_spread(name: str, spread: Spread, figures: Sequence[str]) -> Iterator[tuple[str, float]]:
    return ((f"{name}/{figure}", getattr(spread, _FIELDS.get(figure, figure))) for figure in figures)


def _name_shares(summary: StepSummary) -> Iterator[tuple[str, float]]:
    """Shares of the sampled tokens: trained, masked and dropped, then each reason."""
    sampled = sum(summary.fates.values())
    if not sampled:
        return
    totals = dict.fromkeys(("trained", "masked", "dropped"), 0)
    for fate, count in summary.fates.items():
        totals[fate.partition(":")[0]] += count
    for kind, count in totals.items():
        yield f"ledger/{kind}", count / sampled
    for fate, count in summary.fates.items():
        kind, _, reason = fate.partition(":")
        if reason:
            yield f"ledger/{kind}/{reason}", count / sampled

"""Convert a step's summary to named numbers, as trackers plot them."""

from collections.abc import Iterator, Sequence

from rolltape.records.rollout import Status
from rolltape.tracking.summary import ShownStep, Spread, StepSummary

_COUNT = "/rollouts/count"
_FIELDS = {"min": "minimum", "max": "maximum"}
_LENGTHS = ("turns", "sampled_tokens", "trained_tokens", "context_tokens")


def metrics_of(shown: ShownStep) -> dict[str, float]:
    """The metrics of a step under the name of its split: `train/reward/mean`, `train/ledger/trained`, …"""
    if shown.summary is None:
        return {}
    return {f"{shown.split}/{name}": value for name, value in _named_numbers(shown.summary)}


def split_of_count(metric: str) -> str | None:
    """The split of a metric that counts rollouts, which every step has; None: it is another metric."""
    return metric.removesuffix(_COUNT) if metric.endswith(_COUNT) else None


def _named_numbers(summary: StepSummary) -> Iterator[tuple[str, float]]:
    if summary.rewards is not None:
        yield from _spread("reward", summary.rewards, ("mean", "std", "min", "median", "max"))
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
            yield from _spread(name, lengths, ("mean", "max"))
    yield from _ledger(summary)
    for cause, count in summary.forks.items():
        yield f"forks/{cause}", count
    trained = sum(summary.staleness.values())
    if trained:
        yield "staleness/mean", sum(behind * count for behind, count in summary.staleness.items()) / trained
        yield "staleness/max", max(summary.staleness)


def _spread(name: str, spread: Spread, figures: Sequence[str]) -> Iterator[tuple[str, float]]:
    return ((f"{name}/{figure}", getattr(spread, _FIELDS.get(figure, figure))) for figure in figures)


def _ledger(summary: StepSummary) -> Iterator[tuple[str, float]]:
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

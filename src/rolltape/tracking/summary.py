"""Rollouts under a policy → what a step comes to."""

from collections import Counter
from collections.abc import Sequence

from rolltape.records.fork import ForkCause
from rolltape.records.ledger import Fate
from rolltape.records.rollout import Status, StopReason
from rolltape.records.summary import StepSummary, spread_of
from rolltape.samples import Linearized


class Tally:
    """Adds rollouts up, one at a time, and keeps only numbers of them."""

    def __init__(self, versions: Sequence[str]) -> None:
        self._order = {version: index for index, version in enumerate(versions)}
        self._statuses: Counter[Status] = Counter()
        self._stop_reasons: Counter[StopReason] = Counter()
        self._filtered = 0
        self._rewards: list[float] = []
        self._terms: dict[str, list[float]] = {}
        self._lengths: dict[str, list[float]] = {"turns": [], "sampled": [], "trained": [], "context": []}
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
        self._lengths["turns"].append(len(turns))
        self._lengths["sampled"].append(made.ledger.sampled)
        self._lengths["trained"].append(totals.get(Fate.TRAINED, 0))
        self._lengths["context"].append(max((len(turn.tokens) for turn in turns), default=0))
        self._fates.update(totals)
        self._forks.update(fork.cause for fork in made.forks)
        self._trained_by.update(_trained_versions(made))

    def summary(self) -> StepSummary:
        """What they come to."""
        finite = spread_of(self._rewards)
        means = {name: spread_of(values) for name, values in self._terms.items()}
        return StepSummary(
            rollouts=self._statuses.total(),
            filtered=self._filtered,
            statuses=dict(self._statuses),
            stop_reasons=dict(self._stop_reasons),
            rewards=finite,
            rewards_not_finite=len(self._rewards) - (finite.count if finite else 0),
            reward_terms={name: spread.mean for name, spread in means.items() if spread is not None},
            turns=spread_of(self._lengths["turns"]),
            sampled_tokens=spread_of(self._lengths["sampled"]),
            trained_tokens=spread_of(self._lengths["trained"]),
            context_tokens=spread_of(self._lengths["context"]),
            fates=dict(self._fates),
            forks=dict(self._forks),
            staleness=self._staleness(),
        )

    def _staleness(self) -> dict[int, int]:
        """Trained tokens by how far their version is behind the newest that trained here, in the run's order."""
        known = {self._order[version]: count for version, count in self._trained_by.items() if version in self._order}
        newest = max(known, default=0)
        return {newest - place: count for place, count in sorted(known.items(), reverse=True)}


def _trained_versions(made: Linearized) -> Counter[str]:
    """The trained tokens of each weight version; where it lies between two, the older counts."""
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

"""How far behind the newest weights the tokens of a step were sampled."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from rolltape.records.rollout import Rollout


class SampledTokens(NamedTuple):
    """The sampled tokens of some rollouts."""

    by_staleness: Counter[int]  # how many versions behind, and how many tokens; those of unknown weights are at -1
    continued: int  # replies that began under other weights than they ended under

    @property
    def total(self) -> int:
        return self.by_staleness.total()

    def older_than(self, limit: int) -> int:
        """How many tokens are more than so many versions behind."""
        return sum(count for behind, count in self.by_staleness.items() if behind > limit)


def sampled_tokens(rollouts: Iterable[Rollout], newest: int) -> SampledTokens:
    """The tokens of rollouts by staleness, where versions are numbers and `newest` is the trainer's own."""
    by_staleness: Counter[int] = Counter()
    continued = 0
    for turn in (turn for rollout in rollouts for turn in rollout.turns):
        for segment in turn.facts.segments:
            known = segment.first_version is not None
            by_staleness[newest - int(segment.first_version or 0) if known else -1] += segment.stop - segment.start
        continued += len({segment.first_version for segment in turn.facts.segments}) > 1
    return SampledTokens(by_staleness, continued)

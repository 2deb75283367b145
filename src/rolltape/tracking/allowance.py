"""How many traces of a split and step may be shown, over all calls that bring some, and which."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from rolltape.errors import SinkError
from rolltape.records.choice import Candidate, Choice, chosen
from rolltape.records.jsonable import shown as shown_in_errors
from rolltape.records.summary import ShownStep


class Allowance:
    """At most `limit` traces a split and step; with 0 or less none."""

    def __init__(self, limit: int, choice: Choice | str = Choice.FIRST) -> None:
        if choice not in list(Choice):
            raise SinkError(f"choice is {shown_in_errors(choice)}; known are {', '.join(Choice)}")
        self._limit = limit
        self._choice = Choice(choice)
        self._picked: Counter[tuple[str, int]] = Counter()

    def pick(self, split: str, step: int, candidates: Sequence[Candidate]) -> list[int]:
        """The positions of those that are shown, which are counted as shown from now on."""
        positions = chosen(candidates, self._limit - self._picked[split, step], self._choice)
        self._picked[split, step] += len(positions)
        return positions

    def within(self, shown: ShownStep) -> ShownStep:
        """The step with as many of its traces as there is room for."""
        candidates = [Candidate(f"{one.rollout}.{one.try_index}", one.total_reward) for one in shown.traces]
        kept = tuple(shown.traces[position] for position in self.pick(shown.split, shown.step, candidates))
        return msgspec.structs.replace(shown, traces=kept)

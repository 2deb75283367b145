"""Rollouts of a run by their ids, or by beginnings that only one has; many of them are found without a search each."""

from bisect import bisect_left
from collections.abc import Iterable

from rolltape.errors import RecordError
from rolltape.samples import counted_tries
from rolltape.tape.run import RolloutRow


class RolloutIds:
    """Finds rollouts by the beginning of their ids."""

    def __init__(self, rows: Iterable[RolloutRow]) -> None:
        self._rows: dict[str, list[RolloutRow]] = {}
        for row in rows:
            self._rows.setdefault(row.id, []).append(row)
        self._sorted = sorted(self._rows)

    def row(self, rollout: str, try_index: int | None) -> RolloutRow:
        """A try of the rollout whose id is, or alone begins with, what is given; None: the try that counts."""
        tries = self._rows[self._whole(rollout)]
        if try_index is None:
            return counted_tries(tries)[0]
        for row in tries:
            if row.head.try_index == try_index:
                return row
        known = ", ".join(str(row.head.try_index) for row in tries)
        raise RecordError(f"rollout {rollout} has no try {try_index}; it has {known}")

    def _whole(self, rollout: str) -> str:
        if rollout in self._rows:
            return rollout
        first = bisect_left(self._sorted, rollout)
        alike = [one for one in self._sorted[first : first + 2] if rollout and one.startswith(rollout)]
        if not alike:
            raise RecordError(f"the run holds no rollout {rollout!r}; `rolltape ls` lists them")
        if len(alike) > 1:
            raise RecordError(f"{rollout!r} begins several ids, {alike[0]} and {alike[1]}; give more of it")
        return alike[0]

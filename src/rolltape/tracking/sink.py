"""What takes steps to a tracker: the side that a trainer sees, and the side that a tracker is written for."""

from collections.abc import Callable
from typing import Protocol

import msgspec

from rolltape.records.choice import Pick
from rolltape.records.summary import ShownStep

# Made when its turn comes, off the caller's thread; it is told which of its rollouts are to be shown.
Deferred = Callable[[Pick], ShownStep]


class Sink(Protocol):
    """Takes steps from a trainer. None of its calls raises, and none but `close` waits."""

    def put(self, given: ShownStep | Deferred) -> bool:
        """Take a step to be shown; False: it was dropped, and counted."""
        ...

    def close(self, timeout_s: float = 30.0) -> "Delivery":
        """Deliver what waits, for at most so long, and say what became of all that was put."""
        ...


class Tracker(Protocol):
    """A place where steps are shown. One thread calls it; it may be slow, and may raise."""

    def holds(self, split: str, step: int) -> bool:
        """Whether that step was there before this process opened the tracker."""
        ...

    def put(self, shown: ShownStep) -> None:
        """Show a step. What is put of one step in several calls is shown side by side."""
        ...

    def close(self) -> None:
        """Write out what is left; raises if the tracker did not keep all that it was given."""
        ...


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the steps that were put: the numbers add up to `put`."""

    put: int = 0
    delivered: int = 0
    dropped: int = 0  # there was no room for them, or nobody to take them
    failed: int = 0  # the tracker raised, or they could not be made
    unsent: int = 0  # still waiting, or under way
    errors: tuple[str, ...] = ()  # what went wrong, each once

    @property
    def complete(self) -> bool:
        return self.delivered == self.put and not self.errors

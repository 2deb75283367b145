"""Times a wait, and says when to log it."""

import time

FIRST_WARNING_S = 60.0


class WaitTimer:
    """Times a wait. A warning about it is due after a minute, then after twice as long each time."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start over."""
        self._began_s = time.monotonic()
        self._next_warning_s = FIRST_WARNING_S

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._began_s

    def is_warning_due(self) -> bool:
        """Whether to log a warning now; the next one is due later."""
        if self.waited_s < self._next_warning_s:
            return False
        self._next_warning_s *= 2
        return True

"""When to ask an engine again after an error: pauses that grow, within a stated time."""

import random
import time
from collections.abc import Callable

from rolltape.errors import EngineError, EngineFailed, EngineFault, EngineUnreachable
from rolltape.gateway.settings import Patience

# Statuses that pass: overload, restarts, and servers that give 500 for either.
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 15.0
_PICK_EVERY_S = 0.5  # while no engine is up; the pool probes them meanwhile


class Retries:
    """The errors of one turn's engines since they last gave something."""

    def __init__(self, patience: Patience, now: Callable[[], float] = time.monotonic) -> None:
        self._patience = patience
        self._now = now
        self._since: float | None = None  # the first error; None: there was none
        self._errors = 0
        self._faults = 0  # of these: those that time does not heal

    def start_over(self) -> None:
        """Forget earlier errors: an engine gave something, or its weights were changed."""
        self._since, self._errors, self._faults = None, 0, 0

    def next_pause_s(self, error: EngineError, move: Callable[[], bool] = lambda: False) -> float:
        """How long to wait before the next try; raises EngineFailed where there is to be none.

        `move` has the next try made with another engine, if there is one, which did not ask to wait.
        """
        now = self._now()
        self._since = now if self._since is None else self._since
        left = self._since + self._patience.retry_s - now
        if isinstance(error, EngineUnreachable):
            if left <= 0:
                raise EngineFailed(f"no engine answers for {self._patience.retry_s:g} s: {error}") from error
            return min(_PICK_EVERY_S, self._patience.retry_s / 4)
        self._errors += 1
        fault = error if isinstance(error, EngineFault) else None
        status = None if fault is None else fault.status
        self._faults += status is None
        count = "an error" if self._errors == 1 else f"{self._errors} errors"
        if self._faults >= self._patience.faults or (status is not None and status not in _PASSING):
            raise EngineFailed(f"no reply after {count} of the engine, the last: {error}") from error
        asked_s = 0.0 if fault is None or left <= 0 or move() else fault.retry_after_s or 0.0
        if left <= 0 or asked_s > left:
            wait = f" and asks to wait {asked_s:g} s" if asked_s > max(left, 0) else ""
            raise EngineFailed(
                f"no reply after {count} of the engine in {self._patience.retry_s:g} s, the last: {error}{wait}; "
                "more time is given with --engine-retry"
            ) from error
        pause_s: float = min(_FIRST_PAUSE_S * 2 ** (self._errors - 1), _LONGEST_PAUSE_S)
        return min(max(pause_s * random.uniform(0.5, 1.0), asked_s), left)

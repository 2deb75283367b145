"""A sink for any tracker: steps wait in a bounded queue, and a thread of its own takes them there."""

import atexit
import contextvars
import logging
import threading
from collections import Counter, deque
from types import TracebackType
from typing import Self

from rolltape.errors import SinkError
from rolltape.records.choice import Choice
from rolltape.records.summary import ShownStep
from rolltape.tracking.allowance import Allowance
from rolltape.tracking.sink import Deferred, Delivery, Tracker

log = logging.getLogger("rolltape.tracking")

_AT_EXIT_S = 10.0


class Outbox:
    """Neither raises into its caller nor holds it up. What comes while the queue is full is dropped, and counted."""

    def __init__(
        self,
        tracker: Tracker,
        *,
        max_traces_per_step: int = 8,
        choice: Choice | str = Choice.FIRST,
        max_waiting: int = 16,
    ) -> None:
        if max_waiting < 1:
            raise SinkError(f"max_waiting is {max_waiting}; give 1 or more, or every step is dropped")
        self._tracker = tracker
        self._allowance = Allowance(max_traces_per_step, choice)
        self._max_waiting = max_waiting
        self._waiting: deque[tuple[ShownStep | Deferred]] = deque()
        self._counts: Counter[str] = Counter()
        self._errors: dict[str, str] = {}  # by what kind of thing went wrong: the first of each
        self._changed = threading.Condition()
        self._closing = self._given_up = False
        # Trackers keep their current run in a context variable, which a new thread would not see.
        work = contextvars.copy_context().run
        self._thread = threading.Thread(target=work, args=(self._work,), name="rolltape-outbox", daemon=True)
        self._thread.start()
        atexit.register(self.close, _AT_EXIT_S)

    @property
    def delivery(self) -> Delivery:
        """How things stand."""
        with self._changed:
            settled = self._counts["delivered"] + self._counts["dropped"] + self._counts["failed"]
            unsent = self._counts["put"] - settled
            return Delivery(**self._counts, unsent=unsent, errors=tuple(self._errors.values()))

    def put(self, given: ShownStep | Deferred) -> bool:
        """Let a step wait for its delivery; False: it was dropped."""
        with self._changed:
            self._counts["put"] += 1
            refusal = self._refusal()
            if refusal is None:
                self._waiting.append((given,))
                self._changed.notify_all()
                return True
            self._counts["dropped"] += 1
        self._tell(*refusal)
        return False

    def close(self, timeout_s: float = 30.0) -> Delivery:
        """Deliver what waits, for at most so long. What could not be delivered is in the answer and in the log."""
        atexit.unregister(self.close)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._tell("late", f"the tracker was not done after {timeout_s:g} s, and was left behind")
            with self._changed:
                self._given_up = True
        delivery = self.delivery
        if not delivery.complete:
            log.warning("of %d steps %d were delivered: %s", delivery.put, delivery.delivered, delivery)
        return delivery

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _refusal(self) -> tuple[str, str] | None:
        if self._closing:
            return "closed", "steps were put after the sink was closed"
        if not self._thread.is_alive():
            return "dead", "the thread that feeds the tracker has died"
        if len(self._waiting) >= self._max_waiting:
            return "slow", f"the tracker is slow: {len(self._waiting)} steps wait, and further ones are dropped"
        return None

    def _work(self) -> None:
        try:
            while (waited := self._next()) is not None:
                self._send(*waited)
            if not self._given_up:
                self._tracker.close()
        except BaseException as error:  # noqa: BLE001 - the thread ends here; all that is left to do is to say so
            self._tell("ended", f"the tracker ended with {_spelled(error)}")

    def _next(self) -> tuple[ShownStep | Deferred] | None:
        """The next step, when there is one; None: there will be no more."""
        with self._changed:
            while not self._waiting and not self._closing:
                self._changed.wait()
            return self._waiting.popleft() if self._waiting and not self._given_up else None

    def _send(self, given: ShownStep | Deferred) -> None:
        try:
            shown = self._allowance.within(given) if isinstance(given, ShownStep) else given(self._allowance.pick)
            if shown.traces or shown.summary is not None:
                self._tracker.put(shown)
            outcome = "delivered"
        except Exception as error:  # noqa: BLE001 - a tracker may raise anything, and the next step may pass
            outcome = "failed"
            self._tell(type(error).__name__, f"a step could not be shown: {_spelled(error)}")
        with self._changed:
            self._counts[outcome] += 1

    def _tell(self, kind: str, what: str) -> None:
        """Report something, the first time that the like happens."""
        with self._changed:
            is_new = kind not in self._errors
            self._errors.setdefault(kind, what)
        if is_new:
            log.warning("%s", what)


def _spelled(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__

"""Sinks send steps from a training loop to a tracker, through a bounded queue and on a separate thread."""

import atexit
import contextvars
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from operator import attrgetter
from types import MappingProxyType
from typing import Protocol, Self, TypedDict

import msgspec

from rolltape.errors import MissingTracker, SinkError
from rolltape.extras import import_extra
from rolltape.forking import call_in_child
from rolltape.tracking.choice import Allowance, Choice, Pick
from rolltape.tracking.summary import ShownStep

log = logging.getLogger("rolltape.tracking")

_AT_EXIT_S = 10.0

# A step that is built on the sink's thread; the argument chooses which of its rollouts are shown.
Deferred = Callable[[Pick], ShownStep]


class Sink(Protocol):
    """Takes steps from a trainer. None of its calls raises, and none but `close` waits."""

    def put(self, given: ShownStep | Deferred) -> bool:
        """Queue a step to be shown. Return False if it was dropped, which is counted."""
        ...

    def close(self, timeout_s: float = 30.0) -> "DeliveryReport":
        """Deliver the waiting steps, for at most `timeout_s`, and report what happened to all steps."""
        ...


class Tracker(Protocol):
    """A place where steps are shown. One thread calls it. It may be slow, and may raise."""

    def holds(self, split: str, step: int) -> bool:
        """Whether the step was there before this process opened the tracker."""
        ...

    def put(self, shown: ShownStep) -> None:
        """Show a step. Several calls for one step add to it."""
        ...

    def close(self) -> None:
        """Write what is left. Raises if the tracker did not store all that it was given."""
        ...


class DeliveryReport(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to the steps that were put. The other counts add up to `put`."""

    put: int = 0
    delivered: int = 0
    held: int = 0  # the tracker had the step before this process opened it, so it was not sent again
    dropped: int = 0  # the queue was full, or the sink closed
    failed: int = 0  # the tracker raised, or the step could not be built
    unsent: int = 0  # still waiting, or under way
    errors: tuple[str, ...] = ()  # the first of each kind

    @property
    def complete(self) -> bool:
        return self.delivered + self.held == self.put and not self.errors


class OutboxOptions(TypedDict, total=False):
    """The options of every sink: how many traces of a step are shown, which, and how many steps may wait."""

    max_traces_per_step: int
    choice: Choice | str
    max_waiting: int


class Outbox:
    """A sink for any tracker. It neither raises nor waits. Steps are dropped and counted if the queue is full."""

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
        self._waiting: deque[ShownStep | Deferred] = deque()
        self._counts: Counter[str] = Counter()
        self._errors: dict[str, str] = {}  # the first of each kind
        self._changed = threading.Condition()
        self._closing = self._abandoned = self._is_forked = False
        # Trackers keep their current run in a context variable, which a new thread would not see.
        work = contextvars.copy_context().run
        self._thread = threading.Thread(target=work, args=(self._work,), name="rolltape-outbox", daemon=True)
        self._thread.start()
        atexit.register(self.close, _AT_EXIT_S)
        call_in_child(self, Outbox._leave_to_parent)

    @property
    def delivery(self) -> DeliveryReport:
        """The counts so far."""
        with self._changed:
            settled = sum(count for name, count in self._counts.items() if name != "put")
            unsent = self._counts["put"] - settled
            return DeliveryReport(**self._counts, unsent=unsent, errors=tuple(self._errors.values()))

    def put(self, given: ShownStep | Deferred) -> bool:
        """Queue a step. Return False if it was dropped."""
        with self._changed:
            self._counts["put"] += 1
            refusal = self._refusal()
            if refusal is None:
                self._waiting.append(given)
                self._changed.notify_all()
                return True
            self._counts["dropped"] += 1
        self._report(*refusal)
        return False

    def close(self, timeout_s: float = 30.0) -> DeliveryReport:
        """Deliver the waiting steps, for at most `timeout_s`. Steps that were not delivered are reported and logged."""
        atexit.unregister(self.close)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._report("late", f"the tracker was not done after {timeout_s:g} s, so this process stopped waiting")
            with self._changed:
                self._abandoned = True
        delivery = self.delivery
        if not delivery.complete:
            log.warning("of %d steps, %d were delivered: %s", delivery.put, delivery.delivered, delivery)
        return delivery

    def _leave_to_parent(self) -> None:
        """In a forked child: the thread and waiting steps belong to the parent, and the lock may be in any state."""
        atexit.unregister(self.close)
        self._changed = threading.Condition()
        self._waiting.clear()
        self._counts.clear()
        self._is_forked = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refusal(self) -> tuple[str, str] | None:
        """Why a step cannot be queued, as a kind and a message."""
        if self._closing:
            return "closed", "steps were put after the sink was closed"
        if self._is_forked:
            return "forked", "the sink was made before this process was forked; make one in each process"
        if not self._thread.is_alive():
            return "dead", "the thread that feeds the tracker has died"
        if len(self._waiting) >= self._max_waiting:
            return "slow", f"the tracker is slow: {len(self._waiting)} steps wait, and further ones are dropped"
        return None

    def _work(self) -> None:
        try:
            while self._wait_for_step():
                self._send(self._waiting.popleft())
            if not self._abandoned:
                self._tracker.close()
        except BaseException as error:  # noqa: BLE001 - the thread ends here, and can only report it
            self._report("ended", f"the tracker ended with {_error_text(error)}")

    def _wait_for_step(self) -> bool:
        """Wait until a step is queued. Return False if there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            return bool(self._waiting) and not self._abandoned

    def _send(self, given: ShownStep | Deferred) -> None:
        try:
            shown = self._allowance.limited(given) if isinstance(given, ShownStep) else given(self._allowance.pick)
            outcome = "delivered"
            if self._tracker.holds(shown.split, shown.step):
                outcome = "held"
            elif shown.traces or shown.summary is not None:
                self._tracker.put(shown)
        except Exception as error:  # noqa: BLE001 - a tracker may raise anything, and the next step may pass
            outcome = "failed"
            self._report(type(error).__name__, f"a step could not be shown: {_error_text(error)}")
        with self._changed:
            self._counts[outcome] += 1

    def _report(self, kind: str, message: str) -> None:
        """Keep and log the first message of each kind."""
        with self._changed:
            is_new = kind not in self._errors
            self._errors.setdefault(kind, message)
        if is_new:
            log.warning("%s", message)


def import_package(name: str, *, extra: str, private: Mapping[str, Sequence[str]] = MappingProxyType({})) -> None:
    """Import a tracker's package, and check that it has the `private` names that are used, by module."""
    package = import_extra(name, extra, what=f"the tracker {extra}", missing=MissingTracker)
    try:
        for module, names in private.items():
            attrgetter(*names)(import_module(module))
    except (ImportError, AttributeError) as error:
        raise SinkError(
            f"{name} {package.__version__} does not fit this rolltape ({error}); install the version that "
            f"rolltape[{extra}] requires, or push to a .jsonl file"
        ) from None


def _error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__

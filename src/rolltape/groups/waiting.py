"""Times how long a stream or a limit has waited: when to log it, and when a stream gives up."""

import logging
import time
from collections.abc import Callable, Sequence

from rolltape.errors import GroupsError
from rolltape.groups.deciding import GroupRequest
from rolltape.groups.pending import CollectionKey, Collections, PendingGroup

log = logging.getLogger("rolltape.groups")

FIRST_WARNING_S = 60.0


class WaitTimer:
    """Times a wait. A warning is due after a minute, then after twice as long each time."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start again, because something was new."""
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


class StreamWait(WaitTimer):
    """The time that one stream has waited since something was last new."""

    def __init__(self, run: str, collections: Collections, request: GroupRequest) -> None:
        self._run = run
        self._collections = collections
        self._request = request
        self._gone_at_s: float | None = None  # since when collections were found broken off
        super().__init__()

    def check(self, incomplete: Callable[[], Sequence[PendingGroup]]) -> None:
        """Log a long wait. Raise GroupsError if the collector died, and was not resumed within `resume_s`."""
        broken = self._collections.broken_off(self._request.step, self._request.source)
        if broken:
            self._wait_for_resumption(_describe_broken(broken), incomplete)
        else:
            self._gone_at_s = None
        if self.is_warning_due():
            log.warning(
                "run %s: nothing new for %.0f s; %s", self._run, self.waited_s, self._describe_wait(incomplete())
            )

    def _wait_for_resumption(self, gone: str, incomplete: Callable[[], Sequence[PendingGroup]]) -> None:
        if self._gone_at_s is None:
            self._gone_at_s = time.monotonic()
            log.warning("run %s: %s; waiting for it to be resumed", self._run, gone)
        if self._request.resume_s is not None and time.monotonic() - self._gone_at_s >= self._request.resume_s:
            raise GroupsError(
                f"run {self._run}: {gone}, and it was not resumed within {self._request.resume_s:g} s; "
                f"groups that it left incomplete: {len(incomplete())}. Resume it with `rolltape collect --resume` and "
                "take groups again, or take what has ended with complete=False"
            )

    def _describe_wait(self, incomplete: Sequence[PendingGroup]) -> str:
        if incomplete:
            first = incomplete[0]
            return f"groups that are waited for: {len(incomplete)}, {first.id} of step {first.step} first"
        step = "" if self._request.step is None else f" of step {self._request.step}"
        source = "" if self._request.source is None else f" of {self._request.source}"
        return f"no further group{step}{source} has begun"


def _describe_broken(broken: dict[CollectionKey, str]) -> str:
    key, writer = next(iter(broken.items()))
    return f"{writer}, which collected step {key.step} of {key.source}, ended before it was done"

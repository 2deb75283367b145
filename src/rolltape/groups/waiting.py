"""What a stream waits for: said now and then, and given up when those who could bring it are gone."""

import logging
import time
from collections.abc import Callable, Sequence

from rolltape.errors import GroupsError
from rolltape.groups.collectors import Collectors, Part
from rolltape.groups.deciding import GroupRequest
from rolltape.groups.gathering import Gathered
from rolltape.groups.wait_timer import WaitTimer

log = logging.getLogger("rolltape.groups")


class Waiting:
    """Of one stream, since it last had news."""

    def __init__(self, run: str, collectors: Collectors, wanted: GroupRequest, resume_s: float | None) -> None:
        self._run = run
        self._collectors = collectors
        self._wanted = wanted
        self._resume_s = resume_s
        self._gone_at_s: float | None = None  # since when collections were found broken off
        self._timer = WaitTimer()

    def begin(self) -> None:
        """There was news."""
        self._timer.begin()

    @property
    def waited_s(self) -> float:
        """Since there was news."""
        return self._timer.waited_s

    def go_on(self, incomplete: Callable[[], Sequence[Gathered]]) -> None:
        """Wait on; GroupsError if the process that collected died and nobody has resumed it for `resume_s`."""
        broken = self._collectors.broken_off(self._wanted.step, self._wanted.source)
        if broken:
            self._wait_for_resumption(_gone(broken), incomplete)
        else:
            self._gone_at_s = None
        if self._timer.is_warning_due():
            log.warning("run %s: nothing new for %.0f s; %s", self._run, self.waited_s, self._waited_for(incomplete()))

    def _wait_for_resumption(self, gone: str, incomplete: Callable[[], Sequence[Gathered]]) -> None:
        if self._gone_at_s is None:
            self._gone_at_s = time.monotonic()
            log.warning("run %s: %s; waiting for it to be resumed", self._run, gone)
        if self._resume_s is not None and time.monotonic() - self._gone_at_s >= self._resume_s:
            raise GroupsError(
                f"run {self._run}: {gone}, and nobody has resumed it for {self._resume_s:g} s; "
                f"groups that it left incomplete: {len(incomplete())}. Resume it with `rolltape collect --resume` and "
                "take groups again, or take what has ended with complete=False"
            )

    def _waited_for(self, incomplete: Sequence[Gathered]) -> str:
        if incomplete:
            first = incomplete[0]
            return f"groups that are waited for: {len(incomplete)}, {first.id} of step {first.step} first"
        step = "" if self._wanted.step is None else f" of step {self._wanted.step}"
        source = "" if self._wanted.source is None else f" of {self._wanted.source}"
        return f"no further group{step}{source} has begun"


def _gone(broken: dict[Part, str]) -> str:
    part, writer = next(iter(broken.items()))
    return f"{writer}, which collected step {part.step} of {part.source}, ended before it was done"

"""`RunAheadLimit`: holds collection back when it runs too far ahead of a trainer."""

import asyncio
import logging
import time
from collections.abc import Sequence

from rolltape.errors import GroupsError
from rolltape.groups.consumer import find_consumer
from rolltape.groups.pending import PendingGroup
from rolltape.groups.waiting import WaitTimer
from rolltape.tape.recording.tape import Tape

log = logging.getLogger("rolltape.groups")

_LONG_S = 600.0  # for one step of a trainer that is alive


class RunAheadLimit:
    """Limits how far collection runs ahead of a trainer, in this process or another.

    With `max_groups`, at most that many groups may be open: begun, and not done at the trainer. With `max_steps`, a
    group of step N may begin when the trainer is done with all groups of steps before N - `max_steps`.

    Example:

        limit = rolltape.RunAheadLimit(tape, max_groups=4)
        await limit.wait(step=3)  # returns when another group of step 3 may begin
    """

    def __init__(
        self,
        tape: Tape,
        *,
        consumer: str = "trainer",
        max_groups: int | None = None,
        max_steps: int | None = None,
        poll_s: float = 0.2,
    ) -> None:
        for name, value, least in (("max_groups", max_groups, 1), ("max_steps", max_steps, 0)):
            if value is not None and value < least:
                raise GroupsError(f"{name} is {value}; give {least} or more")
        self._consumer = find_consumer(tape, consumer)
        self._max_groups = max_groups
        self._max_steps = max_steps
        self._poll_s = poll_s
        self._timer = WaitTimer()

    def is_free(self, step: int, source: str | None = None) -> bool:
        """Whether another group of this step may begin now. With a source of tasks, only its groups count."""
        with self._consumer.lock:
            self._consumer.refresh()
            waiting = self._consumer.select(source=source)
        if self._allows(step, [group.step for group in waiting]):
            self._timer.begin()
            return True
        if self._timer.is_warning_due():
            self._log_why(waiting)
        return False

    def _log_why(self, waiting: Sequence[PendingGroup]) -> None:
        is_taken = self._consumer.claim.is_taken()
        if is_taken and self._timer.waited_s < _LONG_S:
            return
        log.warning(
            "collection has waited %.0f s: %d groups wait for consumer %r, those of step %d first%s",
            self._timer.waited_s,
            len(waiting),
            self._consumer.name,
            waiting[0].step,
            "" if is_taken else ", and no process takes groups under that name",
        )

    def _allows(self, step: int, waiting: list[int]) -> bool:
        if self._max_groups is not None and len(waiting) >= self._max_groups:
            return False
        return self._max_steps is None or all(other >= step - self._max_steps for other in waiting)

    async def wait(self, step: int, source: str | None = None) -> None:
        """Return when another group of this step may begin."""
        while not await asyncio.to_thread(self.is_free, step, source):
            await asyncio.sleep(self._poll_s)

    def wait_blocking(self, step: int, source: str | None = None) -> None:
        """The same for a program without an event loop."""
        while not self.is_free(step, source):
            time.sleep(self._poll_s)

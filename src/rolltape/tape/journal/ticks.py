"""Recording from coroutines: all that one tick of their event loop submits is committed in one transaction."""

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from rolltape.tape.journal.entries import Entry
from rolltape.tape.stored import Key

if TYPE_CHECKING:
    from rolltape.tape.journal.writing import Journal, Ticket

T = TypeVar("T")


class Ticks:
    """Futures of what is submitted to a journal. To be used in the threads of event loops."""

    def __init__(self, journal: "Journal") -> None:
        self._journal = journal
        self._due: asyncio.AbstractEventLoop | None = None  # the loop that is going to commit what is queued

    def submit(
        self, value: T, *entries: Entry, rollout: Key | None = None, after: "Ticket | None" = None
    ) -> "tuple[Ticket, asyncio.Future[T]]":
        """Queue entries, see `Journal.submit`.

        The future gives `value` when they are durable, or says why they could not be written. Cancelling it takes
        nothing back.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        ticket = self._journal.submit(*entries, rollout=rollout, after=after, settled=partial(_tell, future, value))
        if self._due is not loop:
            self._due = loop
            loop.call_soon(self._commit, loop)
        return ticket, future

    def _commit(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._journal.waits_for_disk:
            loop.run_in_executor(None, self._journal.flush).add_done_callback(lambda _: self._go_on(loop))
            return
        # On the loop itself: a thread beside it would have to wait for its GIL after every statement.
        try:
            self._journal.flush()
        finally:
            self._go_on(loop)

    def _go_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Commit again what came while the disk was waited for, or was left by an interrupt."""
        self._due = None
        if self._journal.has_queued:
            self._due = loop
            loop.call_soon(self._commit, loop)


def _tell(future: asyncio.Future[T], value: T, ticket: "Ticket") -> None:
    """Resolve a future from whichever thread settled its ticket."""
    loop = future.get_loop()
    if loop is running_loop():
        _resolve(future, value, ticket.error)
    else:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits
            loop.call_soon_threadsafe(_resolve, future, value, ticket.error)


def _resolve(future: asyncio.Future[T], value: T, error: BaseException | None) -> None:
    if future.done():  # cancelled
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop of this thread; None: it runs none."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None

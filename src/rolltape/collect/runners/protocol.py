"""What the collector asks of whatever runs its attempts: this process, or a cluster."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from types import TracebackType
from typing import Any, Protocol, Self

from rolltape.collect.plan import Identity, Planned
from rolltape.collect.result import Result
from rolltape.collect.tasks import Task
from rolltape.groups import Room

NO_ROOM_S = 0.2  # after which it is asked again whether there is room
OnEnded = Callable[[Planned, list[Result]], Awaitable[None]]


class Work:
    """The attempts that there are to run, each given out once; a task is begun when there is room for its group."""

    def __init__(
        self, attempts: Iterator[tuple[Planned, Task]], step: int, source: str, room: Room | None = None
    ) -> None:
        self._attempts = attempts
        self._step = step
        self._source = source
        self._room = room
        self._next: tuple[Planned, Task] | None = next(attempts, None)
        self.given_out = 0
        self._no_room_at_s = -NO_ROOM_S
        self._lock = asyncio.Lock()

    @property
    def is_exhausted(self) -> bool:
        return self._next is None

    async def next(self) -> tuple[Planned, Task] | None:
        """The next one; None: there are no more, or, if it is not exhausted, no room for it now."""
        async with self._lock:
            one = self._next
            if one is None or not await self._has_room(one[0]):
                return None
            self.given_out += 1
            self._next = next(self._attempts, None)
            return one

    async def _has_room(self, planned: Planned) -> bool:
        # Attempts come in their order: only the first one begins a group, unless it was tried before.
        if self._room is None or planned.attempt or planned.again:
            return True
        if time.monotonic() - self._no_room_at_s < NO_ROOM_S:
            return False
        free = await asyncio.to_thread(self._room.is_free, self._step, self._source)
        self._no_room_at_s = self._no_room_at_s if free else time.monotonic()
        return free


class Runner(Protocol):
    """Runs attempts. Entered, it is ready, and all that earlier collections left unpublished is part of the run."""

    @property
    def model_name(self) -> str:
        """The model that is asked, as it goes into ids."""
        ...

    @property
    def agent_name(self) -> str:
        """The agent, as it goes into ids."""
        ...

    @property
    def cancelled(self) -> list[Result]:
        """What became of attempts that were cancelled as they ran, of which `run` has not told."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def run(self, work: Work, identity: Identity, on_ended: OnEnded, told_to_end: asyncio.Event) -> None:
        """Run attempts until there are none left, each once, and tell of those that have ended and are on the run.

        Told to end it begins no more, and after the grace time cancels those that still run. It may itself be
        cancelled; what ran is then on record as cancelled.
        """
        ...


async def within_grace(
    workers: Iterable[Coroutine[Any, Any, None]], told_to_end: asyncio.Event, grace_s: float
) -> None:
    """Run workers until all are done; once told to end they have the grace time, and are then cancelled."""
    tasks = [asyncio.ensure_future(worker) for worker in workers]
    together: asyncio.Future[Any] = asyncio.gather(*tasks)
    together.add_done_callback(lambda done: done.cancelled() or done.exception())  # looked at, whoever waits
    told: asyncio.Future[Any] = asyncio.ensure_future(told_to_end.wait())
    try:
        await asyncio.wait({together, told}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({together}, timeout=grace_s)
        if together.done():
            together.result()
    finally:
        told.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

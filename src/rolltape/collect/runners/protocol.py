"""The interface of runners, and the queue from which a runner takes attempts."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple, Protocol, Self

from rolltape.collect.plan import PlannedAttempt, RolloutIdentity
from rolltape.collect.results import RolloutResult
from rolltape.collect.sandboxes import Confinement
from rolltape.collect.tasks import Task
from rolltape.groups import RunAheadLimit

_PLANNED_AT_ONCE = 256  # attempts
NO_ROOM_S = 0.2  # between two checks for room
OnEnded = Callable[[PlannedAttempt, list[RolloutResult]], Awaitable[None]]


class AttemptQueue:
    """The attempts to run. Each is given out once, and a task begins only when there is room for its group.

    An open queue takes more attempts until `close`.
    """

    def __init__(
        self,
        attempts: Iterator[tuple[PlannedAttempt, Task]],
        step: int,
        source: str,
        run_ahead: RunAheadLimit | None = None,
        *,
        is_open: bool = False,
    ) -> None:
        self._attempts = attempts
        self._is_open = is_open
        self._added = asyncio.Event()
        self._step = step
        self._source = source
        self._run_ahead = run_ahead
        self._planned: deque[tuple[PlannedAttempt, Task]] = deque()
        self._is_planned = False  # all attempts are in the queue, or were given out
        self._planning: asyncio.Task[None] | None = None
        self.given_out = 0
        self.is_stopped = False
        self._begins_groups = True
        self._no_room_at_s = -NO_ROOM_S
        self._lock = asyncio.Lock()

    @property
    def is_exhausted(self) -> bool:
        return self.is_stopped or (self._is_planned and not self._planned)

    def add(self, attempts: Iterable[tuple[PlannedAttempt, Task]]) -> None:
        """Add attempts to an open queue."""
        self._planned += attempts
        self._added.set()

    def close(self) -> None:
        """Take no more attempts."""
        self._is_open = False
        self._added.set()

    def stop(self) -> None:
        """Give out no more attempts. Those that were given out continue."""
        self.is_stopped = True
        self.close()

    def stop_after_groups(self) -> None:
        """Begin no more tasks. Groups that were begun are completed."""
        self._begins_groups = False

    async def has_left(self) -> bool:
        """Whether there are attempts that were not given out. Call it when the queue is closed and no worker waits."""
        while not self._planned and not self._is_planned:
            await (self._planning or self._plan_more())
        return bool(self._planned)

    async def next(self) -> tuple[PlannedAttempt, Task] | None:
        """The next attempt; None if the queue is exhausted, or if there is no room for the attempt now."""
        while not self._planned and not self._is_planned:
            if self._planning is None:
                self._planning = asyncio.ensure_future(self._plan_more())
            await asyncio.shield(self._planning)  # all waiting workers then continue
        if self._run_ahead is None:
            return self._take()
        async with self._lock:
            return self._take() if self._planned and await self._has_room(self._planned[0][0]) else None

    def _take(self) -> tuple[PlannedAttempt, Task] | None:
        if not self._begins_groups and self._planned and _begins_group(self._planned[0][0]):
            self.stop()
        if self.is_stopped:
            return None
        self.given_out += bool(self._planned)
        return self._planned.popleft() if self._planned else None

    async def _plan_more(self) -> None:
        try:
            # In a thread: it asks environments for the seats of their episodes, and may skip many tasks.
            more = await asyncio.to_thread(lambda: list(islice(self._attempts, _PLANNED_AT_ONCE)))
            self._planned += more
            if not more and self._is_open:
                await self._added.wait()
                self._added.clear()
            self._is_planned = not more and not self._is_open
        finally:
            self._planning = None

    async def _has_room(self, planned: PlannedAttempt) -> bool:
        if self._run_ahead is None or not _begins_group(planned):
            return True
        if time.monotonic() - self._no_room_at_s < NO_ROOM_S:
            return False
        free = await asyncio.to_thread(self._run_ahead.is_free, self._step, self._source)
        self._no_room_at_s = self._no_room_at_s if free else time.monotonic()
        return free


def _begins_group(planned: PlannedAttempt) -> bool:
    # Attempts come in their order: only the first one begins a group, unless it was tried before.
    return not planned.attempt and not planned.again


class RunnerFacts(NamedTuple):
    """The facts that are known once a runner is ready."""

    model_name: str  # as in rollout ids
    agent_name: str  # as in rollout ids
    confinement: Confinement


class Runner(Protocol):
    """Runs attempts. Once entered it is ready, and all that earlier collections left unpublished is in the run."""

    @property
    def facts(self) -> RunnerFacts:
        """The model, the agent and its sandbox."""
        ...

    @property
    def cancelled(self) -> list[RolloutResult]:
        """Results of attempts that were cancelled while they ran. `on_ended` is not called for them."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def run(
        self, queue: AttemptQueue, identity: RolloutIdentity, on_ended: OnEnded, stopping: asyncio.Event
    ) -> None:
        """Run attempts until there are none left, and call `on_ended` for each that has ended and is on the run.

        Once `stopping` is set it begins no more attempts, and cancels those that still run after the grace time. It
        may itself be cancelled; attempts that ran are then recorded as cancelled.
        """
        ...


async def run_with_grace(workers: Iterable[Coroutine[Any, Any, None]], stopping: asyncio.Event, grace_s: float) -> None:
    """Run workers until all are done. Once `stopping` is set, those left after the grace time are cancelled."""
    tasks = [asyncio.ensure_future(worker) for worker in workers]
    together: asyncio.Future[Any] = asyncio.gather(*tasks)
    together.add_done_callback(
        lambda done: done.cancelled() or done.exception()
    )  # retrieved, so that asyncio does not warn
    stop: asyncio.Future[Any] = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait({together, stop}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({together}, timeout=grace_s)
        if together.done():
            together.result()
    finally:
        stop.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

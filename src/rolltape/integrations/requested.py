"""`RequestedGroups`: groups that a trainer has requested, for threads and event loops."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Generator, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import aclosing
from typing import Any

from rolltape.errors import GroupsError
from rolltape.groups import Group
from rolltape.groups.stream import give_back_taken
from rolltape.integrations.background import BackgroundLoop

_ENDED = "the request was cancelled, or its LiveGroups closed, before all groups were given"


class RequestedGroups:
    """Requested groups, as they complete: `for group in …`, `async for group in …`.

    `wait()`, or `await`, returns all groups that have not been iterated over, in the order of the tasks. If the request
    fails, it gives them back. A cancelled caller loses none: the next call gets them.
    """

    def __init__(
        self,
        background: BackgroundLoop,
        producing: AsyncGenerator[Group, None],
        order: Mapping[str | None, int],
        blocked: Collection[asyncio.AbstractEventLoop],
    ) -> None:
        self._background = background
        self._order = order
        self._blocked = blocked
        self._ready: asyncio.Queue[Group | BaseException | None] = asyncio.Queue()
        self._left: deque[Future[Group | None]] = deque()  # what callers that were cancelled had asked for
        self._waited_for: list[Group] = []  # by a caller that waits for all, or was cancelled while it did
        self._producing = background.submit(self._produce(producing))

    def __iter__(self) -> Iterator[Group]:
        return self

    def __next__(self) -> Group:
        self._check_loop()
        asked = self._ask()
        try:
            group = asked.result()
        except CancelledError:  # its event loop ended before the producer could report it
            raise GroupsError(_ENDED) from None
        except KeyboardInterrupt:
            self._left.append(asked)
            raise
        if group is None:
            raise StopIteration
        return group

    def __aiter__(self) -> AsyncIterator[Group]:
        return self

    async def __anext__(self) -> Group:
        asked = self._ask()
        try:
            group = await asyncio.shield(asyncio.wrap_future(asked))
        except asyncio.CancelledError:
            if asked.cancelled():
                raise GroupsError(_ENDED) from None
            self._left.append(asked)
            raise
        if group is None:
            raise StopAsyncIteration
        return group

    def _ask(self) -> "Future[Group | None]":
        return self._left.popleft() if self._left else self._background.submit(self._next())

    def wait(self) -> list[Group]:
        """Return all groups when the last one is complete."""
        try:
            for group in self:
                self._waited_for.append(group)
        except Exception:
            self._give_back()
            raise
        return self._take_all()

    def __await__(self) -> Generator[Any, None, list[Group]]:
        return self._all().__await__()

    async def _all(self) -> list[Group]:
        try:
            async for group in self:
                self._waited_for.append(group)
        except Exception:
            self._give_back()
            raise
        return self._take_all()

    def _take_all(self) -> list[Group]:
        groups, self._waited_for = self._waited_for, []
        return sorted(groups, key=lambda group: self._order.get(group.task_id, 0))

    def _give_back(self) -> None:
        while self._left:
            self._left.popleft().add_done_callback(give_back_taken)
        while self._waited_for:
            self._waited_for.pop().give_back()

    def cancel(self) -> None:
        """Cancel the request. Running attempts continue to their end. Groups that were not taken are given back."""
        self._producing.cancel()
        self._give_back()

    def _check_loop(self) -> None:
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            return
        if running in self._blocked:
            raise GroupsError("the engine's function runs in this event loop, which waiting would block; use await")

    async def _produce(self, groups: AsyncGenerator[Group, None]) -> None:
        try:
            async with aclosing(groups):
                async for group in groups:
                    self._ready.put_nowait(group)
        except BaseException as error:
            while not self._ready.empty():
                left = self._ready.get_nowait()
                if isinstance(left, Group):
                    left.give_back()
            # The waiting caller itself was not cancelled, so it gets another error.
            is_cancelled = isinstance(error, asyncio.CancelledError)
            self._ready.put_nowait(GroupsError(_ENDED) if is_cancelled else error)
            raise
        self._ready.put_nowait(None)

    async def _next(self) -> Group | None:
        one = await self._ready.get()
        if isinstance(one, Group):
            return one
        self._ready.put_nowait(one)  # for the next call
        if one is not None:
            raise one
        return None

"""`HeldOpen`: keeps an asynchronous context manager open in a task of its own.

Clients and servers of other projects belong to the asyncio task that enters them: that task must leave them, and they
cancel it if they break. With a task of its own, one call of an episode can open such a manager, others can use it, and
another can close it. If it breaks, it breaks alone.
"""

import asyncio
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

from rolltape.collect.functions import describe_error

T = TypeVar("T")
R = TypeVar("R")


class HeldOpen(Generic[T]):
    """Holds one context manager open, in the event loop in which `open` is called."""

    def __init__(self, context: AbstractAsyncContextManager[T]) -> None:
        self._context = context
        self._leave = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._broken_by: BaseException | None = None
        self._given: list[T] = []  # the value from entering it

    async def open(self) -> T:
        """Enter the context manager and return its value; raises ConnectionError if it breaks before."""
        entered = asyncio.Event()
        self._task = asyncio.create_task(self._hold(entered))
        waiting = asyncio.create_task(entered.wait())
        try:
            await asyncio.wait({waiting, self._task}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._task.cancel()
            raise
        finally:
            waiting.cancel()
        return self.given

    @property
    def given(self) -> T:
        """The value from entering it; raises ConnectionError if it is no longer open."""
        if self._task is None or self._task.done():
            raise ConnectionError(self._why_ended()) from self._broken_by
        return self._given[0]

    async def while_open(self, call: Coroutine[Any, Any, R]) -> R:
        """Await a call that needs it open; raises ConnectionError if it ends before the call does."""
        assert self._task is not None
        calling = asyncio.ensure_future(call)
        try:
            await asyncio.wait({calling, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():
                raise ConnectionError(self._why_ended())
            return calling.result()
        finally:
            calling.cancel()

    async def close(self) -> None:
        """Leave the context manager, and wait until that is done."""
        self._leave.set()
        if self._task is not None:
            await asyncio.wait({self._task})

    def _why_ended(self) -> str:
        return "it has ended" if self._broken_by is None else _innermost(self._broken_by)

    async def _hold(self, entered: asyncio.Event) -> None:
        try:
            async with self._context as given:
                self._given.append(given)
                entered.set()
                await self._leave.wait()
        except BaseException as error:  # noqa: BLE001 - it is raised where its value is used
            self._broken_by = error


def _innermost(error: BaseException) -> str:
    """The first error of an exception group, as text."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return describe_error(error)

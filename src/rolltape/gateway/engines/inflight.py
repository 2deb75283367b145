"""Requests that an engine ends when their connection closes, by the names under which they can be aborted."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class InFlight:
    """What is under way at one engine."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[Any]] = {}

    async def run(self, name: str, work: Coroutine[None, None, _T]) -> _T | None:
        """The work's result; None: it was aborted. Cancelling the caller, too, ends the work."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[name] = task
        try:
            await asyncio.wait({task})
        finally:
            del self._tasks[name]
            task.cancel()
        return None if task.cancelled() else task.result()

    def abort(self, name: str) -> None:
        task = self._tasks.get(name)
        if task is not None:
            task.cancel()

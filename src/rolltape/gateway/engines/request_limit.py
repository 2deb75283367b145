"""Limits of requests to one engine or judge: how many at a time, and how many per minute."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

_MINUTE_S = 60.0


class RequestLimit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits of requests to an engine or a judge."""

    at_once: int | None = None  # None for any number
    per_minute: float | None = None  # evenly spaced; None for any number

    def __post_init__(self) -> None:
        if self.at_once is not None and not self.at_once >= 1:
            raise ValueError(f"at_once is {self.at_once}; give 1 or more requests at a time, or leave it out")
        if self.per_minute is not None and not 0 < self.per_minute < float("inf"):
            raise ValueError(f"per_minute is {self.per_minute:g}; give a number of requests above 0, or leave it out")


class RequestQueue:
    """Starts requests in their order, each as soon as the limit allows it."""

    def __init__(
        self,
        limit: RequestLimit,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._slots = None if limit.at_once is None else asyncio.Semaphore(limit.at_once)
        self._spacing_s = 0.0 if limit.per_minute is None else _MINUTE_S / limit.per_minute
        self._next_s = now()  # when the next request may begin
        self._now = now
        self._sleep = sleep

    @asynccontextmanager
    async def turn(self, left: asyncio.Event | None = None) -> AsyncIterator[bool]:
        """Wait until a request may be made inside the block. Yields False if its caller has left meanwhile."""
        if self._slots is None:
            yield await self._spaced(left)
            return
        if not await done_before(self._slots.acquire(), left):
            yield False
            return
        try:
            yield await self._spaced(left)
        finally:
            self._slots.release()

    async def _spaced(self, left: asyncio.Event | None) -> bool:
        if not self._spacing_s:
            return True
        now = self._now()
        begins_s = max(now, self._next_s)
        self._next_s = begins_s + self._spacing_s
        return begins_s <= now or await done_before(self._sleep(begins_s - now), left)


async def done_before(work: Awaitable[Any], left: asyncio.Event | None) -> bool:
    """Return whether `work` was done before the caller left. If the caller leaves, the work is cancelled."""
    if left is None:
        await work
        return True
    waits = [asyncio.ensure_future(work), asyncio.ensure_future(left.wait())]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        return waits[0].done()
    finally:
        for wait in waits:
            wait.cancel()

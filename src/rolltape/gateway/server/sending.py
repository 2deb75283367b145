"""Send a reply to a client, and end the connection of one that takes nothing of it."""

import asyncio
import logging
from typing import Self

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

log = logging.getLogger("rolltape.gateway")

_LOOKS_PER_STALL = 4


def drain_all(http: web.Request) -> None:
    """Have a write return when all of it is out of this process, however large it is."""
    if http.transport is not None:
        http.transport.set_write_buffer_limits(0)


class StallWatch:
    """Drops the connection if, within a `with` block, its client takes nothing for `stall_s` of what was written.

    A write that waits for that client then returns or raises, and its connection is seen to be closed.
    """

    def __init__(self, http: web.Request, writer: AbstractStreamWriter | None, stall_s: float) -> None:
        assert writer is not None  # the response is not sent yet
        self._http = http
        self._writer = writer
        self._stall_s = stall_s
        self._loop = asyncio.get_running_loop()
        self._taken = -1  # bytes
        self._since = self._loop.time()

    def __enter__(self) -> Self:
        self._look_later()
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()

    def _look_later(self) -> None:
        self._timer = self._loop.call_later(self._stall_s / _LOOKS_PER_STALL, self._look)

    def _look(self) -> None:
        transport = self._http.transport
        if transport is None:
            return
        waiting, now = transport.get_write_buffer_size(), self._loop.time()
        taken = self._writer.output_size - waiting
        if not waiting or taken != self._taken:
            self._taken, self._since = taken, now
        elif now - self._since >= self._stall_s:
            log.warning("a client has taken nothing of its reply for %g s: its connection is closed", self._stall_s)
            transport.abort()
            return
        self._look_later()

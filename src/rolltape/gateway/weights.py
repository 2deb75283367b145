"""Change weights while agents run: requests wait, and replies in flight are interrupted and continued afterwards."""

import asyncio
from collections.abc import Awaitable, Callable

Interrupt = Callable[[], Awaitable[None]]


class Weights:
    """The version in use, and the gate that every generation passes."""

    def __init__(self, announce: Callable[[str], None], version: str | None = None) -> None:
        self._announce = announce
        self._open = asyncio.Event()
        self._open.set()
        self._in_flight: dict[str, Interrupt] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.version = version  # None: not known
        self.changes = 0  # how often generating was stopped or allowed

    @property
    def paused(self) -> bool:
        return not self._open.is_set()

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    async def opened(self, left: asyncio.Event) -> None:
        """Wait until generating is allowed, or until the caller has left."""
        while self.paused and not left.is_set():
            waits = [asyncio.ensure_future(event.wait()) for event in (self._open, left)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()

    def begin(self, generation: str, interrupt: Interrupt) -> None:
        """Note that a generation runs; `interrupt` ends it with what was sampled so far."""
        self._in_flight[generation] = interrupt
        self._idle.clear()

    def end(self, generation: str) -> None:
        self._in_flight.pop(generation, None)
        if not self._in_flight:
            self._idle.set()

    async def pause(self) -> int:
        """Hold new generations and interrupt those in flight. Returns how many, once the engines have ended them."""
        self.changes += 1
        self._open.clear()
        interrupts = list(self._in_flight.values())
        await asyncio.gather(*(interrupt() for interrupt in interrupts))
        await self._idle.wait()
        return len(interrupts)

    def resume(self) -> None:
        self.changes += 1
        self._open.set()

    def announce(self, version: str, *, record: bool = True) -> None:
        """Announce the weight version that the engines have from now on; `record` it, unless another worker has."""
        if version != self.version:
            if record:
                self._announce(version)
            self.version = version

"""Change weights while agents run: requests wait, and replies in flight are interrupted and continued afterwards."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rolltape.errors import BadRequest, EngineError
from rolltape.gateway.engines.inprocess import InProcessEngine
from rolltape.gateway.engines.pool import EnginePool
from rolltape.gateway.engines.protocol import Engine, TakesWeights

Interrupt = Callable[[], Awaitable[None]]
AskWorkers = Callable[[str, dict[str, Any]], Awaitable[list[dict[str, Any]]]]  # path and body, and their answers


class Weights:
    """The version in use, and the gate that every generation passes."""

    def __init__(self, pool: EnginePool, announce: Callable[[str], None], version: str | None = None) -> None:
        self._pool = pool
        self._announce = announce
        self._open = asyncio.Event()
        self._open.set()
        self._in_flight: dict[str, Interrupt] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._changing = asyncio.Lock()  # one change at a time: nobody lets replies go on while engines load
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
        async with self._changing:
            return await self._pause()

    async def resume(self, version: str | None = None, *, record: bool = True) -> None:
        """Continue after a pause, with the given weight version or else the one that the engines report."""
        async with self._changing:
            await self._resume(version, record=record)

    async def update(self, folder: str | Path, version: str, ask_workers: AskWorkers | None = None) -> int:
        """Have the engines load weights. Replies in flight are interrupted, and go on under the new version.

        Returns how many there were. `ask_workers` is given where other processes use the same engines. If an engine
        fails, everything stays paused, since which weights the engines have is not known then.
        """
        if ask_workers is not None and any(isinstance(engine, InProcessEngine) for engine in self._pool.engines):
            raise BadRequest("each worker has a tiny engine of its own; serve one for all with `rolltape engine`")
        engines = [_taking_weights(engine) for engine in self._pool.engines]
        # A folder that is not here may be one on the engines' machine, or a name that they know.
        folder = str(Path(folder).absolute()) if Path(folder).exists() else str(folder)
        async with self._changing:
            interrupted = await self._pause()
            if ask_workers is not None:
                interrupted += sum(answer["interrupted"] for answer in await ask_workers("/weights/pause", {}))
            loads = (engine.load_weights(folder, version) for engine in engines)
            errors = [error for error in await asyncio.gather(*loads, return_exceptions=True) if error is not None]
            if errors:
                causes = "; ".join(map(str, errors))
                hint = "the gateway is paused: update the weights again, or resume it"
                raise EngineError(f"weights {version} in {folder} are not loaded: {causes}; {hint}") from errors[0]
            await self._resume(version, record=True)
            if ask_workers is not None:
                await ask_workers("/weights/resume", {"version": version})
        return interrupted

    def announce(self, version: str, *, record: bool = True) -> None:
        """Announce the weight version that the engines have from now on; `record` it, unless another worker has."""
        if version != self.version:
            if record:
                self._announce(version)
            self.version = version

    async def _pause(self) -> int:
        self.changes += 1
        self._open.clear()
        interrupts = list(self._in_flight.values())
        await asyncio.gather(*(interrupt() for interrupt in interrupts))
        await self._idle.wait()
        return len(interrupts)

    async def _resume(self, version: str | None, *, record: bool) -> None:
        health = await self._pool.look()
        reported = {one.facts.version for one in health if one.facts is not None}
        version = version or (reported.pop() if len(reported) == 1 else None)
        if version is not None:
            self.announce(version, record=record)
        self.changes += 1
        self._open.set()


def _taking_weights(engine: Engine) -> TakesWeights:
    if not isinstance(engine, TakesWeights):
        hint = "pause the gateway, change them there, and resume it"
        raise BadRequest(f"{engine.name}: it is not known how weights are loaded there; {hint}")
    return engine

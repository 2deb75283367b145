"""Change weights while agents run: requests wait, and replies in flight are interrupted and continued afterwards."""

import asyncio
from collections.abc import Awaitable, Callable
from os import PathLike
from pathlib import Path
from typing import Any

from rolltape.errors import BadRequest, EngineError
from rolltape.gateway.engines.inprocess import InProcessEngine
from rolltape.gateway.engines.pool import EnginePool, LoadedWeights
from rolltape.gateway.engines.protocol import TakesWeights

AskWorkers = Callable[[str, dict[str, Any]], Awaitable[list[dict[str, Any]]]]  # path and body → answers


class Weights:
    """The weight version of the engines, and its changes."""

    def __init__(self, pool: EnginePool, announce: Callable[[str], None]) -> None:
        self._pool = pool
        self._announce = announce
        self._changing = asyncio.Lock()  # one change at a time: replies must not continue while engines load
        self.version: str | None = None  # None if unknown
        self.changes = 0  # how often generating was paused or resumed

    async def pause(self) -> int:
        """Hold new generations and interrupt running ones. Return their number, once the engines have ended them."""
        async with self._changing:
            interrupted = await self._pause()
            await self._pool.forget_weights()
            return interrupted

    async def resume(self, version: str | None = None, *, folder: str | None = None, record: bool = True) -> None:
        """Continue after a pause, with the given weight version, else the one that the engines report.

        `folder` has those weights, for an engine that restarts.
        """
        if version:
            check_version(version)
        async with self._changing:
            if folder is not None and version is not None:
                self._pool.keep(LoadedWeights(folder, version))
            await self._resume(version, record=record)

    async def update(self, folder: str | Path, version: str, ask_workers: AskWorkers | None = None) -> int:
        """Have the engines load weights. Replies in flight are interrupted, and continue under the new version.

        Returns their number. `ask_workers` is set if other processes use the same engines. If an engine fails,
        everything stays paused, since the engines' weights are then unknown.
        """
        check_weights(folder, version)
        if ask_workers is not None and any(isinstance(engine, InProcessEngine) for engine in self._pool.engines):
            raise BadRequest("each worker has a tiny engine of its own; serve one for all with `rolltape engine`")
        for engine in self._pool.engines:
            if not isinstance(engine, TakesWeights):
                hint = "pause the gateway, change them there, and resume it"
                raise BadRequest(f"{engine.name}: the gateway cannot load weights there; {hint}")
        # A folder that is not here may be on the engines' machine, or a name that they know.
        folder = str(Path(folder).absolute()) if Path(folder).exists() else str(folder)
        async with self._changing:
            interrupted = await self._pause()
            if ask_workers is not None:
                interrupted += sum(answer["interrupted"] for answer in await ask_workers("/weights/pause", {}))
            if errors := await self._pool.load(LoadedWeights(folder, version)):
                await self._pool.forget_weights()
                causes = "; ".join(map(str, errors))
                hint = "the gateway is paused: update the weights again, or resume it"
                raise EngineError(f"weights {version} in {folder} are not loaded: {causes}; {hint}") from errors[0]
            await self._resume(version, record=True)
            if ask_workers is not None:
                await ask_workers("/weights/resume", {"version": version, "folder": folder})
        return interrupted

    def announce(self, version: str, *, record: bool = True) -> None:
        """Set the weight version that the engines have from now on; `record` is False if another worker records it."""
        check_version(version)
        if version != self.version:
            if record:
                self._announce(version)
            self.version = version
            if self._pool.weights is not None and self._pool.weights.version != version:
                self._pool.weights = None

    async def _pause(self) -> int:
        self.changes += 1
        return await self._pool.pause()

    async def _resume(self, version: str | None, *, record: bool) -> None:
        health = await self._pool.look()
        reported = {one.facts.version for one in health if one.facts is not None}
        version = version or (reported.pop() if len(reported) == 1 else None)
        if version is not None:
            self.announce(version, record=record)
        self.changes += 1
        self._pool.resume()


def check_weights(folder: object, version: object) -> None:
    """Raise BadRequest unless these are valid as the folder of weights and their version."""
    if not isinstance(folder, str | PathLike):
        raise BadRequest(f"folder is {folder!r}, of type {type(folder).__name__}; give the path of a checkpoint")
    check_version(version)


def check_version(version: object) -> None:
    """Raise BadRequest unless this is valid as a weight version."""
    if not isinstance(version, str) or not version:
        raise BadRequest(f"version is {version!r}, of type {type(version).__name__}; give a text such as '20'")

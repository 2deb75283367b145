"""Engines that a collection starts on the cluster. Each is a server on a node with GPUs, for all other nodes."""

import asyncio
import contextlib
import logging
import os
import shlex
import socket
import tempfile
from pathlib import Path
from typing import Any

from rolltape.collect.runners.ray.members import describe_ray_error
from rolltape.collect.runners.ray.settings import PlacedEngine
from rolltape.collect.sandboxes.protocol import ConfinedRun, ProgramEnd
from rolltape.collect.sandboxes.running import GRACE_S, read_end_of, supervise
from rolltape.collect.sandboxes.scripts.supervisor import Order
from rolltape.errors import CollectError, EngineError
from rolltape.gateway.engines.opening import open_engine

log = logging.getLogger("rolltape.collect")

_PATIENCE_S = 15.0  # before a warning about what it waits for
_LOOK_S = 1.0
_AGAIN_S = 5.0  # before an engine that has ended is started again
_SHOWN_BYTES = 2_000


class EngineHost:
    """Runs an engine's server on its node, and starts it again if it ends. It is a Ray actor.

    With the actor, the server and all its processes end.
    """

    def __init__(self, engine: PlacedEngine, api_key: str | None) -> None:
        self._engine = engine
        self._api_key = api_key
        self._folder = Path(tempfile.mkdtemp(prefix="rolltape-engine-"))
        self._end: ProgramEnd | None = None
        self._running: asyncio.Task[None] | None = None

    async def place(self) -> str:
        """The host of this actor. It answers once Ray has found a node."""
        return socket.gethostname()

    async def start(self) -> str:
        """Start the server, and return its engine's name once it answers; raises CollectError if it ends first."""
        from ray.util import get_node_ip_address

        host, engine = str(get_node_ip_address()), self._engine  # type: ignore[no-untyped-call]
        with socket.socket() as free:
            free.bind((host, 0))
            port = free.getsockname()[1]
        words = [word.replace("{host}", host).replace("{port}", str(port)) for word in shlex.split(engine.command)]
        self._running = asyncio.ensure_future(self._keep_running(words))
        spec = f"{engine.kind}:http://{host}:{port}"
        client = open_engine(spec, api_key=self._api_key)
        try:
            async with asyncio.timeout(engine.start_s):
                while self._end is None:
                    with contextlib.suppress(EngineError):
                        await client.facts()
                        return spec
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            raise self._error(f"it does not answer after {engine.start_s:g} s") from None
        finally:
            await client.close()
        raise self._error(f"it ended before it answered, with exit code {self._end.exit_code}")

    async def close(self) -> None:
        """End the server."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _keep_running(self, words: list[str]) -> None:
        while True:
            order = Order(
                command=words,
                env=dict(os.environ),
                cwd=str(Path.cwd()),
                stdin=os.devnull,
                stdout=str(self._folder / "stdout"),
                stderr=str(self._folder / "stderr"),
            )
            self._end = await supervise(ConfinedRun(order), str(self._folder), None)
            await asyncio.sleep(_AGAIN_S)

    def _error(self, why: str) -> CollectError:
        printed = "".join(
            read_end_of(self._folder / name, _SHOWN_BYTES)
            for name in ("stdout", "stderr")
            if (self._folder / name).exists()
        )
        output = f"; it printed: {' '.join(printed.split())[-500:]}" if printed.strip() else ""
        why = self._end.error or why if self._end is not None else why
        return CollectError(f"{self._engine.command!r} on {socket.gethostname()}: {why}{output}")


class PlacedEngines:
    """The engines of a collection that run on the cluster."""

    def __init__(self, ray: Any, engine: PlacedEngine, api_key: str | None) -> None:
        self._ray = ray
        self._engine = engine
        self._are_placed = False  # an actor without a node does not answer
        hosts = ray.remote(EngineHost).options(num_cpus=0, num_gpus=engine.gpus, max_restarts=0, max_concurrency=8)
        self._hosts = [hosts.remote(engine, api_key) for _ in range(engine.copies)]

    async def start(self) -> tuple[str, ...]:
        """Start all engines, and return their names as for `--engine`; raises CollectError if one cannot be started."""
        from ray.exceptions import RayError

        placed = asyncio.gather(*(host.place.remote() for host in self._hosts))
        await asyncio.wait({placed}, timeout=min(_PATIENCE_S, self._engine.start_s))
        if not placed.done():
            log.warning("waiting for nodes with %g free GPUs, for %d engines", self._engine.gpus, self._engine.copies)
        await asyncio.wait({placed}, timeout=self._engine.start_s)
        if not placed.done():
            placed.cancel()
            total = sum(node["Resources"].get("GPU", 0) for node in self._ray.nodes() if node["Alive"])
            raise CollectError(
                f"{self._engine.copies} engines with {self._engine.gpus:g} GPUs each found no node after "
                f"{self._engine.start_s:g} s; the cluster has {total:g} GPUs in all"
            )
        log.warning("starting engines on %s", ", ".join(placed.result()))
        self._are_placed = True
        try:
            return tuple(await asyncio.gather(*(host.start.remote() for host in self._hosts)))
        except RayError as error:
            raise CollectError(f"no engine on the cluster: {describe_ray_error(error)}") from None

    async def close(self) -> None:
        """End all engines."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(4 * GRACE_S if self._are_placed else 0):
                await asyncio.gather(*(host.close.remote() for host in self._hosts), return_exceptions=True)
        for host in self._hosts:
            self._ray.kill(host, no_restart=True)

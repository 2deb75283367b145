"""Health checks. The gateway can serve if it is not ending, an engine answers, and the run can be written to.

`/livez` reports that the process runs; `/readyz` and `/health` report that it can serve. A gateway whose weights are
being changed is ready: requests wait for the new weights, and none is refused.
"""

import asyncio
import os
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from aiohttp import web

from rolltape.gateway.service import Service
from rolltape.tape.rundir import open_private

_PROBE_BYTES = 64 * 1024
_FRESH_S = 1.0  # how long the last check of the disk counts
_PATIENCE_S = 5.0  # how long to wait for the disk


WAITING = "no engine has answered yet"


def not_ready(why: str) -> web.Response:
    """A 503 answer that states what is missing."""
    return web.Response(text=f"not ready: {why}\n", status=503, headers={"Retry-After": "1"})


async def answer_live(_: web.Request) -> web.Response:
    """`/livez`: 200 while the event loop runs."""
    return web.Response(text="ok\n")


def waiting_app() -> web.Application:
    """The application until an engine has answered: `/livez` answers 200, everything else 503."""

    async def wait(_: web.Request) -> web.Response:
        return not_ready(WAITING)

    app = web.Application()
    app.add_routes([web.get("/livez", answer_live), web.route("*", "/{path:.*}", wait)])
    return app


class Health:
    """Answers `/readyz` and `/health`: 200, or 503 with what is missing."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._folder = service.tape.directory.path
        self._looked_at = -_FRESH_S
        self._disk_error: str | None = None
        self._looking: asyncio.Future[str | None] | None = None
        # A thread of its own, so that checks do not wait behind the rendering of prompts.
        self._thread = ThreadPoolExecutor(1, "rolltape-health")

    async def answer(self, _: web.Request) -> web.Response:
        why = await self._missing()
        return web.Response(text="ok\n") if why is None else not_ready(why)

    def routes(self) -> list[web.RouteDef]:
        ready = [web.get(path, self.answer) for path in ("/readyz", "/health", "/healthz")]
        return [web.get("/livez", answer_live), *ready]

    async def _missing(self) -> str | None:
        if self._service.draining:
            return "the gateway is ending"
        if not any(one.up for one in self._service.pool.health()):
            return "no engine answers"
        if time.monotonic() - self._looked_at > _FRESH_S:
            await self._look()
        return self._disk_error

    async def _look(self) -> None:
        """Test the disk, once for all simultaneous requests."""
        if self._looking is None:
            self._looking = asyncio.get_running_loop().run_in_executor(self._thread, try_to_write, self._folder)
        looking = self._looking
        done, _ = await asyncio.wait({looking}, timeout=_PATIENCE_S)
        if done:
            self._disk_error, self._looking, self._looked_at = looking.result(), None, time.monotonic()
        else:
            self._disk_error = "the disk does not answer"


def try_to_write(folder: Path) -> str | None:
    """Why a folder cannot be written to, or None if it can. The answer has no path, since it needs no key."""
    path = folder / f".probe-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        try:
            with open_private(path, "xb") as file:
                file.write(b"\0" * _PROBE_BYTES)
        finally:
            path.unlink(missing_ok=True)
    except OSError as error:
        return f"the run cannot be written to ({error.strerror})"
    return None

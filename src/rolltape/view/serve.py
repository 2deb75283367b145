"""Serve runs until told to end."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from aiohttp import web

from rolltape.errors import ViewError
from rolltape.serving import is_loopback
from rolltape.view.guard import Guard
from rolltape.view.server import Server
from rolltape.view.watching import Watcher


class Served(NamedTuple):
    """Where runs are served."""

    address: str
    start: str  # where to begin: the page of the only run, or the list of all


@asynccontextmanager
async def served(
    locations: Sequence[str], *, host: str = "127.0.0.1", port: int = 0, key: str | None = None
) -> AsyncIterator[Served]:
    """Serve within the block."""
    if not is_loopback(host) and not key:
        raise ViewError(f"{host} is not loopback; give a key too, so that not everybody may look")
    watcher = Watcher(locations)
    runner = web.AppRunner(Server(watcher, Guard(key)).app(), access_log=None, shutdown_timeout=1.0)
    try:
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else error
            raise ViewError(f"{host}:{port} cannot be listened on: {why}; give another port, or 0 for any") from None
        await watcher.start()
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{runner.addresses[0][1]}/"
        yield Served(address, address + (next(iter(watcher.runs)) if len(watcher.runs) == 1 else ""))
    finally:
        await runner.cleanup()
        await watcher.close()


def end_asked() -> asyncio.Event:
    """Is set by SIGINT or SIGTERM from now on."""
    asked = asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, asked.set)
    return asked


def serve_view(
    locations: Sequence[str], *, host: str, port: int, key: str | None, on_ready: Callable[[str], None]
) -> None:
    """Serve until SIGINT or SIGTERM; `on_ready` is called with the address to begin at."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(name)s: %(message)s")
    # What is not HTTP is answered with 400; all else that goes wrong is told under our own name.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)

    async def until_told() -> None:
        told = end_asked()
        async with served(locations, host=host, port=port, key=key) as there:
            on_ready(there.start)
            await told.wait()

    asyncio.run(until_told())

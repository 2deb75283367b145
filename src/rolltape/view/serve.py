"""Start and stop the web page's server: within a block, or until a signal."""

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
from rolltape.serving import is_loopback, listening_url
from rolltape.view.base_path import parse_base_path
from rolltape.view.guard import ViewGuard
from rolltape.view.served_runs import ServedRuns
from rolltape.view.server import ViewServer


class ServedAddress(NamedTuple):
    """Where runs are served."""

    address: str
    start: str  # where to begin: the page of the only run, or the list of all


@asynccontextmanager
async def served(
    locations: Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    key: str | None = None,
    base_path: str = "",
) -> AsyncIterator[ServedAddress]:
    """Serve runs within the block. Behind a proxy that serves them below a path, that is the `base_path`."""
    base = parse_base_path(base_path)
    if not is_loopback(host) and not key:
        raise ViewError(f"{host} is not loopback, and no key is given; give a key, so that not everybody may look")
    runs = ServedRuns(locations)
    runner = web.AppRunner(ViewServer(runs, ViewGuard(key), base).app(), access_log=None, shutdown_timeout=1.0)
    try:
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else error
            raise ViewError(f"{host}:{port} cannot be listened on: {why}; give another port, or 0 for any") from None
        await runs.start()
        address = f"{listening_url(runner)}{base}/"
        yield ServedAddress(address, address + (next(iter(runs.runs)) if len(runs.runs) == 1 else ""))
    finally:
        await runner.cleanup()
        await runs.close()


def stop_signal() -> asyncio.Event:
    """An event that SIGINT or SIGTERM sets from now on."""
    stop = asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    return stop


def serve_view(
    locations: Sequence[str],
    *,
    host: str,
    port: int,
    key: str | None,
    on_ready: Callable[[str], None],
    base_path: str = "",
) -> None:
    """Serve until SIGINT or SIGTERM; `on_ready` is called with the address to begin at."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(name)s: %(message)s")
    # What is not HTTP is answered with 400; all other errors are logged under our own name.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)

    async def serve_until_stopped() -> None:
        stop = stop_signal()
        async with served(locations, host=host, port=port, key=key, base_path=base_path) as address:
            on_ready(address.start)
            await stop.wait()

    asyncio.run(serve_until_stopped())

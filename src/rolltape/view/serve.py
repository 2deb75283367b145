"""Start and stop the web page's server: within a block, or until a signal."""

import asyncio
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple
from urllib.parse import quote, urlencode

from aiohttp import web

from rolltape.errors import ViewError
from rolltape.serving import describe_listen_error, is_loopback, listening_url
from rolltape.view.annotating import why_read_only
from rolltape.view.base_path import parse_base_path
from rolltape.view.guard import ViewGuard
from rolltape.view.rights import AnnotateRight, Share, ShareLinks
from rolltape.view.served_runs import ServedRuns
from rolltape.view.server import ViewServer


class ServedAddress(NamedTuple):
    """The addresses of a running server."""

    address: str
    start: str  # the first page: that of the only run, or the list of all
    annotate: str | None  # the code for a link whose first reader may annotate; None if read-only
    runs: ServedRuns
    shares: ShareLinks | None  # signs links to one rollout; None without a key
    read_only: list[str]  # reasons why some runs cannot be annotated

    def link(self, key: str | None) -> str:
        """The address of the first page with the key and the code."""
        carried = {name: value for name, value in (("key", key), ("annotate", self.annotate)) if value}
        return self.start + (f"?{urlencode(carried, quote_via=quote)}" if carried else "")

    def share_link(self, r: str, rollout: str, lasts_s: int) -> str:
        """The address of one rollout, for readers without a key."""
        assert self.shares is not None
        token = self.shares.sign(Share(r, rollout, int(time.time()) + lasts_s))
        return f"{self.address}{quote(r)}/rollout/{quote(rollout)}?share={token}"


@asynccontextmanager
async def served(
    locations: Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    key: str | None = None,
    base_path: str = "",
    author: str | None = None,
) -> AsyncIterator[ServedAddress]:
    """Serve runs within the block. Behind a proxy that serves them below a path, `base_path` is this path.

    With an `author`, the first reader who opens the yielded link may annotate.
    """
    base = parse_base_path(base_path)
    if not is_loopback(host) and not key:
        raise ViewError(f"{host} is not loopback, and no key is given; give a key, or anyone could read the runs")
    runs = ServedRuns(locations)
    annotate = None if author is None else AnnotateRight(author)
    guard = ViewGuard(key, annotate)
    runner = web.AppRunner(ViewServer(runs, guard, base).app(), access_log=None, shutdown_timeout=1.0)
    try:
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise ViewError(describe_listen_error(host, port, error)) from None
        await runs.start()
        address = f"{listening_url(runner)}{base}/"
        start = address + (next(iter(runs.runs)) if len(runs.runs) == 1 else "")
        code = None if annotate is None else annotate.new_code()
        read_only = [] if annotate is None else [one for run in runs.runs.values() if (one := why_read_only(run))]
        yield ServedAddress(address, start, code, runs, guard.shares, read_only)
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
    on_ready: Callable[[ServedAddress], None],
    base_path: str = "",
    author: str | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM; `on_ready` is called when it listens. An `author` may annotate."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(name)s: %(message)s")
    # Invalid HTTP is answered with 400; all other errors are logged under Rolltape's own name.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)

    async def serve_until_stopped() -> None:
        stop = stop_signal()
        async with served(locations, host=host, port=port, key=key, base_path=base_path, author=author) as address:
            on_ready(address)
            await stop.wait()

    asyncio.run(serve_until_stopped())

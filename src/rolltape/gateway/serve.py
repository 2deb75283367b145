"""Run the gateway until a signal stops it."""

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rolltape.gateway.admin_key import HEADER_FILE, read_admin_key
from rolltape.gateway.engines.protocol import Engine
from rolltape.gateway.gateway import Gateway
from rolltape.gateway.settings import GatewaySettings
from rolltape.gateway.workers import WorkerPlace, serve_workers
from rolltape.serving import loop_factory, raise_file_limit

_SWITCH_S = 0.001


def serve_gateway(
    open_engines: Callable[[], Sequence[Engine]],
    run: Path,
    model: Path | None,
    settings: GatewaySettings,
    workers: int,
) -> int:
    """Serve until SIGINT or SIGTERM, then drain; a second signal ends at once. Prints the address to standard output.

    Returns the exit code. Each of the `workers` processes opens its own engines.
    """
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(name)s: %(message)s")
    # The event loop waits up to this long for each busy thread, whenever it has something to do.
    sys.setswitchinterval(_SWITCH_S)
    raise_file_limit()

    def serve(worker: WorkerPlace | None, ready: Callable[[], None] | None) -> None:
        gateway = Gateway(engine=list(open_engines()), tape=run, model=model, settings=settings, worker=worker)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_serve(gateway, ready))

    if workers > 1:
        return serve_workers(workers, settings.host, settings.port, serve, lambda url: print(url, flush=True))
    serve(None, None)
    return 0


async def _serve(gateway: Gateway, ready: Callable[[], None] | None) -> None:
    """Serve until a signal. A worker calls `ready`; a single gateway prints its address."""
    loop = asyncio.get_running_loop()
    started, stopped = asyncio.Event(), asyncio.Event()
    is_first = gateway.worker is None or gateway.worker.number == 0
    main = asyncio.current_task()
    assert main is not None

    def end() -> None:
        if started.is_set() and stopped.is_set():
            gateway.service.hurry()
        if not started.is_set() or stopped.is_set():
            main.cancel()
        stopped.set()

    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, end)
    try:
        async with gateway:
            started.set()
            _collect_garbage_seldom()
            if ready is not None:
                ready()
            else:
                print(gateway.url, flush=True)
            if is_first:
                _describe(gateway)
            await stopped.wait()
            if is_first:
                print("rolltape: ending; turns in flight may finish, another signal ends them", file=sys.stderr)
    except asyncio.CancelledError:
        print("rolltape: ended at once", file=sys.stderr)


def _describe(gateway: Gateway) -> None:
    """Print what it serves, and how requests come to their sessions."""
    print(f"rolltape: {gateway.service.prompts.describe()}", file=sys.stderr)
    if (why := gateway.service.turns.buffered) is not None:
        print(f"rolltape: replies are streamed only after they have ended: {why}", file=sys.stderr)
    if gateway.service.settings.open:
        named = "the header x-rolltape-session or /with/session=NAME in the URL names one"
        print(f"rolltape: --open: requests need no key and no session; {named}", file=sys.stderr)
    folder = gateway.service.tape.directory.path
    if gateway.admin_key == read_admin_key(folder):
        print(f"rolltape: sessions are opened with the key in {folder / HEADER_FILE}", file=sys.stderr)


def _collect_garbage_seldom() -> None:
    """Run the garbage collector rarely. A turn leaves no cycles, and looking for them took a tenth of each turn."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)

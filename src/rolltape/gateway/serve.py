"""Run the gateway until it is asked to stop."""

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rolltape.gateway.admin_key import HEADER_FILE, read_admin_key
from rolltape.gateway.engines.protocol import Engine
from rolltape.gateway.gateway import Gateway
from rolltape.gateway.settings import GatewaySettings
from rolltape.serving import loop_factory, raise_file_limit

_SWITCH_S = 0.001


def serve_gateway(engines: Sequence[str | Engine], run: Path, model: Path | None, settings: GatewaySettings) -> None:
    """Serve until SIGINT or SIGTERM, then drain; a second one ends at once. The address goes to standard output."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(name)s: %(message)s")
    # The event loop waits this long for each thread that is at work, whenever it has something to do.
    sys.setswitchinterval(_SWITCH_S)
    raise_file_limit()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(Gateway(engine=list(engines), tape=run, model=model, settings=settings)))


async def _serve(gateway: Gateway) -> None:
    loop = asyncio.get_running_loop()
    started, stopped = asyncio.Event(), asyncio.Event()
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
            print(gateway.url, flush=True)
            print(f"rolltape: {gateway.service.prompts.describe()}", file=sys.stderr)
            if (why := gateway.service.turns.buffered) is not None:
                print(f"rolltape: streamed replies come when they have ended: {why}", file=sys.stderr)
            if gateway.admin_key == read_admin_key(gateway.service.tape.directory.path):
                kept = gateway.service.tape.directory.path / HEADER_FILE
                print(f"rolltape: sessions are opened with the key in {kept}", file=sys.stderr)
            await stopped.wait()
            print("rolltape: ending; turns in flight may finish, another signal ends them", file=sys.stderr)
    except asyncio.CancelledError:
        print("rolltape: ended at once", file=sys.stderr)


def _collect_garbage_seldom() -> None:
    """What a turn leaves is freed by itself; looking for cycles among all that is held took a tenth of each turn."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)

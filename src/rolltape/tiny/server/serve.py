"""Run the server until a signal stops it."""

import asyncio
import logging
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from rolltape.errors import EngineError
from rolltape.records.turn import LogprobKind
from rolltape.serving import describe_listen_error, listening_url, loop_factory
from rolltape.tiny import TinyEngine, shipped_model
from rolltape.tiny.server.app import EngineServer

# How long replies in flight may continue after the first signal; a second one ends them at once.
_DRAIN_S = 10.0


def serve_engine(
    model: Path | None,
    *,
    host: str,
    port: int,
    weight_version: str,
    served_model_name: str | None,
    context: int | None,
    max_running: int,
    logprobs: LogprobKind,
    incremental: bool,
    api_key: str | None,
) -> None:
    """Serve a model, None being the shipped one, until SIGINT or SIGTERM; prints the address once it answers."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(name)s: %(message)s")
    folder = shipped_model() if model is None else model
    engine = TinyEngine(folder, weight_version, max_running=max_running, context=context)
    server = EngineServer(
        engine, folder, model_name=served_model_name, kind=logprobs, incremental=incremental, api_key=api_key
    )

    async def serve() -> None:
        async with engine, _listening(server.app(), host, port) as url:
            print(url, flush=True)
            print(f"rolltape: serving {folder}, weights {engine.version}", file=sys.stderr)
            await _wait_for_end(engine)

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve())


@asynccontextmanager
async def _listening(app: web.Application, host: str, port: int) -> AsyncIterator[str]:
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=_DRAIN_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        raise EngineError(describe_listen_error(host, port, error)) from None
    try:
        yield listening_url(runner)
    finally:
        await runner.cleanup()


async def _wait_for_end(engine: TinyEngine) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def end() -> None:
        if ended.is_set():
            engine.abort_all()
        ended.set()

    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, end)
    await ended.wait()

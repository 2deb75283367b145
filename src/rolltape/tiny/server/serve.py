"""Run the server until it is asked to stop."""

import asyncio
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
from aiohttp import web

from rolltape.errors import EngineError
from rolltape.records.turn import LogprobKind
from rolltape.tiny.engine import EmbeddedEngine
from rolltape.tiny.server.app import make_app
from rolltape.tiny.shipped import shipped_model

# How long replies in flight may go on after the first signal; a second one ends them at once.
_DRAIN_S = 10.0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What `rolltape engine` was told."""

    model: Path | None  # None: the shipped one
    host: str
    port: int
    weight_version: str
    served_model_name: str | None
    context: int | None
    max_running: int
    logprobs: LogprobKind
    incremental: bool
    api_key: str | None


def serve(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM; the address goes to standard output once it answers."""
    folder = shipped_model() if settings.model is None else settings.model
    engine = EmbeddedEngine.load(
        folder, settings.weight_version, max_running=settings.max_running, context=settings.context
    )
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(engine, folder, settings))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


async def _serve(engine: EmbeddedEngine, folder: Path, settings: Settings) -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(name)s: %(message)s")
    async with engine:
        app = make_app(
            engine,
            folder,
            model_name=settings.served_model_name,
            kind=settings.logprobs,
            incremental=settings.incremental,
            api_key=settings.api_key,
        )
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=_DRAIN_S)
        await runner.setup()
        site = web.TCPSite(runner, settings.host, settings.port)
        try:
            await site.start()
        except OSError as error:
            raise EngineError(f"--port {settings.port}: {error.strerror}") from None
        host, port = runner.addresses[0][:2]
        print(f"http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
        print(f"rolltape: serving {folder}, weights {engine.version}", file=sys.stderr)
        try:
            await _told_to_end(engine)
        finally:
            await runner.cleanup()


async def _told_to_end(engine: EmbeddedEngine) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def again() -> None:
        engine.abort_all()

    def end() -> None:
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(name, again)
        ended.set()

    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, end)
    await ended.wait()

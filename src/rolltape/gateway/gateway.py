"""The gateway as a library: `async with rolltape.Gateway(engine=…, model=…, tape=…) as gateway`."""

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
from aiohttp import web

from rolltape.errors import BadRequest, EngineError, EngineUnreachable, GatewayError, NotAllowed
from rolltape.gateway.admin_key import RunningGateway, announced, keep_admin_key, make_admin_key
from rolltape.gateway.engines.opening import open_engine, tiny_folder
from rolltape.gateway.engines.pool import EnginePool, LoadedWeights
from rolltape.gateway.engines.protocol import Engine, EngineFacts
from rolltape.gateway.finished import Ending, Finished
from rolltape.gateway.peers import Peer, Siblings, announced_peer, own_peer
from rolltape.gateway.prompts import ChatPrompts, TextOnlyPrompts
from rolltape.gateway.server.accepting import SharedPort
from rolltape.gateway.server.admin import Admin
from rolltape.gateway.server.agents import Agents
from rolltape.gateway.server.answering import answering_with, http_log
from rolltape.gateway.server.forwarding import Forwarding
from rolltape.gateway.server.guard import GatewayGuard
from rolltape.gateway.server.health import Health, waiting_app
from rolltape.gateway.service import Service
from rolltape.gateway.sessions import EngineWait, OpenSession, SessionSpec
from rolltape.gateway.settings import GatewaySettings
from rolltape.gateway.wire import FoundByUrl, base_urls
from rolltape.gateway.workers import WorkerPlace
from rolltape.samples.summary import open_for_recording
from rolltape.serving import bound_url, describe_listen_error, is_loopback, open_listener
from rolltape.tape.recording.tape import Tape

log = logging.getLogger("rolltape.gateway")

T = TypeVar("T")

_LOOK_FOR_ENGINE_S = 0.5
_WAITING_CONNECTIONS = 4096  # hundreds of agents may connect at once; the system resets connections beyond its queue


class GatewaySession(FoundByUrl):
    """An open session, for the program that runs the agent."""

    def __init__(self, gateway: "Gateway", session: OpenSession) -> None:
        self._gateway = gateway
        self._session = session
        self.base_urls = base_urls(gateway.public_url, session.key)  # by SDK

    @property
    def id(self) -> str:
        return self._session.id

    @property
    def rollout(self) -> str:
        return self._session.rollout.id

    @property
    def key(self) -> str:
        """The key that opens only this session; agents send it as their API key."""
        return self._session.key

    def engine_wait(self) -> EngineWait:
        """Whether engines keep this session waiting, and their last error. It shows whether they caused a timeout.

        Example:

            if session.engine_wait().turns:
                print("no engine has given the reply yet")
        """
        return self._session.engine_wait()

    async def finish(self, **ending: Any) -> Finished:
        """End the session; the fields are those of `Ending`."""
        return await self._gateway.service.finish(self.id, _converted(ending, Ending))

    async def drop(self, reason: str) -> None:
        """End the session at once; its rollout fails with this reason."""
        await self._gateway.service.drop(self.id, reason)


class Gateway:
    """Serves agents over HTTP through one or several engines, and records every turn on a tape.

    Example:

        async with rolltape.Gateway(engine="sglang:http://127.0.0.1:30000", tape="runs/exp1", model=folder) as gateway:
            session = await gateway.open_session(task_id="t1")
            print(session.openai_base_url, session.key)

    A program that opens and ends sessions over HTTP sends `gateway.admin_key` as a bearer token. Agents never get it.
    A session's key only allows model calls of that session.
    """

    service: Service
    admin_key: str  # allows the routes under /sessions, /weights, /status and /metrics
    url: str  # its own address, known once it listens
    public_url: str  # at which agents reach it

    def __init__(
        self,
        *,
        engine: str | Engine | Sequence[str | Engine],
        tape: str | Path | Tape,
        model: str | Path | None = None,
        settings: GatewaySettings | None = None,
        worker: WorkerPlace | None = None,
        **options: Any,
    ) -> None:
        """`model` is a folder with the model's tokenizer, or None for that of a tiny engine. `options` are fields of
        GatewaySettings; `settings` passes all of them."""
        self._settings = settings or GatewaySettings()
        if options:
            known = msgspec.to_builtins(self._settings)
            self._settings = _converted({**known, **msgspec.to_builtins(options)}, GatewaySettings)
        if not self._settings.admin_key and not is_loopback(self._settings.host):
            raise NotAllowed(f"host {self._settings.host} is not loopback; give an admin key too")
        if self._settings.open and not is_loopback(self._settings.host):
            raise NotAllowed(
                f"host {self._settings.host} is not loopback, and an open gateway needs no key; "
                "listen on a loopback address, or leave out --open (in Python, `open`)"
            )
        several = isinstance(engine, Sequence) and not isinstance(engine, str)
        self._engines: list[str | Engine] = list(engine) if several else [engine]  # type: ignore[arg-type,list-item]
        self._tape = tape
        self._model = model
        self.worker = worker  # None if no other process shares its port
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await self._start(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _start(self, stack: AsyncExitStack) -> None:
        settings = self._settings
        engines = [open_engine(one) if isinstance(one, str) else one for one in self._engines]
        pool = EnginePool(engines, settings.engine_limit)
        stack.push_async_callback(pool.close)
        try:
            port = settings.port if self.worker is None else self.worker.port
            shared = self.worker is not None
            listener = open_listener(settings.host, port, _WAITING_CONNECTIONS, shared=shared)
        except OSError as error:
            raise GatewayError(describe_listen_error(settings.host, settings.port, error)) from None
        stack.callback(listener.close)
        self.url = bound_url(listener)
        self.public_url = (settings.public_url or self.url).rstrip("/")
        facts = await self._first_facts(pool, listener)
        prompts = self._prompts(pool)
        log.info("%s", prompts.describe())
        if prompts.warning:
            log.warning("%s", prompts.warning)
        tape = self._tape if isinstance(self._tape, Tape) else stack.enter_context(open_for_recording(self._tape))
        self.service = Service(
            tape,
            pool,
            prompts,
            settings,
            model_name=settings.model_name or facts.model or Path(prompts.folder).name,
            context=pool.context,
            version=facts.version if self.worker is None else None,
        )
        stack.push_async_callback(self.service.close)
        if settings.open:
            ending = asyncio.ensure_future(
                self.service.open_sessions.end_idle(self.service.finish, settings.open_idle_s)
            )
            stack.callback(ending.cancel)
        directory = tape.directory.path
        keeps = settings.keep_admin_key and settings.admin_key is None
        self.admin_key = settings.admin_key or (keep_admin_key(directory) if keeps else make_admin_key())
        peer = stack.enter_context(own_peer(tape.writer, self.worker))
        await self._listen(stack, listener, peer, facts)
        if keeps:
            stack.enter_context(announced(RunningGateway(self.url, directory)))

    async def _first_facts(self, pool: EnginePool, listener: socket.socket) -> EngineFacts:
        """Wait until an engine reports its facts, if necessary. Health checks are answered meanwhile."""
        deadline = time.monotonic() + self._settings.wait_engine_s
        runner: web.AppRunner | None = None
        async with AsyncExitStack() as waiting:
            while True:
                try:
                    return await pool.first_facts()
                except EngineUnreachable as error:
                    if time.monotonic() >= deadline:
                        raise
                    errors = str(error)
                if runner is None:
                    log.warning("%s waits %g s: %s", self.url, self._settings.wait_engine_s, errors)
                    runner = web.AppRunner(waiting_app(), access_log=None, logger=http_log, shutdown_timeout=0.1)
                    await runner.setup()
                    waiting.push_async_callback(runner.cleanup)
                    # A copy of the listener: connections after it is closed wait for the gateway.
                    await web.SockSite(runner, listener.dup()).start()
                await asyncio.sleep(_LOOK_FOR_ENGINE_S)

    async def _listen(self, stack: AsyncExitStack, listener: socket.socket, peer: Peer, facts: EngineFacts) -> None:
        settings = self._settings
        forwarding = Forwarding(peer, settings.stall_s)
        stack.push_async_callback(forwarding.close)
        siblings = Siblings(self.service.tape.directory, peer, self.worker)
        # At cleanup, turns have ended already; it does not wait for clients that do not read.
        runner = web.AppRunner(
            self._app(forwarding, siblings),
            access_log=None,
            logger=http_log,
            handler_cancellation=True,
            shutdown_timeout=1.0,
            keepalive_timeout=settings.idle_s,
            auto_decompress=False,  # `read_body` does it, within limits and off the event loop
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.UnixSite(runner, peer.socket, backlog=_WAITING_CONNECTIONS).start()  # for the run's other gateways
        stack.enter_context(announced_peer(self.service.tape.directory.path, peer))
        if self.worker is None:
            await web.SockSite(runner, listener, backlog=_WAITING_CONNECTIONS).start()
        else:
            await self._join_siblings(siblings, forwarding, facts)
            assert runner.server is not None
            port = SharedPort(runner.server, peer, siblings)
            await port.start(listener, _WAITING_CONNECTIONS)
            stack.callback(port.close)
        self._runner = runner
        # New turns are refused and those in flight drain while the port still answers.
        stack.push_async_callback(self.service.drain)

    def _app(self, forwarding: Forwarding, siblings: Siblings) -> web.Application:
        """The application with all routes."""
        service, settings = self.service, self._settings
        answering = answering_with(service, forwarding.forward)
        app = web.Application(client_max_size=settings.max_body_mib * 2**20, middlewares=[answering])
        guard = GatewayGuard(self.admin_key, forwarding.is_forwarded, loopback=is_loopback(settings.host))
        app.add_routes(Agents(service, guard, forwarding, siblings).routes())
        app.add_routes(Admin(service, guard, self.public_url, forwarding, siblings).routes())
        app.add_routes(forwarding.routes())
        app.add_routes(Health(service).routes())
        return app

    async def _join_siblings(self, siblings: Siblings, forwarding: Forwarding, facts: EngineFacts) -> None:
        """Take the weight version from another worker, else from the engines. At a common start only the first worker
        records it."""
        assert self.worker is not None
        weights = self.service.weights
        changes = weights.changes
        peers = siblings.others()[:1] if self.worker.is_successor else []
        for answer in await forwarding.ask(peers, "GET", "/status"):
            state = msgspec.json.decode(answer)
            if state["version"] is not None:
                weights.announce(state["version"], record=False)
                if state["weights_folder"] is not None:
                    self.service.pool.keep(LoadedWeights(state["weights_folder"], state["version"]))
            if state["paused"] and weights.changes == changes:  # otherwise another worker has just changed it
                await weights.pause()
            return
        if facts.version is not None:
            weights.announce(facts.version, record=self.worker.is_successor or self.worker.number == 0)

    @asynccontextmanager
    async def listening_on(self, listener: socket.socket) -> AsyncIterator[None]:
        """Also accept connections of another listener within the block, for a sandbox with its own network."""
        site = web.SockSite(self._runner, listener, backlog=_WAITING_CONNECTIONS)
        await site.start()
        try:
            yield
        finally:
            await site.stop()

    def _prompts(self, pool: EnginePool) -> ChatPrompts:
        """The prompts of the model in its folder; no folder is needed if all engines take messages."""
        folder = self._model or tiny_folder([one for one in self._engines if isinstance(one, str)])
        if folder is None and not any(engine.token_faithful for engine in pool.engines):
            return TextOnlyPrompts()
        if folder is not None:
            settings = self._settings
            return ChatPrompts(
                folder,
                renderer=settings.renderer,
                thinking=settings.thinking,
                thinking_retention=settings.thinking_retention,
                special_text=settings.special_text,
            )
        raise EngineError("no model: give the folder with the tokenizer of the model that the engine serves")

    async def open_session(self, spec: SessionSpec | None = None, **fields: Any) -> GatewaySession:
        """Open a session; the fields are those of `SessionSpec`."""
        return GatewaySession(self, self.service.open_session(spec or _converted(fields, SessionSpec)))

    async def pause(self) -> int:
        """Hold new requests and interrupt replies in flight. Return their number, once the engines have ended them."""
        return await self.service.weights.pause()

    def announce(self, version: str) -> None:
        """Announce the weight version that the engines have from now on."""
        self.service.weights.announce(version)

    async def resume(self, version: str | None = None) -> None:
        """Continue after `pause`. Interrupted replies continue; agents see one reply."""
        await self.service.weights.resume(version)

    async def update_weights(self, folder: str | Path, version: str) -> int:
        """Have SGLang, vLLM or the tiny engine load other weights, without losing a reply.

        Replies in flight are interrupted, and continue under the new version; agents see one reply. Returns their
        number. `folder` is a checkpoint that the engines can read. Raises EngineError if an engine could not load it;
        the gateway then stays paused until this is called again, or `resume` is called.

        Example:

            model.save_pretrained("checkpoints/step-20")
            await gateway.update_weights("checkpoints/step-20", "20")
        """
        return await self.service.weights.update(folder, version)

    def status(self) -> Mapping[str, Any]:
        """The figures of `rolltape status`."""
        return self.service.status()


def _converted(fields: dict[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{kind.__name__}: {error}") from None

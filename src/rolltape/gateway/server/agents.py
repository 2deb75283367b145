"""The HTTP routes that agents call: the three APIs, and the list of models."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from aiohttp import web

from rolltape.errors import EngineFailed, GatewayError, RolltapeError, SessionEnded
from rolltape.gateway.request import INLINE_BYTES, ChatRequest, Reply
from rolltape.gateway.server.bodies import check_structure, read_body
from rolltape.gateway.server.guard import GatewayGuard, given_key
from rolltape.gateway.service import Service
from rolltape.gateway.sessions import OpenSession
from rolltape.gateway.turn.attempts import Attempt, request_digest
from rolltape.gateway.turn.history import keyed
from rolltape.gateway.turn.turns import Begun
from rolltape.gateway.wire.chat import CHAT
from rolltape.gateway.wire.messages import MESSAGES
from rolltape.gateway.wire.protocol import Dialect
from rolltape.gateway.wire.responses import RESPONSES
from rolltape.records.turn import Delivery, Turn

# What is known of a request, for whoever answers and logs it if it fails.
DIALECT: web.RequestKey[Dialect] = web.RequestKey("dialect", Dialect)
SESSION: web.RequestKey[str] = web.RequestKey("session", str)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Agents:
    """Handlers for requests that carry a session's key."""

    def __init__(self, service: Service, guard: GatewayGuard) -> None:
        self._service = service
        self._guard = guard

    def routes(self) -> list[web.RouteDef]:
        found = []
        for prefix in ("", "/s/{key}"):
            found += [
                web.post(f"{prefix}/v1/chat/completions", self._handler(CHAT)),
                web.post(f"{prefix}/v1/responses", self._handler(RESPONSES)),
                web.post(f"{prefix}/v1/messages", self._handler(MESSAGES)),
                web.post(f"{prefix}/v1/messages/count_tokens", self._counted),
                web.get(f"{prefix}/v1/models", self._models),
                web.get(f"{prefix}/v1/models/{{model:.+}}", self._model),
                web.get(f"{prefix}/", _hello),
            ]
        # Claude Code looks at its base URL as it is, with HEAD.
        found.append(web.get("/s/{key}", _hello))
        return found

    def _handler(self, dialect: Dialect) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            session = self._session(request, dialect)
            ask = await self._ask(request, session, lambda body: dialect.read(body, request.headers))
            attempt = self._service.attempt(session, ask, request_digest(ask), request.headers)
            exchange = _Exchange(self._service, request, dialect, ask, session, attempt)
            return await exchange.served()

        return handle

    async def _counted(self, request: web.Request) -> web.Response:
        session = self._session(request, MESSAGES)
        ask = await self._ask(request, session, MESSAGES.counting)
        begun = await self._service.turns.begin(session, ask)
        return web.Response(body=MESSAGES.counted(len(begun.prompt.ids)), content_type="application/json")

    async def _ask(
        self, request: web.Request, session: OpenSession, read: Callable[[bytes], ChatRequest]
    ) -> ChatRequest:
        """Parse a request; raises BadRequest, also for one that is beyond the limits."""

        def parse(body: bytes) -> ChatRequest:
            check_structure(body)
            ask = read(body)
            self._service.check_size(session, ask)
            return keyed(ask, len(body))

        async with session.work.bodies:
            body = await read_body(request, self._service.settings, session.work.run)
            return await session.work.run(parse, body, inline=len(body) < INLINE_BYTES)

    def _session(self, request: web.Request, dialect: Dialect | None = None) -> OpenSession:
        """The session of a request; errors from here on are written in the form of `dialect`."""
        if dialect is not None:
            request[DIALECT] = dialect
        if self._service.settings.open:
            self._guard.admit_local(request)
        session = self._service.find_session(given_key(request), request.headers)
        request[SESSION] = session.id
        return session

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        model = _model_object(self._service.model_name)
        listed = {"object": "list", "data": [model], "has_more": False, "first_id": model["id"], "last_id": model["id"]}
        return web.Response(body=msgspec.json.encode(listed), content_type="application/json")

    async def _model(self, request: web.Request) -> web.Response:
        self._session(request)
        model = _model_object(request.match_info["model"])
        return web.Response(body=msgspec.json.encode(model), content_type="application/json")


async def _hello(_: web.Request) -> web.Response:
    return web.Response(text="rolltape gateway\n")


def _model_object(name: str) -> dict[str, object]:
    """A model as both OpenAI's and Anthropic's clients read it."""
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": 0,
        "created_at": "1970-01-01T00:00:00Z",
        "owned_by": "rolltape",
    }


class _Exchange:
    """One request and its reply on the wire."""

    def __init__(
        self,
        service: Service,
        request: web.Request,
        dialect: Dialect,
        ask: ChatRequest,
        session: OpenSession,
        attempt: Attempt,
    ) -> None:
        self._service = service
        self._request = request
        self._dialect = dialect
        self._ask = ask
        self._session = session
        self._attempt = attempt

    async def served(self) -> web.StreamResponse:
        """Send the reply, and record whether it was delivered."""
        attempt = self._attempt
        attempt.join()
        delivery = Delivery.UNDELIVERED
        try:
            begun = await asyncio.shield(attempt.begun)
            response = await (self._streamed(begun) if self._ask.stream else self._whole(begun))
            transport = self._request.transport
            if transport is not None and not transport.is_closing():
                delivery = Delivery.DELIVERED
            return response
        finally:
            self._service.delivered(self._session, attempt, delivery)
            attempt.leave()

    async def _reply(self) -> tuple[Turn, Reply]:
        assert self._attempt.taken is not None
        taken = await asyncio.shield(self._attempt.taken)
        if taken.reply is None:
            raise SessionEnded(f"session {self._session.id} was closed before the reply had come")
        return taken.turn, taken.reply

    async def _whole(self, begun: Begun) -> web.StreamResponse:
        turn, reply = await self._reply()
        body = self._dialect.whole(self._ask, reply)
        headers = {**_headers(begun, turn.ignored_params), "x-rolltape-turn": turn.id}
        if turn.facts.flags:
            headers["x-rolltape-flags"] = ",".join(turn.facts.flags)
        response = web.Response(body=body, content_type="application/json", headers=headers)
        await response.prepare(self._request)
        self._drain_all()
        await response.write_eof()
        return response

    async def _streamed(self, begun: Begun) -> web.StreamResponse:
        headers = {
            **_headers(begun, begun.ignored_params),
            "Content-Type": "text/event-stream",
            "Cache-Control": "no-cache",
        }
        response = web.StreamResponse(headers=headers)
        await response.prepare(self._request)
        await response.write(self._dialect.opening(self._ask, begun.draft))
        coming = asyncio.ensure_future(self._reply())
        try:
            while not (await asyncio.wait({coming}, timeout=self._service.settings.keepalive_s))[0]:
                await response.write(self._dialect.keepalive(self._ask))
            try:
                _, reply = coming.result()
            except RolltapeError as error:
                status = error.status if isinstance(error, GatewayError) else 500
                await response.write(self._dialect.error_event(status, told_to_agent(error), begun.draft))
                await response.write_eof()
                raise StreamFailed(status, str(error), response) from error
        finally:
            coming.cancel()
        self._drain_all()
        await response.write(b"".join(self._dialect.closing(self._ask, reply)))
        await response.write_eof()
        return response

    def _drain_all(self) -> None:
        """Have the last write return when all of it is out of this process, however large it is."""
        if self._request.transport is not None:
            self._request.transport.set_write_buffer_limits(0)


def told_to_agent(error: RolltapeError) -> str:
    """What an agent is told of an error. Addresses of engines and local paths are in the log and on the turn alone."""
    if isinstance(error, EngineFailed):
        return "no engine gave a reply; ask again, or see the gateway's log"
    return str(error) if isinstance(error, GatewayError) else "the gateway failed; its log says how"


class StreamFailed(GatewayError):
    """An error that was sent within a stream, which has ended."""

    def __init__(self, status: int, message: str, response: web.StreamResponse) -> None:
        super().__init__(message)
        self.status = status
        self.response = response


def _headers(begun: Begun, ignored_params: Sequence[str]) -> dict[str, str]:
    """The headers of a reply. A stream has them before it is known whether the engine takes everything."""
    headers = {"request-id": begun.draft.id, "x-rolltape-session": begun.session.id}
    if ignored_params:
        listed = "; ".join(ignored_params)[:4000]
        value = "".join(letter if " " <= letter <= "~" else "?" for letter in listed)
        headers["x-rolltape-ignored-params"] = value
        headers["x-rolltape-unhonoured"] = value  # the name of 0.1, which goes with 0.3
    return headers

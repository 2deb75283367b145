"""What agents ask: the three APIs, and the models there are."""

import asyncio
from collections.abc import Awaitable, Callable
from hashlib import blake2b

import msgspec
from aiohttp import web

from rolltape.capture.attempts import Attempt
from rolltape.capture.exchange import Ask
from rolltape.capture.service import Service
from rolltape.capture.server.guard import given_key
from rolltape.capture.sessions import OpenSession
from rolltape.capture.turns import Begun, Taken
from rolltape.capture.wire.chat import CHAT
from rolltape.capture.wire.messages import MESSAGES
from rolltape.capture.wire.protocol import Wire
from rolltape.capture.wire.responses import RESPONSES
from rolltape.errors import CaptureError, RolltapeError
from rolltape.records.turn import Delivery

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Agents:
    """Handlers for requests that carry a session's key."""

    def __init__(self, service: Service) -> None:
        self._service = service

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
        return found

    def _handler(self, wire: Wire) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            request["wire"] = wire
            session = self._service.session_of(given_key(request), request.headers)
            request["session"] = session.id
            body = await request.read()
            ask = wire.read(body, request.headers)
            digest = blake2b(body, digest_size=16).digest()
            attempt = self._service.attempt(session, ask, digest, request.headers)
            exchange = _Exchange(self._service, request, wire, ask, session, attempt)
            return await exchange.served()

        return handle

    async def _counted(self, request: web.Request) -> web.Response:
        request["wire"] = MESSAGES
        session = self._service.session_of(given_key(request), request.headers)
        ask = MESSAGES.counting(await request.read())
        begun = await self._service.turns.begin(session, ask)
        return web.Response(body=MESSAGES.counted(len(begun.prompt.ids)), content_type="application/json")

    async def _models(self, request: web.Request) -> web.Response:
        self._service.session_of(given_key(request), request.headers)
        model = _model_object(self._service.model_name)
        listed = {"object": "list", "data": [model], "has_more": False, "first_id": model["id"], "last_id": model["id"]}
        return web.Response(body=msgspec.json.encode(listed), content_type="application/json")

    async def _model(self, request: web.Request) -> web.Response:
        self._service.session_of(given_key(request), request.headers)
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
        self, service: Service, request: web.Request, wire: Wire, ask: Ask, session: OpenSession, attempt: Attempt
    ) -> None:
        self._service = service
        self._request = request
        self._wire = wire
        self._ask = ask
        self._session = session
        self._attempt = attempt

    async def served(self) -> web.StreamResponse:
        """Give the reply, and say on the tape whether it arrived."""
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

    async def _taken(self) -> Taken:
        assert self._attempt.taken is not None
        return await asyncio.shield(self._attempt.taken)

    async def _whole(self, begun: Begun) -> web.StreamResponse:
        taken = await self._taken()
        body = self._wire.whole(self._ask, taken.reply)
        headers = {**_headers(begun), "x-rolltape-turn": taken.turn.id}
        response = web.Response(body=body, content_type="application/json", headers=headers)
        await response.prepare(self._request)
        await response.write_eof()
        return response

    async def _streamed(self, begun: Begun) -> web.StreamResponse:
        headers = {**_headers(begun), "Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(self._request)
        await response.write(self._wire.opening(self._ask, begun.draft))
        taking = asyncio.ensure_future(self._taken())
        try:
            while not (await asyncio.wait({taking}, timeout=self._service.settings.keepalive_s))[0]:
                await response.write(self._wire.keepalive)
            try:
                taken = taking.result()
            except RolltapeError as error:
                status = error.status if isinstance(error, CaptureError) else 500
                await response.write(self._wire.error_event(status, str(error)))
                await response.write_eof()
                raise StreamFailed(str(error)) from error
        finally:
            taking.cancel()
        await response.write(b"".join(self._wire.closing(self._ask, taken.reply)))
        await response.write_eof()
        return response


class StreamFailed(CaptureError):
    """An error that the client was told of within its stream."""


def _headers(begun: Begun) -> dict[str, str]:
    """What is said beside a reply."""
    headers = {"request-id": begun.draft.id, "x-rolltape-session": begun.session.id}
    if begun.unhonoured:
        said = "; ".join(begun.unhonoured).encode("ascii", "replace").decode()
        headers["x-rolltape-unhonoured"] = " ".join(said.split())[:4000]
    return headers

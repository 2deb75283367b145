"""The HTTP routes that agents call: the routes of every dialect, below `/`, `/s/{key}` and `/with/{identity}`."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import cast

import msgspec
from aiohttp import web

from rolltape.errors import (
    BadRequest,
    EngineFailed,
    GatewayError,
    NotAllowed,
    PromptTooLong,
    ReplyNotFound,
    RolltapeError,
    SessionEnded,
)
from rolltape.gateway.identity import contradictions, digest_name, read_identity, session_name
from rolltape.gateway.peers import Siblings
from rolltape.gateway.request import INLINE_BYTES, ChatRequest, check_request_size
from rolltape.gateway.server.answering import (
    DIALECT,
    SESSION,
    StallWatch,
    StreamFailed,
    drain_all,
    message_for_agent,
    read_body,
)
from rolltape.gateway.server.forwarding import BODY, FORWARDED, Forwarding
from rolltape.gateway.server.guard import GatewayGuard
from rolltape.gateway.service import Service
from rolltape.gateway.sessions import OpenSession
from rolltape.gateway.turn.gateway_turn import GatewayTurn, Shown
from rolltape.gateway.turn.history import keyed
from rolltape.gateway.turn.references import fill_in
from rolltape.gateway.wire import DIALECTS, meant
from rolltape.gateway.wire.fields import check_structure
from rolltape.gateway.wire.protocol import Answers, CountsTokens, Dialect, ListsModels, ReplyStream, Tokenizes
from rolltape.records.turn import Delivery, Ids

log = logging.getLogger("rolltape.gateway")

_PREFIXES = ("", "/s/{key}", "/with/{identity}")
_HOW_TO_OPEN = "no session: POST /sessions opens one and returns its key, or start the gateway with --open"

Handler = Callable[[Dialect, web.Request], Awaitable[web.StreamResponse]]


class Agents:
    """Handlers for requests that carry a session's key."""

    def __init__(self, service: Service, guard: GatewayGuard, forwarding: Forwarding, siblings: Siblings) -> None:
        self._service = service
        self._guard = guard
        self._forwarding = forwarding
        self._siblings = siblings

    def routes(self) -> list[web.RouteDef]:
        answers: dict[Answers, tuple[Callable[..., web.RouteDef], Handler]] = {
            Answers.TURN: (web.post, self._turn),
            Answers.COUNT: (web.post, self._count),
            Answers.TOKENS: (web.post, self._tokenize),
            Answers.TEXT: (web.post, self._detokenize),
            Answers.MODELS: (web.get, self._models),
            Answers.MODEL: (web.get, self._model),
        }
        # Claude Code sends HEAD to its base URL itself.
        found = [web.get(path, _hello) for prefix in _PREFIXES for path in {prefix or "/", f"{prefix}/"}]
        for route in dict.fromkeys(route for dialect in DIALECTS for route in dialect.routes):
            method, handler = answers[route.answers]
            first, *others = (dialect for dialect in DIALECTS if route in dialect.routes)
            answer = partial(_by_client, handler, [first, *others]) if others else partial(handler, first)
            found += [method(prefix + route.path, answer) for prefix in _PREFIXES]
        return found

    async def _turn(self, dialect: Dialect, http: web.Request) -> web.StreamResponse:
        """Take a turn, send its reply, and record whether it was delivered."""
        read = partial(dialect.read, headers=http.headers, path={**http.query, **http.match_info})
        session, key = await self._find_session(dialect, http)
        request = await self._read(http, session, key, read)
        if session is None:
            identity = read_identity(http.headers, _raw_identity(http), request.metadata)
            if not self._forwarding.is_forwarded(http):
                self._siblings.check_owner(digest_name(*session_name(key, identity, request)))
            session = await self._service.open_sessions.find(key, identity, request, is_retry=_is_retry(http))
            http[SESSION] = session.id
            ignored = (*request.ignored_params, *contradictions(identity, session.spec))
            request = msgspec.structs.replace(request, ignored_params=ignored)
        session.overflowed = False
        request = await self._fill_in(session, request)
        turns = await self._service.turns.submit(session, request, is_retry=_is_retry(http))
        turn = turns[0]
        for one in turns:
            one.join()
        delivery = Delivery.UNDELIVERED
        try:
            for one in turns:
                await one.prompted()
            sent = self._stream(dialect, http, turn, request) if request.stream else self._whole(dialect, http, turn)
            response = await sent
            is_out = http.transport is not None and not http.transport.is_closing()
            if is_out and (FORWARDED not in http.headers or await self._forwarding.arrived(http)):
                delivery = Delivery.DELIVERED
            return response
        finally:
            for one in turns:
                self._service.turns.delivered(one, delivery)
                one.leave()

    async def _whole(self, dialect: Dialect, http: web.Request, turn: GatewayTurn) -> web.StreamResponse:
        for one in turn.choices:
            await self._ended(one)
        recorded = [one.recorded for one in turn.choices]
        ids = ",".join(one.id for one in recorded)
        headers = {**_headers(turn, turn.recorded.ignored_params), "x-rolltape-turn": ids}
        if flags := dict.fromkeys(flag for one in recorded for flag in one.facts.flags):
            headers["x-rolltape-flags"] = ",".join(flags)
        response = web.Response(body=dialect.whole(turn), content_type="application/json", headers=headers)
        writer = await response.prepare(http)
        drain_all(http)
        with StallWatch(http, writer, self._service.settings.stall_s):
            await response.write_eof()
        return response

    async def _stream(
        self, dialect: Dialect, http: web.Request, turn: GatewayTurn, request: ChatRequest
    ) -> web.StreamResponse:
        """Send reasoning and text while they are sampled; calls and the end when the turn is durable."""
        form = "application/json" if request.in_array else "text/event-stream"
        kind = {"Content-Type": form, "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers={**_headers(turn, turn.ignored_params), **kind})
        writer = await response.prepare(http)
        with StallWatch(http, writer, self._service.settings.stall_s):
            await self._write_events(http, response, turn, dialect.stream(turn, request))
        return response

    async def _write_events(
        self, http: web.Request, response: web.StreamResponse, turn: GatewayTurn, stream: ReplyStream
    ) -> None:
        await response.write(stream.opening())
        sent = _Sent()
        try:
            while not turn.done:
                changed = turn.change()  # before the check, so that no change is missed
                if more := sent.more(stream, turn):
                    await response.write(more)
                elif not (await asyncio.wait({changed}, timeout=self._service.settings.keepalive_s))[0]:
                    await response.write(stream.keepalive())
            for other in turn.choices:
                while not other.done:
                    if not (await asyncio.wait({other.change()}, timeout=self._service.settings.keepalive_s))[0]:
                        await response.write(stream.keepalive())
                await self._ended(other)
            if not sent.begins(turn.shown):
                log.error("turn %s: its reply does not begin as it was streamed", turn.recorded.id)
                raise EngineFailed("the reply does not begin as it was streamed")
            rest = sent.more(stream, turn) + stream.closing()
        except ConnectionResetError:
            raise
        except Exception as error:
            if not isinstance(error, RolltapeError):
                log.exception("turn of session %s", turn.session.id)
            status, code, final = 500, None, False
            if isinstance(error, GatewayError):
                status, code, final = error.status, error.code, error.final
            await response.write(stream.error(status, message_for_agent(error), code, final=final))
            await response.write_eof()
            raise StreamFailed(status, str(error), response) from error
        drain_all(http)
        await response.write(rest)
        await response.write_eof()

    async def _count(self, dialect: Dialect, http: web.Request) -> web.Response:
        counter = cast("CountsTokens", dialect)
        session, key = await self._find_session(dialect, http)
        request = await self._read(http, session, key, partial(counter.read_counting, path=http.match_info))
        request = await self._fill_in(session, request)
        ids = await self._prompt_ids(session, request)
        return web.Response(body=counter.counted(len(ids)), content_type="application/json")

    async def _tokenize(self, dialect: Dialect, http: web.Request) -> web.Response:
        tokenizer, turns = cast("Tokenizes", dialect), self._service.turns
        session, key = await self._find_session(dialect, http)
        request = await self._read(http, session, key, tokenizer.read_tokenizing)
        ids = await self._prompt_ids(session, request)
        body = tokenizer.tokenized(request, ids, self._service.prompts.spell, turns.context_of(session))
        return web.Response(body=body, content_type="application/json")

    async def _prompt_ids(self, session: OpenSession | None, request: ChatRequest) -> Ids:
        ids = await self._service.turns.prompt_ids(session, request)
        if not len(ids):
            raise BadRequest("the gateway has no tokenizer, because the engine accepts only messages")
        return ids

    async def _detokenize(self, dialect: Dialect, http: web.Request) -> web.Response:
        tokenizer = cast("Tokenizes", dialect)
        session, key = await self._find_session(dialect, http)
        request = await self._read(http, session, key, tokenizer.read_detokenizing)
        assert request.prompt is not None
        text = await self._service.turns.prompt_text(request.prompt)
        return web.Response(body=tokenizer.detokenized(text), content_type="application/json")

    async def _models(self, dialect: Dialect, http: web.Request) -> web.Response:
        await self._find_session(dialect, http)
        body = cast("ListsModels", dialect).models([self._service.model_name])
        return web.Response(body=body, content_type="application/json")

    async def _model(self, dialect: Dialect, http: web.Request) -> web.Response:
        await self._find_session(dialect, http)
        body = cast("ListsModels", dialect).model(http.match_info["model"])
        return web.Response(body=body, content_type="application/json")

    async def _find_session(self, dialect: Dialect, http: web.Request) -> tuple[OpenSession | None, str | None]:
        """The session of a request's key, and the key. The session is None if requests open sessions themselves.

        Errors from here on are written in the form of the dialect.
        """
        http[DIALECT] = dialect
        key = http.match_info.get("key") or dialect.find_key(http.headers, http.query)
        session = None if key is None else self._service.sessions.of_key(key)
        if session is None and key is not None:
            session = await self._service.take_over(key)
        if session is not None:
            http[SESSION] = session.id
        elif self._service.settings.open:
            self._guard.admit_local(http)
        else:
            raise NotAllowed(_HOW_TO_OPEN if key is None else f"that key opens nothing here; {_HOW_TO_OPEN}")
        return session, key

    async def _read(
        self, http: web.Request, session: OpenSession | None, key: str | None, read: Callable[[bytes], ChatRequest]
    ) -> ChatRequest:
        """Parse a request; raises BadRequest, also if it exceeds a limit."""
        service, settings = self._service, self._service.settings
        work = session.work if session is not None else service.open_sessions.work(key)
        context = service.turns.context_of(session)

        def parse(body: bytes) -> ChatRequest:
            check_structure(body)
            request = read(body)
            check_request_size(request, settings.max_messages, context, service.prompts.count)
            if service.pool.token_faithful:  # no hosted endpoint gets the body
                request = msgspec.structs.replace(request, raw=None)
            return keyed(request, len(body))

        async with work.bodies:
            body = http[BODY] = await read_body(http, settings, work.run)
            try:
                return await work.run(parse, body, inline=len(body) < INLINE_BYTES)
            except PromptTooLong:
                if session is not None:
                    session.overflowed = True
                raise

    async def _fill_in(self, session: OpenSession | None, request: ChatRequest) -> ChatRequest:
        """A request with the earlier replies that it names; raises BadRequest as `_read` does."""
        if request.after_reply is None and not request.has_references:
            return request
        if session is None:
            raise ReplyNotFound("the request names replies and no session; name the session, or send the whole input")
        service = self._service

        def fill() -> ChatRequest:
            filled = fill_in(request, session.recorder.turns)
            context = service.turns.context_of(session)
            check_request_size(filled, service.settings.max_messages, context, service.prompts.count)
            return filled

        try:
            return await session.work.run(fill)
        except PromptTooLong:
            session.overflowed = True
            raise

    async def _ended(self, turn: GatewayTurn) -> None:
        """Wait for a turn's reply; raises an error if there is none."""
        await turn.ended()
        if turn.outcome.message is None:
            raise SessionEnded(f"session {turn.session.id} was closed before the reply had come")
        if self._service.settings.open:
            self._service.open_sessions.note_reply(turn.session, turn.request.messages, turn.message, turn.id)


async def _by_client(handler: Handler, dialects: Sequence[Dialect], http: web.Request) -> web.StreamResponse:
    """Answer in the dialect that the client means, of those that have the route."""
    return await handler(meant(http.headers, http.query, dialects), http)


def _raw_identity(http: web.Request) -> str | None:
    """The path segment after `/with/`, or None; still percent-encoded, since a value may hold any character."""
    return http.rel_url.raw_parts[2] if "identity" in http.match_info else None


def _is_retry(http: web.Request) -> bool:
    """Whether a request's headers mark it as a retry, as the SDKs do."""
    return http.headers.get("x-stainless-retry-count", "0") not in ("", "0")


class _Sent:
    """What one client was sent of a reply. It is kept in pieces, since one text would be copied each time."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._text: list[str] = []
        self._lengths = (0, 0)

    def more(self, stream: ReplyStream, turn: GatewayTurn) -> bytes:
        """The events for the part of the reply that can be streamed and was not sent yet."""
        reasoning, text = turn.shown_after(*self._lengths)
        self._lengths = self._lengths[0] + len(reasoning), self._lengths[1] + len(text)
        self._reasoning.append(reasoning)
        self._text.append(text)
        return (stream.reasoning(reasoning) if reasoning else b"") + (stream.text(text) if text else b"")

    def begins(self, shown: Shown) -> bool:
        """Whether a complete reply begins with what was sent."""
        return shown.reasoning.startswith("".join(self._reasoning)) and shown.text.startswith("".join(self._text))


async def _hello(_: web.Request) -> web.Response:
    return web.Response(text="rolltape gateway\n")


def _headers(turn: GatewayTurn, ignored_params: Sequence[str]) -> dict[str, str]:
    """The headers of a reply. A stream sends them before it is known whether the engine accepts all parameters."""
    headers = {"request-id": turn.id, "x-rolltape-session": turn.session.id}
    if ignored_params:
        listed = "; ".join(ignored_params)[:4000]
        value = "".join(letter if " " <= letter <= "~" else "?" for letter in listed)
        headers["x-rolltape-ignored-params"] = value
        headers["x-rolltape-unhonoured"] = value  # the name in 0.1; removed in 0.3
    return headers

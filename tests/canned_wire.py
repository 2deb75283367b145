"""A loopback server made of a wire object and canned replies: what a real client makes of them."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
from aiohttp import web

from rolltape.errors import BadRequest
from rolltape.gateway.request import ChatRequest
from rolltape.gateway.turn.gateway_turn import GatewayTurn, TurnState
from rolltape.gateway.turn.replies import ReplyOutcome
from rolltape.gateway.wire.protocol import Dialect
from rolltape.records.turn import Finish

if TYPE_CHECKING:
    from rolltape.gateway.sessions import OpenSession

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Refusal(NamedTuple):
    """An error in place of a reply: at once, or within the stream."""

    status: int
    message: str
    in_stream: bool = False


class CannedServer:
    """Answers every request with `answer`, and keeps what was asked."""

    def __init__(self, wire: Dialect) -> None:
        self.wire = wire
        self.url = ""
        self.answer: GatewayTurn | Refusal = Refusal(500, "no answer was set")
        self.asks: list[ChatRequest] = []

    async def reply(self, request: web.Request) -> web.StreamResponse:
        try:
            path = {**request.query, **request.match_info}
            ask = self.wire.read(await request.read(), request.headers, path)
        except BadRequest as error:
            return self._refused(Refusal(error.status, str(error)))
        self.asks.append(ask)
        answer = self.answer
        if isinstance(answer, Refusal) and not answer.in_stream:
            return self._refused(answer)
        if not ask.stream:
            assert isinstance(answer, GatewayTurn)
            return web.Response(body=whole(self.wire, ask, answer), content_type="application/json")
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        if isinstance(answer, GatewayTurn):
            await response.write(streamed(self.wire, ask, answer, pieces=3, alive=True))
        else:
            stream = self.wire.stream(asked(canned({}), ask), ask)
            await response.write(stream.opening() + stream.keepalive())
            await response.write(stream.error(answer.status, answer.message))
        return response

    def _refused(self, refusal: Refusal) -> web.Response:
        return web.Response(
            status=refusal.status,
            body=self.wire.error(refusal.status, refusal.message),
            content_type="application/json",
            headers={"x-should-retry": "false"},
        )


@contextmanager
def canned_server(wire: Dialect, path: str, **more: Callable[[bytes], bytes]) -> Iterator[CannedServer]:
    """The server on a free port, in a thread of its own. `more` are paths below `path` with what they answer."""
    server = CannedServer(wire)
    app = web.Application()
    app.router.add_post(path, server.reply)
    for name, answer in more.items():
        app.router.add_post(f"{path}/{name}", _plain(answer))
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(app, shutdown_timeout=1)
    loop.run_until_complete(runner.setup())
    site = web.TCPSite(runner, "127.0.0.1", 0)
    loop.run_until_complete(site.start())
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}"
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _plain(answer: Callable[[bytes], bytes]) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        return web.Response(body=answer(await request.read()), content_type="application/json")

    return handle


def canned(
    message: dict[str, Any],
    *,
    id: str = "r1",  # noqa: A002
    finish: Finish = Finish.STOP,
    room: int = 100,
    **fields: Any,
) -> GatewayTurn:
    """A turn with a reply of this message, whose prompt had 100 tokens, 60 of them held."""
    request = ChatRequest(api="chat", model="tiny", messages=[])
    turn = GatewayTurn(cast("OpenSession", None), request)
    turn.id, turn.received_at, turn.state = id, 1.5, TurnState.DURABLE
    turn.prompt_tokens, turn.held_tokens, turn.sampled_tokens, turn.max_reply_tokens = 100, 60, 25, room
    turn.outcome = ReplyOutcome(finish, {"role": "assistant", **message}, reasoning_tokens=7, **fields)
    return turn


def asked(turn: GatewayTurn, request: ChatRequest) -> GatewayTurn:
    """A canned turn as the answer to a request."""
    turn.request = msgspec.structs.replace(request, model="tiny")
    return turn


def whole(wire: Dialect, request: ChatRequest, turn: GatewayTurn) -> bytes:
    """A canned reply in one piece."""
    return wire.whole(asked(turn, request))


def streamed(wire: Dialect, request: ChatRequest, turn: GatewayTurn, *, pieces: int = 1, alive: bool = False) -> bytes:
    """A canned reply as a stream, its reasoning and text in so many pieces, with `alive` a keepalive before each."""
    stream = wire.stream(asked(turn, request), request)
    events = [stream.opening()]
    for write, text in zip((stream.reasoning, stream.text), turn.shown, strict=True):
        size = max(-(-len(text) // pieces), 1)
        for start in range(0, len(text), size):
            events += [stream.keepalive() if alive else b"", write(text[start : start + size])]
    return b"".join([*events, stream.closing()])


def call(name: str, arguments: str, *, id: str = "call_1") -> dict[str, Any]:  # noqa: A002
    """A tool call in chat form."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assert_known(model: Any) -> None:
    """Nothing in a typed object of an SDK is unknown to it, at any depth."""
    assert not model.model_extra
    for value in dict(model).values():
        for item in value if isinstance(value, list) else [value]:
            if hasattr(item, "model_extra"):
                assert_known(item)

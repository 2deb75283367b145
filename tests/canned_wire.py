"""A loopback server made of a wire object and canned replies: what a real client makes of them."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from aiohttp import web

from rolltape.errors import BadRequest
from rolltape.gateway.request import ChatRequest, Draft, Reply, Usage
from rolltape.gateway.wire.protocol import Dialect
from rolltape.records.turn import Finish

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
        self.answer: Reply | Refusal = Refusal(500, "no answer was set")
        self.asks: list[ChatRequest] = []

    async def reply(self, request: web.Request) -> web.StreamResponse:
        try:
            ask = self.wire.read(await request.read(), request.headers)
        except BadRequest as error:
            return self._refused(Refusal(error.status, str(error)))
        self.asks.append(ask)
        answer = self.answer
        if isinstance(answer, Refusal) and not answer.in_stream:
            return self._refused(answer)
        if not ask.stream:
            assert isinstance(answer, Reply)
            return web.Response(body=self.wire.whole(ask, answer), content_type="application/json")
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        draft = answer.draft if isinstance(answer, Reply) else canned({}).draft
        await response.write(self.wire.opening(ask, draft) + self.wire.keepalive(ask))
        if isinstance(answer, Reply):
            for event in self.wire.closing(ask, answer):
                await response.write(event)
        else:
            await response.write(self.wire.error_event(answer.status, answer.message, draft))
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


def canned(message: dict[str, Any], *, id: str = "r1", finish: Finish = Finish.STOP, **fields: Any) -> Reply:  # noqa: A002
    """A reply of this message, whose prompt had 100 tokens, 60 of them held."""
    return Reply(
        draft=Draft(id=id, model="tiny", created_at=1.5, prompt_tokens=100, held_tokens=60),
        message={"role": "assistant", **message},
        finish=finish,
        usage=Usage(prompt_tokens=100, held_tokens=60, sampled_tokens=25, reasoning_tokens=7),
        **fields,
    )


def call(name: str, arguments: str, *, id: str = "call_1") -> dict[str, Any]:  # noqa: A002
    """A tool call in chat form."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}

"""An OpenAI-compatible judge over a real socket; what it says is up to the test."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NamedTuple, Self

from aiohttp import web

Json = dict[str, Any]


class Says(NamedTuple):
    """One answer: a text, an error status, or what is no completion at all; perhaps late."""

    text: str = ""
    status: int = 200
    body: str | None = None
    delay_s: float = 0.0


class FakeJudge:
    """`async with FakeJudge(says) as judge:` listens at `judge.base_url`. It is told each request's body."""

    def __init__(self, says: Callable[[Json], Says | str]) -> None:
        self._says = says
        self.bodies: list[Json] = []
        self.keys: list[str | None] = []
        self.base_url = ""
        self.most_at_once = self._running = 0

    @contextlib.contextmanager
    def in_thread(self) -> "Iterator[FakeJudge]":
        """The same for a test that is no coroutine."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="fake-judge", daemon=True)
        thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self.__aenter__(), loop).result(10)
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(self._runner.cleanup(), loop).result(10)
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._completion)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.base_url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    async def _completion(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization"))
        said = self._says(body)
        says = Says(said) if isinstance(said, str) else said
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        await asyncio.sleep(says.delay_s)
        self._running -= 1
        if says.status != 200:
            return web.json_response({"error": {"message": "overloaded"}}, status=says.status)
        if says.body is not None:
            return web.Response(text=says.body)
        message = {"role": "assistant", "content": says.text}
        return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})


def in_turn(*said: Says | str) -> Callable[[Json], Says | str]:
    """These one after the other, the last one again and again."""
    left = list(said)
    return lambda body: left.pop(0) if len(left) > 1 else left[0]

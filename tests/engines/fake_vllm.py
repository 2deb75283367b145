"""vLLM's `/v1/completions` as vLLM 0.32 was seen to answer it, streamed; what it says is up to the test."""

import asyncio
import json
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Self

from aiohttp import web

Json = dict[str, Any]


class Token(NamedTuple):
    id: int
    logprob: float = -0.5


class Reply(NamedTuple):
    """Tokens, and how it ends: a finish reason with its stop reason, or by dying after them."""

    tokens: list[Token]
    finish: str = "stop"
    stop_reason: int | str | None = None
    dies: bool = False
    dies_after_finish: bool = False
    error: str | None = None  # an error event after the tokens
    junk: bytes | None = None  # the data of an event after the tokens
    token_delay_s: float = 0.0
    per_event: int = 1


class FakeVllm:
    """`async with FakeVllm(reply) as server:` listens at `server.url`."""

    def __init__(
        self,
        reply: Reply | Callable[[Json], Reply],
        *,
        token_ids: bool = True,
        development: bool = True,
        tells_version: bool = True,
    ) -> None:
        self._reply = reply
        self._token_ids = token_ids  # false: as before 0.10.2
        self._development = development  # false: started without VLLM_SERVER_DEV_MODE=1
        self._tells_version = tells_version  # false: as before it had /weight_info
        self.weight_version = "default"
        self.folder: str | None = None  # whose weights it has; None: those that it was started with
        self.sampled_from: list[str | None] = []  # the folder that it had at each request
        self.weight_calls: list[tuple[str, Json]] = []  # to the routes that change weights
        self.loads = True  # false: it cannot read the folder
        self.bodies: list[Json] = []
        self.peers: list[object] = []  # the connection of each request
        self.disconnected = 0
        self.url = ""
        self._port = 0

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def start(self) -> None:
        """Listen, with the weights of the beginning; after `stop` at the same address."""
        self.weight_version, self.folder = "default", None
        app = web.Application(client_max_size=2**30)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        if self._development:
            if self._tells_version:
                app.router.add_get("/weight_info", self._weight_info)
            for path in ("/pause", "/resume", "/collective_rpc", "/update_weight_version"):
                app.router.add_post(path, self._change)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        """Be gone, until `start`."""
        await self._runner.cleanup()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "it", "object": "model", "max_model_len": 2048}]})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.weight_version})

    async def _change(self, request: web.Request) -> web.Response:
        body: Json = json.loads(await request.read() or b"{}")
        self.weight_calls.append((request.path, body))
        if request.path == "/collective_rpc" and not self.loads:
            error = {"message": "Call to collective_rpc method failed: …", "type": "InternalServerError", "code": 500}
            return web.json_response({"error": error}, status=500)
        self.weight_version = body.get("new_version", self.weight_version)
        if request.path == "/collective_rpc":
            self.folder = body["kwargs"]["weights_path"]
        answers: dict[str, Json] = {
            "/pause": {"status": "paused"},
            "/resume": {"status": "resumed"},
            "/collective_rpc": {"results": [None]},
            "/update_weight_version": {"success": True, "new_version": self.weight_version},
        }
        return web.json_response(answers[request.path])

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body: Json = json.loads(await request.read())
        self.bodies.append(body)
        self.sampled_from.append(self.folder)
        self.peers.append(request.transport)
        if len(body["prompt"]) >= 2048:
            message = "This model's maximum context length is 2048 tokens."
            return web.json_response({"error": {"message": message, "code": 400}}, status=400)
        reply = self._reply(body) if callable(self._reply) else self._reply
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        try:
            await self._stream(request, response, body, reply)
        except (asyncio.CancelledError, ConnectionError):
            self.disconnected += 1
            raise
        return response

    async def _stream(self, request: web.Request, response: web.StreamResponse, body: Json, reply: Reply) -> None:
        base = {"id": f"cmpl-{body['request_id']}", "object": "text_completion", "created": 1, "model": body["model"]}
        step = reply.per_event
        for at in range(0, len(reply.tokens), step):
            tokens = reply.tokens[at : at + step]
            last = at + step >= len(reply.tokens) and not (reply.dies or reply.error or reply.junk)
            choice: Json = {
                "index": 0,
                "text": "x" * len(tokens),
                "logprobs": {
                    "text_offset": [0] * len(tokens),
                    "token_logprobs": [token.logprob for token in tokens],
                    "tokens": ["x"] * len(tokens),
                    "top_logprobs": [_top(token, body) for token in tokens],
                },
                "finish_reason": reply.finish if last else None,
                "stop_reason": reply.stop_reason if last else None,
            }
            if self._token_ids:
                choice["prompt_token_ids"] = body["prompt"] if at == 0 else None
                choice["token_ids"] = [token.id for token in tokens]
            await self._event(response, {**base, "choices": [choice]})
            await asyncio.sleep(reply.token_delay_s)
        if reply.error is not None:
            await self._event(response, {"error": {"message": reply.error, "type": "InternalServerError", "code": 500}})
        if reply.junk is not None:
            await response.write(b"data: " + reply.junk + b"\n\n")
        if reply.dies or reply.dies_after_finish:
            assert request.transport is not None
            request.transport.abort()
            return
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(reply.tokens)}
        await self._event(response, {**base, "choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")

    async def _event(self, response: web.StreamResponse, event: Json) -> None:
        await response.write(f"data: {json.dumps(event)}\n\n".encode())


def _top(token: Token, body: Json) -> Json:
    """The sampled token, and so many others that are more likely than it is."""
    others = {f"token_id:{token.id + 1 + at}": token.logprob / (at + 2) for at in range(body["logprobs"])}
    return {f"token_id:{token.id}": token.logprob} | others

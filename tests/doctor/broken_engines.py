"""Engines that are broken on purpose: the tiny engine behind SGLang's or vLLM's API, with one thing wrong."""

import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from rolltape.records.turn import Finish, LogprobKind
from rolltape.tiny import EngineReply, Sampling, TinyEngine, shipped_model
from rolltape.tiny.server.app import EngineServer
from tiny.checkpoints import LIKE_SHIPPED, write_checkpoint

Json = dict[str, Any]
EditBody = Callable[[Json], Json]
EditAnswer = Callable[[Json], Json]
Wait = Callable[[Json], Awaitable[None]]


@asynccontextmanager
async def sglang(
    *,
    folder: Path | None = None,
    kind: LogprobKind = LogprobKind.AFTER_TEMPERATURE,
    body: EditBody = lambda body: body,
    answer: EditAnswer = lambda answer: answer,
    before: Wait | None = None,
    **engine: Any,
) -> AsyncIterator[str]:
    """SGLang's API at the address that this yields; `body` and `answer` change what goes in and comes out.

    `before` is awaited before a reply is sampled.

    As SGLang itself, it does not say of which kind its logprobs are.
    """
    model = folder or shipped_model()
    async with TinyEngine(model, "v1", **engine) as tiny:
        server = _Edited(tiny, model, kind=kind)
        server.edit_body, server.edit_answer, server.before = body, answer, before
        async with _listening(server.app()) as url:
            yield f"sglang:{url}"


class _Edited(EngineServer):
    edit_body: EditBody
    edit_answer: EditAnswer
    before: Wait | None

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = self.edit_body(json.loads(await request.read()))
        request._read_bytes = json.dumps(body).encode()  # what the handler reads next
        if self.before is not None:
            await self.before(body)
        if body.get("stream"):
            return await super().generate(request)
        response = await super().generate(request)
        assert isinstance(response, web.Response)
        if response.status != 200:
            return response
        assert isinstance(response.body, bytes)
        return web.json_response(self.edit_answer(json.loads(response.body)))

    async def _follow(self, index: int, asked: Any, queue: Any) -> None:
        edit, put = self.edit_answer, queue.put_nowait
        queue.put_nowait = lambda event: put(edit(event) if isinstance(event, dict) else event)
        await super()._follow(index, asked, queue)

    async def server_info(self, request: web.Request) -> web.Response:
        info = json.loads((await super().server_info(request)).body or b"{}")  # type: ignore[arg-type]
        del info["logprob_kind"]
        return web.json_response(info)


@asynccontextmanager
async def _listening(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def without_stop_id(answer: Json) -> Json:
    """A reply that ended on a stop id, without it."""
    meta = answer["meta_info"]
    reason = meta["finish_reason"] or {}
    if not isinstance(reason.get("matched"), int) or not answer["output_ids"]:
        return answer
    logprobs = meta["output_token_logprobs"][:-1]
    ends = {"output_token_logprobs": logprobs, "completion_tokens": len(logprobs)}
    return {**answer, "output_ids": answer["output_ids"][:-1], "meta_info": {**meta, **ends}}


def other_weights(folder: Path) -> Path:
    """A model like the shipped one, with its tokenizer and template, and other weights."""
    write_checkpoint(folder, seed=1, **LIKE_SHIPPED)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        if (shipped_model() / name).is_file():
            shutil.copy(shipped_model() / name, folder / name)
    return folder


class TinyVllm:
    """vLLM's `/v1/completions` as vLLM 0.32 was seen to answer it, sampled by the tiny engine."""

    def __init__(self, engine: TinyEngine, kind: LogprobKind, *, usage_details: bool = True) -> None:
        self._engine = engine
        self._kind = kind
        self._usage_details = usage_details

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**30)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "it", "max_model_len": self._engine.context}]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body: Json = json.loads(await request.read())
        outside = max(body["prompt"], default=0) >= self._engine.config.vocab_size
        if outside or len(body["prompt"]) >= self._engine.context:
            return web.json_response({"error": {"message": "refused", "code": 400}}, status=400)
        top_k = body.get("top_k", -1)
        sampling = Sampling(
            temperature=body.get("temperature", 1.0),
            top_p=body.get("top_p", 1.0),
            top_k=None if top_k in (-1, 0) else top_k,
            seed=body.get("seed"),
            max_tokens=body["max_tokens"],
            stop_ids=(*self._engine.config.eos_ids, *body.get("stop_token_ids", ())),
            stop_strings=tuple(body.get("stop") or ()),
            top_logprobs=body.get("logprobs") or 0,
        )
        reply = await self._engine.generate(body["prompt"], sampling)
        choice = self._choice(reply, body)
        if "structured_outputs" in body:
            choice |= self._constrained(body["structured_outputs"]["json"])
        if not body.get("stream"):
            return web.json_response({"choices": [choice], "usage": self._usage(reply, body)})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for event in self._events(choice, reply, body):
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    def _choice(self, reply: EngineReply, body: Json) -> Json:
        assert self._engine.texts is not None
        ids = reply.ids.tolist()
        raw = self._kind is LogprobKind.RAW
        tops: list[dict[str, float] | None] = [
            {f"token_id:{one.id}": one.raw if raw else one.tempered for one in top} for top in reply.top_logprobs
        ] or [None] * len(ids)
        stopped = reply.finish in (Finish.STOP, Finish.STOP_STRING)
        return {
            "index": 0,
            "text": self._engine.texts.decode(ids),
            "token_ids": ids,
            "logprobs": {"token_logprobs": reply.logprobs(self._kind).tolist(), "top_logprobs": tops},
            "finish_reason": "stop" if stopped else "length",
            "stop_reason": reply.stopped_by if stopped else None,
        }

    def _constrained(self, schema: Json) -> Json:
        """The first of the texts that a schema allows."""
        assert self._engine.texts is not None
        ids = [*self._engine.texts.encode(json.dumps(schema["enum"][0])), self._engine.config.eos_ids[0]]
        logprobs = {"token_logprobs": [-0.5] * len(ids), "top_logprobs": [None] * len(ids)}
        return {"token_ids": ids, "logprobs": logprobs, "finish_reason": "stop", "stop_reason": None}

    def _usage(self, reply: EngineReply, body: Json) -> Json:
        details = {"prompt_tokens_details": {"cached_tokens": reply.cached_tokens}} if self._usage_details else {}
        return {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(reply.ids), **details}

    def _events(self, choice: Json, reply: EngineReply, body: Json) -> list[Json]:
        events = []
        for at, token in enumerate(choice["token_ids"]):
            last = at == len(choice["token_ids"]) - 1
            values = {name: one[at : at + 1] for name, one in choice["logprobs"].items()}
            part = {"index": 0, "text": "", "token_ids": [token], "logprobs": values}
            ends = {name: choice[name] if last else None for name in ("finish_reason", "stop_reason")}
            events.append({"choices": [{**part, **ends}]})
        return [*events, {"choices": [], "usage": self._usage(reply, body)}]


@asynccontextmanager
async def vllm(kind: LogprobKind = LogprobKind.RAW, **settings: Any) -> AsyncIterator[str]:
    """vLLM's API at the address that this yields."""
    async with TinyEngine(shipped_model()) as tiny, _listening(TinyVllm(tiny, kind, **settings).app()) as url:
        yield f"vllm:{url}"

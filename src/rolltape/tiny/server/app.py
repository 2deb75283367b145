"""The HTTP routes of `rolltape engine`, named and shaped like SGLang's."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from http import HTTPStatus
from pathlib import Path

import msgspec
from aiohttp import web

from rolltape.errors import CheckpointError, EngineError, EngineStopped
from rolltape.records.turn import LogprobKind
from rolltape.serving import bearer_token, same_key
from rolltape.tiny.engine import InFlightPolicy, TinyEngine
from rolltape.tiny.sampling import Sampling
from rolltape.tiny.server.answers import Json, SglangAnswer
from rolltape.tiny.server.bodies import (
    AbortBody,
    BodyError,
    PauseBody,
    PromptRequest,
    UpdateBody,
    VersionBody,
    decode,
    decode_generate,
    parse_prompts,
)

MAX_BODY_BYTES = 64 * 2**20
_HEALTH_TIMEOUT_S = 20.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EngineServer:
    """Serves an engine: `EngineServer(engine, folder).app()` is the application."""

    def __init__(
        self,
        engine: TinyEngine,
        folder: Path,
        *,
        model_name: str | None = None,
        kind: LogprobKind = LogprobKind.AFTER_TEMPERATURE,
        incremental: bool = False,
        api_key: str | None = None,
    ) -> None:
        self.engine = engine
        self._api_key = api_key  # None if no key is needed
        self._folder = folder
        self._model_name = str(folder) if model_name is None else model_name
        self._kind = kind
        self._incremental = incremental

    def app(self) -> web.Application:
        """The application; the engine must run, and it must be served with `handler_cancellation=True`."""
        app = web.Application(middlewares=[_errors_as_json, self._check_key], client_max_size=MAX_BODY_BYTES)
        routes: dict[str, tuple[str, Handler]] = {
            "/generate": ("POST PUT", self.generate),
            "/abort_request": ("POST", self.abort),
            "/update_weights_from_disk": ("POST", self.update_weights),
            "/update_weight_version": ("POST", self.update_version),
            "/pause_generation": ("POST", self.pause),
            "/continue_generation": ("POST", self.resume),
            "/flush_cache": ("GET POST", self.flush),
            "/health": ("GET", self.health),
            "/health_generate": ("GET", self.health_generate),
            "/v1/models": ("GET", self.models),
        }
        for info in (self.model_info, self.server_info, self.weight_version):  # also under their old names
            routes |= {f"/{prefix}{info.__name__}": ("GET", info) for prefix in ("", "get_")}
        for path, (methods, handler) in routes.items():
            for method in methods.split():
                app.router.add_route(method, path, handler)
        return app

    @web.middleware
    async def _check_key(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Require the key, if one is set, as a bearer token for everything but health checks."""
        free = self._api_key is None or request.path.startswith("/health")
        if free or same_key(bearer_token(request) or "", self._api_key or ""):
            return await handler(request)
        return _error("give the key as `Authorization: Bearer …`", HTTPStatus.UNAUTHORIZED)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = decode_generate(await request.read())
        wanted, many = parse_prompts(body, self.engine)
        if body.stream:
            return await self._stream(request, wanted, many)
        answers = await _all_or_none([self._whole(one) for one in wanted])
        for reason in (answer["meta_info"]["finish_reason"] for answer in answers):
            if reason.get("status_code") is not None:
                return _error(reason["message"], HTTPStatus.INTERNAL_SERVER_ERROR)
        return _json(answers if many else answers[0])

    async def _whole(self, wanted: PromptRequest) -> Json:
        answer = SglangAnswer(wanted, self.engine.texts, self._kind)
        pieces = self.engine.stream(wanted.prompt_ids, wanted.sampling, request_id=wanted.request_id, whole=True)
        async with aclosing(pieces):
            piece = await anext(pieces)
            answer.take(piece)
            return answer.whole(piece)

    async def _stream(self, request: web.Request, wanted: list[PromptRequest], many: bool) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        # Checked before the stream begins, so that an invalid request gets an error status.
        for one in wanted:
            self.engine.checked(one.prompt_ids, one.sampling, request_id=one.request_id)
        await response.prepare(request)
        async with aclosing(self._events(wanted, many)) as events:
            async for event in events:
                await response.write(event)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _events(self, wanted: list[PromptRequest], many: bool) -> AsyncGenerator[bytes, None]:
        """The events of all prompts, as they come."""
        queue: asyncio.Queue[Json | EngineError] = asyncio.Queue()
        tasks = [asyncio.create_task(self._follow(index, one, queue)) for index, one in enumerate(wanted)]
        try:
            ended = 0
            while ended < len(tasks):
                event = await queue.get()
                if isinstance(event, EngineError):
                    yield _event({"error": {"message": str(event)}})
                    return
                ended += event["meta_info"]["finish_reason"] is not None
                if not many:
                    del event["index"]
                yield _event(event)
        finally:
            await _cancelled(tasks)

    async def _follow(self, index: int, wanted: PromptRequest, queue: "asyncio.Queue[Json | EngineError]") -> None:
        answer = SglangAnswer(wanted, self.engine.texts, self._kind)
        write = answer.delta if self._incremental else answer.whole
        try:
            pieces = self.engine.stream(wanted.prompt_ids, wanted.sampling, request_id=wanted.request_id)
            async with aclosing(pieces):
                async for piece in pieces:
                    answer.take(piece)
                    if answer.is_due(piece):
                        queue.put_nowait({**write(piece), "index": index})
        except EngineError as error:
            queue.put_nowait(error)

    async def abort(self, request: web.Request) -> web.Response:
        body = decode(await request.read(), AbortBody)
        if body.abort_all:
            self.engine.abort_all()
        elif body.rid is None:
            raise BodyError("give a rid, or abort_all")
        else:
            self.engine.abort(body.rid)
        return web.Response()

    async def update_weights(self, request: web.Request) -> web.Response:
        body = decode(await request.read(), UpdateBody)
        version = self.engine.version if body.weight_version is None else body.weight_version
        in_flight = InFlightPolicy.ABORT if body.abort_all_requests else InFlightPolicy.FINISH
        try:
            count = await self.engine.load_weights(body.model_path, version, in_flight=in_flight)
        except CheckpointError as error:
            failed = {"success": False, "message": str(error), "num_paused_requests": 0}
            return _json(failed, HTTPStatus.BAD_REQUEST)
        self._folder = Path(body.model_path)
        return _json({"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": count})

    async def update_version(self, request: web.Request) -> web.Response:
        body = decode(await request.read(), VersionBody)
        if body.abort_all_requests:
            self.engine.abort_all()
        await self.engine.announce(body.new_version)
        return _json({"success": True, "message": "Weight version updated.", "new_version": body.new_version})

    async def pause(self, request: web.Request) -> web.Response:
        mode = decode(await request.read(), PauseBody).mode
        if mode not in ("abort", "in_place", "retract"):
            raise BodyError(f"mode is {mode!r}; give abort, in_place or retract")
        await self.engine.pause(in_flight=InFlightPolicy.ABORT if mode == "abort" else InFlightPolicy.FINISH)
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: web.Request) -> web.Response:
        await self.engine.resume()
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def flush(self, request: web.Request) -> web.Response:
        """Clear the prefix cache. As in SGLang, this is refused while requests are in flight."""
        if self.engine.in_flight > 0:
            return web.Response(text="requests are in flight\n", status=HTTPStatus.BAD_REQUEST)
        await self.engine.drop_prefixes()
        return web.Response(text="Cache flushed.\n")

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=HTTPStatus.OK if self.engine.stopped is None else HTTPStatus.SERVICE_UNAVAILABLE)

    async def health_generate(self, request: web.Request) -> web.Response:
        """An engine is healthy if it samples a token in time, or is paused."""
        if self.engine.paused and self.engine.stopped is None:
            return web.Response()
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                await self.engine.generate([0], Sampling(temperature=0, max_tokens=1))
        except (EngineError, TimeoutError):
            return web.Response(status=HTTPStatus.SERVICE_UNAVAILABLE)
        return web.Response()

    async def model_info(self, request: web.Request) -> web.Response:
        return _json(
            {
                "model_path": str(self._folder),
                "tokenizer_path": str(self._folder),
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": self.engine.version,
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": "qwen3",
                "architectures": ["Qwen3ForCausalLM"],
            }
        )

    async def server_info(self, request: web.Request) -> web.Response:
        return _json(
            {
                "model_path": str(self._folder),
                "served_model_name": self._model_name,
                "context_length": self.engine.context,
                "weight_version": self.engine.version,
                "logprob_kind": self._kind.value,
                "grammar_backend": "none",
                "incremental_streaming_output": self._incremental,
                "internal_states": [{"in_flight": self.engine.in_flight, "paused": self.engine.paused}],
                "version": "rolltape",
            }
        )

    async def weight_version(self, request: web.Request) -> web.Response:
        return _json({"weight_version": self.engine.version})

    async def models(self, request: web.Request) -> web.Response:
        card = {
            "id": self._model_name,
            "object": "model",
            "created": 0,
            "owned_by": "rolltape",
            "root": self._model_name,
            "max_model_len": self.engine.context,
        }
        return _json({"object": "list", "data": [card]})


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except EngineStopped as error:
        return _error(str(error), HTTPStatus.SERVICE_UNAVAILABLE)
    except EngineError as error:
        return _error(str(error), HTTPStatus.BAD_REQUEST)
    except web.HTTPException as error:
        return _error(error.reason, HTTPStatus(error.status), error.headers.get("Allow"))


async def _all_or_none(works: list[Coroutine[None, None, Json]]) -> list[Json]:
    """The results of all, or the first error; the others are then cancelled."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _cancelled(tasks)


async def _cancelled(tasks: Sequence["asyncio.Task[Json] | asyncio.Task[None]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _json(value: object, status: HTTPStatus = HTTPStatus.OK) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _error(message: str, status: HTTPStatus, allow: str | None = None) -> web.Response:
    response = _json({"error": {"message": message}}, status)
    if allow is not None:
        response.headers["Allow"] = allow
    return response


def _event(value: Json) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"

"""A service that speaks Tinker's HTTP protocol, as far as training on rollouts needs it, and says what it is told."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tinker
from aiohttp import web
from tinker.proto import tinker_public_pb2 as wire

from live_jobs import tokenizer
from rolltape.integrations.background import BackgroundLoop

Say = Callable[[str, str], str]  # prompt, sampling session → reply; an exception is a request that failed


class TinkerService:
    """Replies of `say`, with a logprob of its own for each token. What it was sent is kept."""

    def __init__(self, say: Say) -> None:
        self.say = say
        self.url = ""
        self.sampled: list[dict[str, Any]] = []  # requests, as they came
        self.trained: list[wire.ForwardBackwardRequest] = []
        self.steps = 0
        self.cancelled = threading.Semaphore(0)  # released for each request that is given up
        self.held = threading.Semaphore(0)  # released for each reply that is waited for while replies are kept back
        self.loop: asyncio.AbstractEventLoop
        self._open = asyncio.Event()
        self._open.set()
        self._answers: dict[str, Any] = {}  # by request id: JSON, or the bytes of a protobuf message
        self._samplers = 0

    def hold(self) -> None:
        """Keep replies back until `release`."""
        self.loop.call_soon_threadsafe(self._open.clear)

    def release(self) -> None:
        self.loop.call_soon_threadsafe(self._open.set)

    def app(self) -> web.Application:
        app = web.Application()
        plain: dict[str, dict[str, Any]] = {
            "client/config": {},
            "client/dynamic_config": {"sample_cancel_enabled": True},
            "get_info": {"type": "get_info", "model_data": {"model_name": "tiny"}, "model_id": "model"},
            "create_session": {"session_id": "session"},
            "session_heartbeat": {},
            "sessions/session/finish": {},
            "telemetry": {"status": "accepted"},
        }
        for path, answer in plain.items():
            app.router.add_post(f"/api/v1/{path}", _always(answer))
        for path, handler in (
            ("create_model", self._create_model),
            ("save_weights_for_sampler", self._save_weights),
            ("asample", self._sample),
            ("forward_backward", self._forward_backward),
            ("optim_step", self._optim_step),
            ("retrieve_future", self._retrieve),
            ("cancel_future", self._cancel),
        ):
            app.router.add_post(f"/api/v1/{path}", handler)
        return app

    async def _create_model(self, request: web.Request) -> web.Response:
        return self._promise({"model_id": "model", "type": "create_model"})

    async def _save_weights(self, request: web.Request) -> web.Response:
        self._samplers += 1
        return self._promise({"sampling_session_id": f"sampler-{self._samplers}", "type": "save_weights_for_sampler"})

    async def _optim_step(self, request: web.Request) -> web.Response:
        self.steps += 1
        return self._promise({"metrics": {}})

    async def _forward_backward(self, request: web.Request) -> web.Response:
        self.trained.append(wire.ForwardBackwardRequest.FromString(await request.read()))
        return self._promise(wire.ForwardBackwardOutput(metrics={"loss:sum": 0.5}).SerializeToString())

    async def _sample(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.sampled.append(asked)
        prompt = [token for chunk in asked["prompt"]["chunks"] for token in chunk["tokens"]]
        try:
            text = self.say(tokenizer().decode(prompt), asked["sampling_session_id"])
        except RuntimeError as error:
            return self._promise({"error": str(error), "category": "user"}, sample_sequence_ids=["one"])
        ids = tokenizer().encode(text, add_special_tokens=False).ids
        whole = [*ids, asked["sampling_params"]["stop"][0]]
        kept = whole[: asked["sampling_params"]["max_tokens"]]
        reply = wire.SampledSequence(
            stop_reason=wire.STOP_REASON_STOP if kept == whole else wire.STOP_REASON_LENGTH,
            tokens=np.array(kept, np.int32).tobytes(),
            logprobs=logprobs_of(kept).tobytes(),
        )
        message = wire.SampleResponse(sequences=[reply], prompt_cache_hit_tokens=1)
        return self._promise(message.SerializeToString(), sample_sequence_ids=["one"])

    def _promise(self, answer: Any, **more: Any) -> web.Response:
        key = f"request-{len(self._answers)}"
        self._answers[key] = answer
        return web.json_response({"request_id": key, **more})

    async def _retrieve(self, request: web.Request) -> web.Response:
        if not self._open.is_set():
            self.held.release()
        await self._open.wait()
        answer = self._answers[(await request.json())["request_id"]]
        if isinstance(answer, bytes):
            return web.Response(body=answer, content_type="application/x-protobuf")
        return web.json_response(answer)

    async def _cancel(self, request: web.Request) -> web.Response:
        self.cancelled.release()
        return web.json_response({})


def logprobs_of(ids: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A logprob that tells tokens and their places apart, with all bits of a float."""
    return np.array([-(1 + token % 97 + 7 * at) / 300 for at, token in enumerate(ids)], np.float32)


def _always(answer: dict[str, Any]) -> Callable[[web.Request], Any]:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response(answer)

    return handler


@contextlib.contextmanager
def tinker_service(say: Say) -> Iterator[tuple[TinkerService, tinker.TrainingClient]]:
    """The service, and a training client of Tinker's own SDK that is connected to it."""
    service = TinkerService(say)
    background = BackgroundLoop("tinker-service")
    service.loop = background.loop

    async def serve() -> web.AppRunner:
        runner = web.AppRunner(service.app(), shutdown_timeout=1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    runner = background.submit(serve()).result()
    service.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        with tinker.ServiceClient(base_url=service.url, api_key="tml-test") as client:
            made: Any = client.create_lora_training_client(base_model="tiny")
            yield service, made.result() if isinstance(made, tinker.APIFuture) else made  # a client before 0.37
    finally:
        service.release()
        background.submit(runner.cleanup()).result()
        background.close()

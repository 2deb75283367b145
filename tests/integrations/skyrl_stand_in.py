"""The part of SkyRL that the integration uses (August 2026), for machines without SkyRL, and a server for its client.

ROLLTAPE_SKYRL names a checkout of SkyRL, or is "installed": the tests then use SkyRL itself.
"""

import asyncio
import contextlib
import os
import sys
import threading
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import aiohttp
from aiohttp import web

from live_jobs import tokenizer
from rolltape.integrations.background import BackgroundLoop

CHECKOUT = os.environ.get("ROLLTAPE_SKYRL")
Say = Callable[[str], str]  # prompt → reply; an exception is a request that failed


@dataclass
class TrajectoryID:
    instance_id: str
    repetition_id: int


@dataclass
class BatchMetadata:
    global_step: int
    training_phase: str


class GeneratorInterface(ABC):
    @abstractmethod
    async def generate(self, input_batch: Any) -> Any: ...


class RemoteInferenceClient:
    """SkyRL's client, as far as a generator calls it: it posts token ids to a server."""

    model_name = "tiny"

    def __init__(self, proxy_url: str) -> None:
        self.proxy_url = proxy_url
        self.weight_version = 0

    def increment_weight_version(self) -> None:
        self.weight_version += 1

    async def generate(self, input_batch: dict[str, Any]) -> dict[str, Any]:
        (ids,) = input_batch["prompt_token_ids"]
        body = {"sampling_params": input_batch["sampling_params"], "model": "tiny", "token_ids": ids}
        async with (
            aiohttp.ClientSession(raise_for_status=True) as session,
            session.post(f"{self.proxy_url}/inference/v1/generate", json=body) as response,
        ):
            (choice,) = (await response.json())["choices"]
        return {
            "responses": [""],
            "response_ids": [choice["token_ids"]],
            "stop_reasons": [choice["finish_reason"]],
            "response_logprobs": [[one["logprob"] for one in choice["logprobs"]["content"]]],
        }


def install() -> Any:
    """Make `skyrl` importable, and return the module with the types of its generators."""
    if CHECKOUT:
        if CHECKOUT != "installed":
            sys.path[:0] = [CHECKOUT, f"{CHECKOUT}/skyrl-gym"]
        # pydantic refuses SkyRL's own TypedDicts before Python 3.12.
        typing.TypedDict = import_module("typing_extensions").TypedDict
        return import_module("skyrl.train.generators.base")
    base = ModuleType("skyrl.train.generators.base")
    base.__dict__.update(TrajectoryID=TrajectoryID, BatchMetadata=BatchMetadata, GeneratorInterface=GeneratorInterface)
    for name in ("skyrl", "skyrl.train", "skyrl.train.generators"):
        sys.modules.setdefault(name, ModuleType(name))
    sys.modules["skyrl.train.generators.base"] = base
    return base


class Servers:
    """vLLM's servers and SkyRL's router in one: they reply what `say` says, with a logprob of -0.5 for each token."""

    def __init__(self, say: Say) -> None:
        self.say = say
        self.asked: list[dict[str, Any]] = []
        self.arrived = threading.Semaphore(0)  # released for each request
        self.open = asyncio.Event()
        self.open.set()
        self.loop: asyncio.AbstractEventLoop
        self.client: Any = None

    async def generate(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.asked.append(asked)
        self.arrived.release()
        await self.open.wait()
        try:
            text = self.say(tokenizer().decode(asked["token_ids"]))
        except RuntimeError as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        ids = [*tokenizer().encode(text, add_special_tokens=False).ids, asked["sampling_params"]["stop_token_ids"][0]]
        logprobs = {"content": [{"logprob": -0.5} for _ in ids]}
        return web.json_response({"choices": [{"token_ids": ids, "finish_reason": "stop", "logprobs": logprobs}]})

    def hold(self) -> None:
        """Keep replies back until `release`."""
        self.loop.call_soon_threadsafe(self.open.clear)

    def release(self) -> None:
        self.loop.call_soon_threadsafe(self.open.set)


@contextlib.contextmanager
def skyrl_servers(say: Say) -> Iterator[Servers]:
    """Servers, and SkyRL's client of them."""
    servers = Servers(say)
    background = BackgroundLoop("skyrl-servers")
    servers.loop = background.loop

    async def serve() -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/inference/v1/generate", servers.generate)
        runner = web.AppRunner(app, shutdown_timeout=1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    runner = background.submit(serve()).result()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    if CHECKOUT:
        module = import_module("skyrl.backends.skyrl_train.inference_servers.remote_inference_client")
        texts = SimpleNamespace(batch_decode=lambda lists, **_: ["" for _ in lists], decode=lambda ids, **_: "")
        servers.client = module.RemoteInferenceClient(
            proxy_url=url, server_urls=[url], data_parallel_size=1, model_name="tiny", tokenizer=texts
        )
    else:
        servers.client = RemoteInferenceClient(url)
    try:
        yield servers
    finally:
        servers.release()
        background.submit(runner.cleanup()).result()
        background.close()

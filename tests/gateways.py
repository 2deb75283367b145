"""A gateway on a run of its own, a scripted engine behind it, and clients that show what really came over the wire."""

import asyncio
import enum
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

import rolltape
from rolltape.gateway.gateway import Gateway
from rolltape.records.turn import Turn
from rolltape.tiny import shipped_model
from scripted_engine import Asked, Json, Script, ScriptedEngine, Step, load_tokenizer

CALCULATOR: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}
# Times that a test can wait for.
QUICK = {"look_every_s": 0.1, "let_go_s": 1.0, "retry_s": 1.0, "reply_s": 20.0}
ADMIN_PATHS = ("/sessions", "/weights", "/status", "/metrics")


class Api(enum.StrEnum):
    """The APIs, by the names of their dialects."""

    CHAT = "chat"
    RESPONSES = "responses"
    MESSAGES = "messages"
    GEMINI = "gemini"


PATHS = {
    Api.CHAT: "/v1/chat/completions",
    Api.RESPONSES: "/v1/responses",
    Api.MESSAGES: "/v1/messages",
    Api.GEMINI: "/v1beta/models/it:generateContent",
}


def path_of(api: Api, *, stream: bool = False) -> str:
    """Where a reply is asked for; one API has another place for streamed ones."""
    return "/v1beta/models/it:streamGenerateContent?alt=sse" if stream and api is Api.GEMINI else PATHS[api]


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def body_of(api: Api, messages: str | list[Json], **fields: Any) -> Json:
    """A request of that API; messages are in the form that the first three take."""
    said = [user(messages)] if isinstance(messages, str) else messages
    match api:
        case Api.CHAT:
            return {"model": "it", "messages": said, **fields}
        case Api.MESSAGES:
            return {"model": "it", "messages": said, "max_tokens": 512, **fields}
        case Api.RESPONSES:
            return {"model": "it", "input": said, **fields}
        case Api.GEMINI:
            fields.pop("stream", None)
            return {"contents": [_content(**one) for one in said], **fields}


def _content(role: str, content: str | list[Json]) -> Json:
    parts = [{"text": content}] if isinstance(content, str) else content
    return {"role": "model" if role == "assistant" else "user", "parts": parts}


class Answer(NamedTuple):
    """What came back."""

    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def json(self) -> Json:
        body: Json = json.loads(self.raw)
        return body

    @property
    def events(self) -> list[Json]:
        """The data of a streamed reply's events, its end aside; one API's error has no mark before it."""
        marked = [line for line in self.raw.decode().splitlines() if line.startswith(("data:", "{"))]
        lines = [line.removeprefix("data:").strip() for line in marked]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    @property
    def error(self) -> str:
        """What a refusal says, in the place where all APIs have it."""
        message: str = self.json["error"]["message"]
        return message


def text_of(api: Api, answer: Answer) -> str:
    """What a whole reply says."""
    body = answer.json
    match api:
        case Api.CHAT:
            return body["choices"][0]["message"]["content"] or ""
        case Api.MESSAGES:
            return "".join(block["text"] for block in body["content"] if block["type"] == "text")
        case Api.RESPONSES:
            said = [item for item in body["output"] if item["type"] == "message"]
            return "".join(part["text"] for item in said for part in item["content"])
        case Api.GEMINI:
            return _gemini_text(body)


def said_finish(api: Api, answer: Answer) -> str:
    """How a whole reply ended, in its API's word."""
    body = answer.json
    match api:
        case Api.CHAT:
            return str(body["choices"][0]["finish_reason"])
        case Api.MESSAGES:
            return str(body["stop_reason"])
        case Api.RESPONSES:
            return str(body["status"])
        case Api.GEMINI:
            return str(body["candidates"][0]["finishReason"])


def streamed_text_of(api: Api, answer: Answer) -> str:
    """What a streamed reply says."""
    events = answer.events
    match api:
        case Api.CHAT:
            deltas = [choice["delta"] for event in events for choice in event["choices"]]
            return "".join(delta.get("content") or "" for delta in deltas)
        case Api.MESSAGES:
            deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
            return "".join(delta.get("text", "") for delta in deltas)
        case Api.RESPONSES:
            return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        case Api.GEMINI:
            return "".join(map(_gemini_text, events))


def _gemini_text(response: Json) -> str:
    contents = [candidate["content"] for candidate in response.get("candidates", ())]
    parts = [part for content in contents for part in content["parts"] if not part.get("thought")]
    return "".join(part.get("text", "") for part in parts)


class Rig:
    """A running gateway, its engine, its run, and one who asks."""

    def __init__(self, gateway: Gateway, engine: ScriptedEngine, run: Path, http: aiohttp.ClientSession) -> None:
        self.gateway = gateway
        self.engine = engine
        self.run = run
        self.http = http

    async def call(self, method: str, path: str, body: Json | bytes | None = None, **headers: str) -> Answer:
        """A request; those for whoever runs the gateway carry its key, unless the headers have one."""
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if path.startswith(ADMIN_PATHS) and not {"authorization", "x-api-key"} & {name.lower() for name in sent}:
            sent["Authorization"] = f"Bearer {self.gateway.admin_key}"
        async with self.http.request(method, self.gateway.url + path, data=data, headers=sent) as response:
            return Answer(response.status, dict(response.headers), await response.read())

    async def open(self, **spec: Any) -> Json:
        """Open a session, of a task of its own unless told."""
        answer = await self.call("POST", "/sessions", {"task_id": "t", **spec} if "rollout" not in spec else spec)
        assert answer.status == 200, answer.raw
        return answer.json

    async def finish(self, opened: Json, **ending: Any) -> Json:
        answer = await self.call("POST", f"/sessions/{opened['session']}/finish", ending)
        assert answer.status == 200, answer.raw
        return answer.json

    async def ask(
        self, opened: Json, messages: str | list[Json], api: Api = Api.CHAT, retry: int = 0, **fields: Any
    ) -> Answer:
        """One request within a session."""
        headers = {"x_stainless_retry_count": str(retry)} if retry else {}
        path = f"/s/{opened['key']}{path_of(api, stream=bool(fields.get('stream')))}"
        return await self.call("POST", path, body_of(api, messages, **fields), **headers)

    def asking(
        self, opened: Json, messages: str | list[Json], api: Api = Api.CHAT, **kw: Any
    ) -> "asyncio.Task[Answer]":
        """The same, on its way; cancelling it drops the connection."""
        return asyncio.ensure_future(self.ask(opened, messages, api, **kw))

    async def requested(self, count: int) -> None:
        """Wait until the engine has had that many requests."""
        await eventually(lambda: self.engine.requests >= count)

    def turns(self) -> list[Turn]:
        """All turns on the tape, as a reader finds them."""
        return [turn for rollout in rolltape.read(self.run).rollouts() for turn in rollout.turns]


async def eventually(holds: Callable[[], bool], within_s: float = 60.0) -> None:
    """Wait until something holds. The limit is for what never holds: a busy machine may take long."""
    async with asyncio.timeout(within_s):
        while not holds():
            await asyncio.sleep(0.005)


def scripted(script: Script, **options: Any) -> ScriptedEngine:
    """An engine that says what it is told, with the shipped model's tokenizer; each request stands alone."""
    return ScriptedEngine(load_tokenizer(shipped_model()), script, **options)


@asynccontextmanager
async def rig(run: Path, script: Script | ScriptedEngine = ("ok",), **settings: Any) -> AsyncIterator[Rig]:
    """A gateway before a scripted engine, with the times of QUICK unless told."""
    engine = script if isinstance(script, ScriptedEngine) else scripted(script)
    settings.setdefault("patience", QUICK)
    async with (
        engine,
        Gateway(engine=f"sglang:{engine.url}", model=shipped_model(), tape=run, **settings) as gateway,
        aiohttp.ClientSession() as http,
    ):
        yield Rig(gateway, engine, run, http)


@asynccontextmanager
async def tiny_gateway(run: Path, **settings: Any) -> AsyncIterator[Rig]:
    """A gateway before the shipped model."""
    async with (
        Gateway(engine="tiny", tape=run, **settings) as gateway,
        aiohttp.ClientSession() as http,
    ):
        yield Rig(gateway, scripted(()), run, http)


def slowly(text: str, token_delay_s: float = 0.01) -> Callable[[Asked], Step]:
    """A script of one reply that takes its time."""
    return lambda _: Step(text, token_delay_s=token_delay_s)

"""The three APIs that agents use, from the client's side: one conversation, streamed or not, in a common form.

The checked gateway may be any program, so nothing here is shared with Rolltape's own dialects.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

Json = dict[str, Any]
TIMEOUT_S = 180.0
_MAX_TOKENS = 64


class ApiReply(msgspec.Struct, frozen=True, kw_only=True):
    """A reply in the form that the APIs have in common."""

    status: int = 200
    id: str | None = None
    text: str = ""
    calls: tuple[Json, ...] = ()  # each with id, name and arguments, a JSON text
    message: list[Json] = []  # in the form in which a client sends it back
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    body: Any = None  # unchanged
    events: int = 0  # of a stream, those with text or parts of calls
    ended: bool = True  # of a stream: whether the API's last event came


class Api(ABC):
    """One API: its path, the form of its requests, and how its replies are read."""

    name: str
    path: str

    def ask(self, model: str, messages: Sequence[Json]) -> Json:
        """The body for messages in this API's form."""
        return {"model": model, "messages": list(messages), "max_tokens": _MAX_TOKENS}

    @abstractmethod
    def forced(self, tool: Json) -> Json:
        """The fields that force a call of a tool, which is passed in chat form."""

    @abstractmethod
    def result(self, call: Json, result: str) -> Json:
        """The message that reports a call's result."""

    @abstractmethod
    def read(self, body: Any) -> ApiReply:
        """Read a reply that is not streamed."""

    @abstractmethod
    def read_events(self, events: list[Json], done: bool) -> ApiReply:
        """Read a streamed reply; `done`: the final `[DONE]` came."""


class _Chat(Api):
    name = "chat"
    path = "/v1/chat/completions"

    def forced(self, tool: Json) -> Json:
        return {"tools": [tool], "tool_choice": "required"}

    def result(self, call: Json, result: str) -> Json:
        return {"role": "tool", "tool_call_id": call["id"], "content": result}

    def read(self, body: Any) -> ApiReply:
        message = body["choices"][0]["message"]
        usage = body.get("usage") or {}
        return ApiReply(
            id=body.get("id"),
            text=message.get("content") or "",
            calls=tuple({"id": one["id"], **one["function"]} for one in message.get("tool_calls") or ()),
            message=[message],
            prompt_tokens=usage.get("prompt_tokens"),
            completion_tokens=usage.get("completion_tokens"),
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            body=body,
        )

    def read_events(self, events: list[Json], done: bool) -> ApiReply:
        deltas = [event["choices"][0]["delta"] for event in events if event.get("choices")]
        text = "".join(delta["content"] for delta in deltas if delta.get("content"))
        names = ("content", "reasoning_content", "tool_calls")
        parts = [delta for delta in deltas if any(delta.get(name) for name in names)]
        return ApiReply(id=next((one.get("id") for one in events), None), text=text, events=len(parts), ended=done)


class _Messages(Api):
    name = "messages"
    path = "/v1/messages"

    def forced(self, tool: Json) -> Json:
        function = tool["function"]
        own = {"name": function["name"], "description": function["description"], "input_schema": function["parameters"]}
        return {"tools": [own], "tool_choice": {"type": "any"}}

    def result(self, call: Json, result: str) -> Json:
        block = {"type": "tool_result", "tool_use_id": call["id"], "content": result}
        return {"role": "user", "content": [block]}

    def read(self, body: Any) -> ApiReply:
        blocks, usage = body["content"], body.get("usage") or {}
        uses = [one for one in blocks if one["type"] == "tool_use"]
        given, cached = usage.get("input_tokens"), usage.get("cache_read_input_tokens")
        held = (cached or 0) + (usage.get("cache_creation_input_tokens") or 0)
        return ApiReply(
            id=body.get("id"),
            text="".join(one["text"] for one in blocks if one["type"] == "text"),
            calls=tuple({"id": one["id"], "name": one["name"], "arguments": json.dumps(one["input"])} for one in uses),
            message=[{"role": "assistant", "content": blocks}],
            prompt_tokens=None if given is None else given + held,
            completion_tokens=usage.get("output_tokens"),
            cached_tokens=cached,
            body=body,
        )

    def read_events(self, events: list[Json], done: bool) -> ApiReply:
        deltas = [event["delta"] for event in events if event.get("type") == "content_block_delta"]
        text = "".join(delta["text"] for delta in deltas if delta.get("type") == "text_delta")
        start = next((event["message"].get("id") for event in events if event.get("type") == "message_start"), None)
        ended = any(event.get("type") == "message_stop" for event in events)
        return ApiReply(id=start, text=text, events=len(deltas), ended=ended)


class _Responses(Api):
    name = "responses"
    path = "/v1/responses"

    def ask(self, model: str, messages: Sequence[Json]) -> Json:
        return {"model": model, "input": list(messages), "max_output_tokens": _MAX_TOKENS, "store": False}

    def forced(self, tool: Json) -> Json:
        return {"tools": [{"type": "function", **tool["function"]}], "tool_choice": "required"}

    def result(self, call: Json, result: str) -> Json:
        return {"type": "function_call_output", "call_id": call["id"], "output": result}

    def read(self, body: Any) -> ApiReply:
        items, usage = body["output"], body.get("usage") or {}
        parts = [part for item in items if item["type"] == "message" for part in item["content"]]
        made = [one for one in items if one["type"] == "function_call"]
        return ApiReply(
            id=body.get("id"),
            text="".join(part.get("text", "") for part in parts),
            calls=tuple({"id": one["call_id"], "name": one["name"], "arguments": one["arguments"]} for one in made),
            message=items,
            prompt_tokens=usage.get("input_tokens"),
            completion_tokens=usage.get("output_tokens"),
            cached_tokens=(usage.get("input_tokens_details") or {}).get("cached_tokens"),
            body=body,
        )

    def read_events(self, events: list[Json], done: bool) -> ApiReply:
        text = "".join(event["delta"] for event in events if event.get("type") == "response.output_text.delta")
        parts = [event for event in events if str(event.get("type")).endswith(".delta")]
        ends = ("response.completed", "response.incomplete")
        last = next((event for event in events if event.get("type") in ends), None)
        own = None if last is None else last["response"].get("id")
        return ApiReply(id=own, text=text, events=len(parts), ended=last is not None)


CHAT = _Chat()
APIS: tuple[Api, ...] = (CHAT, _Messages(), _Responses())


@asynccontextmanager
async def gateway_client(url: str, key: str | None, model: str | None) -> "AsyncIterator[GatewayClient]":
    """A client that sends the key in the headers of every API."""
    keyed = {} if key is None else {"Authorization": f"Bearer {key}", "x-api-key": key}
    headers, timeout = {"anthropic-version": "2023-06-01", **keyed}, aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, trust_env=False) as http:
        yield GatewayClient(http, url.rstrip("/").removesuffix("/v1"), key, model or "")


class GatewayClient:
    """Posts to a gateway as an agent does."""

    def __init__(self, http: aiohttp.ClientSession, root: str, key: str | None, model: str) -> None:
        self._http = http
        self.root = root
        self.key = key
        self.model = model

    async def get(self, path: str) -> tuple[int, Any]:
        async with self._http.get(self.root + path) as response:
            return response.status, _parsed(await response.read())

    async def post(self, path: str, body: Any, *, headers: Json | None = None) -> tuple[int, Any]:
        """The status and the JSON of an answer, or its text; a body of bytes is sent unchanged."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        own = {"Content-Type": "application/json", **(headers or {})}
        async with self._http.post(self.root + path, data=data, headers=own) as response:
            return response.status, _parsed(await response.read())

    async def ask(self, api: Api, messages: Sequence[Json], **more: Any) -> ApiReply:
        """One reply; `more` are fields of the body."""
        status, body = await self.post(api.path, {**api.ask(self.model, messages), **more})
        return api.read(body) if status == 200 else ApiReply(status=status, body=body)

    async def stream(self, api: Api, messages: Sequence[Json], **more: Any) -> ApiReply:
        """One reply by server-sent events."""
        body = {**api.ask(self.model, messages), "stream": True, **more}
        async with self._http.post(self.root + api.path, json=body) as response:
            lines = (await response.read()).split(b"\n")  # an event may be longer than aiohttp's longest line
        data = [line[5:].strip() for line in lines if line.startswith(b"data:")]
        events = [event for event in map(_parsed, data) if isinstance(event, dict)]
        reply = api.read_events(events, b"[DONE]" in data)
        return msgspec.structs.replace(reply, status=response.status, body=events)


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace")

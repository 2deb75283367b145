"""The three APIs that agents speak, from the client's side: one conversation, whole or streamed, in a common form.

A gateway that is checked may be anybody's, so nothing here is shared with Rolltape's own dialects.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import msgspec

Json = dict[str, Any]
TIMEOUT_S = 180.0
_MAX_TOKENS = 64


class ApiReply(msgspec.Struct, frozen=True, kw_only=True):
    """A reply in what the APIs have in common."""

    status: int
    id: str | None = None
    text: str = ""
    calls: tuple[Json, ...] = ()  # each with id, name and arguments, a JSON text
    message: list[Json] = []  # as a client sends it back
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    body: Any = None  # as it came
    events: int = 0  # of a stream, those that brought text or parts of calls
    ended: bool = True  # of a stream: the API's own last event came


class Api(msgspec.Struct, frozen=True, kw_only=True):
    """One API: where it is, how a conversation is asked for, and how a reply is read."""

    name: str
    path: str
    ask: Callable[[str, Sequence[Json]], Json]  # model and messages in this API's form → a body
    tools: Callable[[Json], Json]  # a tool in chat form → the fields that force a call of it
    result: Callable[[Json, str], Json]  # a call and its result → the message that reports it
    read: Callable[[int, Any], ApiReply]
    read_events: Callable[[int, list[Json], bool], ApiReply]


class GatewayClient:
    """Posts to a gateway as an agent would, with its key in the headers of every API."""

    def __init__(self, url: str, key: str | None, model: str | None) -> None:
        self.root = url.rstrip("/").removesuffix("/v1")
        self.model = model or ""
        self.key = key
        keyed = {} if key is None else {"Authorization": f"Bearer {key}", "x-api-key": key}
        self._headers = {"anthropic-version": "2023-06-01", **keyed}
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "GatewayClient":
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        self._http = aiohttp.ClientSession(headers=self._headers, timeout=timeout, trust_env=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._http is not None
        await self._http.close()

    async def get(self, path: str) -> tuple[int, Any]:
        assert self._http is not None
        async with self._http.get(self.root + path) as response:
            return response.status, _parsed(await response.read())

    async def post(self, path: str, body: Any, *, headers: Json | None = None) -> tuple[int, Any]:
        """The status and the JSON of an answer, or its text; a body of bytes is sent as it is."""
        assert self._http is not None
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        own = {"Content-Type": "application/json", **(headers or {})}
        async with self._http.post(self.root + path, data=data, headers=own) as response:
            return response.status, _parsed(await response.read())

    async def ask(self, api: Api, messages: Sequence[Json], **more: Any) -> ApiReply:
        """One reply; `more` are fields of the body."""
        return api.read(*await self.post(api.path, {**api.ask(self.model, messages), **more}))

    async def stream(self, api: Api, messages: Sequence[Json], **more: Any) -> ApiReply:
        """One reply by server-sent events."""
        assert self._http is not None
        body = {**api.ask(self.model, messages), "stream": True, **more}
        async with self._http.post(self.root + api.path, json=body) as response:
            lines = (await response.read()).split(b"\n")  # an event may be longer than aiohttp's longest line
        data = [line[5:].strip() for line in lines if line.startswith(b"data:")]
        events = [event for event in map(_parsed, data) if isinstance(event, dict)]
        return api.read_events(response.status, events, b"[DONE]" in data)


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace")


def _chat_ask(model: str, messages: Sequence[Json]) -> Json:
    return {"model": model, "messages": list(messages), "max_tokens": _MAX_TOKENS}


def _chat_tools(tool: Json) -> Json:
    return {"tools": [tool], "tool_choice": "required"}


def _chat_result(call: Json, result: str) -> Json:
    return {"role": "tool", "tool_call_id": call["id"], "content": result}


def _chat_read(status: int, body: Any) -> ApiReply:
    if status != 200:
        return ApiReply(status=status, body=body)
    message = body["choices"][0]["message"]
    calls = tuple({"id": one["id"], **one["function"]} for one in message.get("tool_calls") or ())
    usage = body.get("usage") or {}
    return ApiReply(
        status=status,
        id=body.get("id"),
        text=message.get("content") or "",
        calls=calls,
        message=[message],
        prompt_tokens=usage.get("prompt_tokens"),
        completion_tokens=usage.get("completion_tokens"),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        body=body,
    )


def _chat_events(status: int, events: list[Json], done: bool) -> ApiReply:
    deltas = [event["choices"][0]["delta"] for event in events if event.get("choices")]
    texts = [delta["content"] for delta in deltas if delta.get("content")]
    parts = [
        delta for delta in deltas if any(delta.get(name) for name in ("content", "reasoning_content", "tool_calls"))
    ]
    first = next((event.get("id") for event in events), None)
    return ApiReply(status=status, id=first, text="".join(texts), events=len(parts), ended=done, body=events)


def _messages_ask(model: str, messages: Sequence[Json]) -> Json:
    return {"model": model, "messages": list(messages), "max_tokens": _MAX_TOKENS}


def _messages_tools(tool: Json) -> Json:
    function = tool["function"]
    own = {"name": function["name"], "description": function["description"], "input_schema": function["parameters"]}
    return {"tools": [own], "tool_choice": {"type": "any"}}


def _messages_result(call: Json, result: str) -> Json:
    block = {"type": "tool_result", "tool_use_id": call["id"], "content": result}
    return {"role": "user", "content": [block]}


def _messages_read(status: int, body: Any) -> ApiReply:
    if status != 200:
        return ApiReply(status=status, body=body)
    blocks, usage = body["content"], body.get("usage") or {}
    calls = tuple(
        {"id": one["id"], "name": one["name"], "arguments": json.dumps(one["input"])}
        for one in blocks
        if one["type"] == "tool_use"
    )
    cached = usage.get("cache_read_input_tokens")
    given = usage.get("input_tokens")
    return ApiReply(
        status=status,
        id=body.get("id"),
        text="".join(one["text"] for one in blocks if one["type"] == "text"),
        calls=calls,
        message=[{"role": "assistant", "content": blocks}],
        prompt_tokens=None
        if given is None
        else given + (cached or 0) + (usage.get("cache_creation_input_tokens") or 0),
        completion_tokens=usage.get("output_tokens"),
        cached_tokens=cached,
        body=body,
    )


def _messages_events(status: int, events: list[Json], done: bool) -> ApiReply:
    deltas = [event["delta"] for event in events if event.get("type") == "content_block_delta"]
    texts = [delta["text"] for delta in deltas if delta.get("type") == "text_delta"]
    start = next((event["message"].get("id") for event in events if event.get("type") == "message_start"), None)
    ended = any(event.get("type") == "message_stop" for event in events)
    return ApiReply(status=status, id=start, text="".join(texts), events=len(deltas), ended=ended, body=events)


def _responses_ask(model: str, messages: Sequence[Json]) -> Json:
    return {"model": model, "input": list(messages), "max_output_tokens": _MAX_TOKENS, "store": False}


def _responses_tools(tool: Json) -> Json:
    return {"tools": [{"type": "function", **tool["function"]}], "tool_choice": "required"}


def _responses_result(call: Json, result: str) -> Json:
    return {"type": "function_call_output", "call_id": call["id"], "output": result}


def _responses_read(status: int, body: Any) -> ApiReply:
    if status != 200:
        return ApiReply(status=status, body=body)
    items, usage = body["output"], body.get("usage") or {}
    parts = [part for item in items if item["type"] == "message" for part in item["content"]]
    calls = tuple(
        {"id": one["call_id"], "name": one["name"], "arguments": one["arguments"]}
        for one in items
        if one["type"] == "function_call"
    )
    return ApiReply(
        status=status,
        id=body.get("id"),
        text="".join(part.get("text", "") for part in parts),
        calls=calls,
        message=items,
        prompt_tokens=usage.get("input_tokens"),
        completion_tokens=usage.get("output_tokens"),
        cached_tokens=(usage.get("input_tokens_details") or {}).get("cached_tokens"),
        body=body,
    )


def _responses_events(status: int, events: list[Json], done: bool) -> ApiReply:
    texts = [event["delta"] for event in events if event.get("type") == "response.output_text.delta"]
    parts = [event for event in events if str(event.get("type")).endswith(".delta")]
    last = next((event for event in events if event.get("type") in ("response.completed", "response.incomplete")), None)
    own = None if last is None else last["response"].get("id")
    return ApiReply(status=status, id=own, text="".join(texts), events=len(parts), ended=last is not None, body=events)


CHAT = Api(
    name="chat",
    path="/v1/chat/completions",
    ask=_chat_ask,
    tools=_chat_tools,
    result=_chat_result,
    read=_chat_read,
    read_events=_chat_events,
)
MESSAGES = Api(
    name="messages",
    path="/v1/messages",
    ask=_messages_ask,
    tools=_messages_tools,
    result=_messages_result,
    read=_messages_read,
    read_events=_messages_events,
)
RESPONSES = Api(
    name="responses",
    path="/v1/responses",
    ask=_responses_ask,
    tools=_responses_tools,
    result=_responses_result,
    read=_responses_read,
    read_events=_responses_events,
)
APIS = (CHAT, MESSAGES, RESPONSES)

"""Streams of a gateway as clients read them in any API, and an engine that samples as much as it is allowed."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
import pytest

from gateways import CALCULATOR, Answer, Api, Rig, body_of, eventually, path_of, scripted
from rolltape.tape.recording.session import SessionRecorder
from scripted_engine import Json, ScriptedEngine


class Message(NamedTuple):
    """What a reply says, in any API's form."""

    reasoning: str
    text: str
    calls: list[tuple[str, str]]


def said_whole(api: Api, body: Json) -> Message:
    """What a whole reply says."""
    match api:
        case Api.CHAT:
            message = body["choices"][0]["message"]
            calls = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", [])]
            return Message(message.get("reasoning_content") or "", message["content"] or "", calls)
        case Api.MESSAGES:
            by_type: dict[str, list[Json]] = {"thinking": [], "text": [], "tool_use": []}
            for block in body["content"]:
                by_type[block["type"]].append(block)
            calls = [(one["name"], json.dumps(one["input"])) for one in by_type["tool_use"]]
            thinking = "".join(one["thinking"] for one in by_type["thinking"])
            return Message(thinking, "".join(one["text"] for one in by_type["text"]), calls)
        case Api.RESPONSES:
            texts = {"reasoning": "", "message": ""}
            calls = []
            for item in body["output"]:
                if item["type"] == "function_call":
                    calls.append((item["name"], item["arguments"]))
                else:
                    texts[item["type"]] += "".join(part["text"] for part in item["content"])
            return Message(texts["reasoning"], texts["message"], calls)
        case Api.GEMINI:
            return said_streamed(api, [body])


def said_streamed(api: Api, events: list[Json]) -> Message:
    """What the deltas of a stream add up to."""
    match api:
        case Api.CHAT:
            deltas = [choice["delta"] for event in events for choice in event["choices"]]
            functions = [call["function"] for delta in deltas for call in delta.get("tool_calls", [])]
            calls = [(one["name"], one["arguments"]) for one in functions]
            reasoning = "".join(delta.get("reasoning_content") or "" for delta in deltas)
            return Message(reasoning, "".join(delta.get("content") or "" for delta in deltas), calls)
        case Api.MESSAGES:
            blocks: dict[int, Json] = {}
            for event in events:
                if event["type"] == "content_block_start":
                    blocks[event["index"]] = dict(event["content_block"], input="")
                elif event["type"] == "content_block_delta":
                    delta = event["delta"]
                    for field, into in (("thinking", "thinking"), ("text", "text"), ("partial_json", "input")):
                        if field in delta:
                            blocks[event["index"]][into] += delta[field]
            ordered = [block | {"input": json.loads(block["input"] or "{}")} for _, block in sorted(blocks.items())]
            return said_whole(api, {"content": ordered})
        case Api.RESPONSES:
            pieces = {"response.reasoning_text.delta": "", "response.output_text.delta": ""}
            calls = []
            for event in events:
                if event["type"] in pieces:
                    pieces[event["type"]] += event["delta"]
                elif event["type"] == "response.output_item.done" and event["item"]["type"] == "function_call":
                    calls.append((event["item"]["name"], event["item"]["arguments"]))
            reasoning, text = pieces.values()
            return Message(reasoning, text, calls)
        case Api.GEMINI:
            parts = [part for event in events for part in event["candidates"][0]["content"]["parts"]]
            thoughts = [part["text"] for part in parts if part.get("thought")]
            texts = [part["text"] for part in parts if "text" in part and not part.get("thought")]
            made = [part["functionCall"] for part in parts if "functionCall" in part]
            return Message("".join(thoughts), "".join(texts), [(one["name"], json.dumps(one["args"])) for one in made])


class Live:
    """A stream that is being read."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.raw = b""
        self.ended = False

    @property
    def events(self) -> list[Json]:
        whole = self.raw[: self.raw.rfind(b"\n\n") + 2] if b"\n\n" in self.raw else b""
        return Answer(200, {}, whole).events

    @property
    def said(self) -> Message:
        return said_streamed(self.api, self.events)

    async def read(self, response: aiohttp.ClientResponse) -> None:
        async for chunk in response.content.iter_any():
            self.raw += chunk
        self.ended = True


@asynccontextmanager
async def streaming(it: Rig, opened: Json, api: Api, messages: Any = "hello", **fields: Any) -> AsyncIterator[Live]:
    """A streamed request; leaving the block drops the connection."""
    live = Live(api)
    url = f"{it.gateway.url}/s/{opened['key']}{path_of(api, stream=True)}"
    async with it.http.post(url, json=body_of(api, messages, stream=True, **fields)) as response:
        reading = asyncio.ensure_future(live.read(response))
        try:
            yield live
        finally:
            reading.cancel()
            response.close()


def allowing(script: Any, ids: int = 0, **options: Any) -> ScriptedEngine:
    """An engine that samples as many ids as it is allowed, one event each."""
    engine = scripted(script, incremental=True, **options)
    engine.allowance = asyncio.Semaphore(ids)
    return engine


def allow(engine: ScriptedEngine, ids: int = 10_000) -> None:
    assert engine.allowance is not None
    for _ in range(ids):
        engine.allowance.release()


async def used_up(engine: ScriptedEngine) -> None:
    """Wait until the engine has sampled all ids that it is allowed."""
    allowance = engine.allowance
    assert allowance is not None
    await eventually(allowance.locked)


def hold_recording(monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event]:
    """Have turns wait before they are recorded: one event says that a turn waits, the other lets it go on."""
    recording, may_record = asyncio.Event(), asyncio.Event()
    record = SessionRecorder.record_turn_async

    async def held(self: SessionRecorder, **fields: Any) -> Any:
        recording.set()
        await may_record.wait()
        return await record(self, **fields)

    monkeypatch.setattr(SessionRecorder, "record_turn_async", held)
    return recording, may_record


def thinking(api: Api) -> Json:
    on: dict[Api, Json] = {
        Api.CHAT: {"chat_template_kwargs": {"enable_thinking": True}},
        Api.MESSAGES: {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        Api.RESPONSES: {"reasoning": {"effort": "high"}},
        Api.GEMINI: {"generationConfig": {"thinkingConfig": {"thinkingBudget": -1}}},
    }
    return on[api]


def tools(api: Api) -> list[Json]:
    function = CALCULATOR["function"]
    forms: dict[Api, Json] = {
        Api.CHAT: CALCULATOR,
        Api.MESSAGES: {
            "name": function["name"],
            "description": function["description"],
            "input_schema": function["parameters"],
        },
        Api.RESPONSES: {"type": "function", **function},
        Api.GEMINI: {"functionDeclarations": [function]},
    }
    return [forms[api]]

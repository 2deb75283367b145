"""Whatever is sent, the gateway answers it in its own words: never with a 500, never with a traceback."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from gateways import CALCULATOR, PATHS, Api, Rig, rig, user
from wire_bodies import broken

COUNTING = {
    Api.MESSAGES: "/v1/messages/count_tokens",
    Api.RESPONSES: "/v1/responses/input_tokens",
    Api.GEMINI: "/v1beta/models/it:countTokens",
}
BODIES: dict[str, dict[str, Any]] = {
    PATHS[Api.CHAT]: {
        "model": "it",
        "messages": [
            {"role": "system", "content": "Be brief."},
            user("hello"),
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "calculator", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "4"}]},
        ],
        "tools": [CALCULATOR],
        "tool_choice": "auto",
        "temperature": 0.5,
        "max_tokens": 5,
        "stop": ["x"],
        "stream": False,
        "seed": 3,
    },
    PATHS[Api.MESSAGES]: {
        "model": "it",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            user("hello"),
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c", "name": "calculator", "input": {"a": 1}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "4"}]},
        ],
        "tools": [{"name": "calculator", "description": "d", "input_schema": {"type": "object"}}],
        "thinking": {"type": "adaptive"},
        "stream": True,
    },
    PATHS[Api.RESPONSES]: {
        "model": "it",
        "instructions": "Be brief.",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
            {"type": "function_call", "call_id": "c", "name": "calculator", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "4"},
        ],
        "tools": [{"type": "function", "name": "calculator", "parameters": {"type": "object"}}],
        "reasoning": {"effort": "low"},
        "max_output_tokens": 5,
        "stream": True,
    },
    PATHS[Api.GEMINI]: {
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "contents": [
            {"role": "user", "parts": [{"text": "hello"}, {"inlineData": {"mimeType": "image/png", "data": "AAAA"}}]},
            {
                "role": "model",
                "parts": [
                    {"text": "hm", "thought": True},
                    {"functionCall": {"name": "calculator", "args": {"a": 1}}, "thoughtSignature": "c2ln"},
                ],
            },
            {"role": "user", "parts": [{"functionResponse": {"name": "calculator", "response": {"output": "4"}}}]},
        ],
        "tools": [{"functionDeclarations": [{"name": "calculator", "parameters": {"type": "OBJECT"}}]}],
        "toolConfig": {"functionCallingConfig": {"mode": "AUTO", "allowedFunctionNames": ["calculator"]}},
        "generationConfig": {
            "maxOutputTokens": 5,
            "stopSequences": ["x"],
            "responseMimeType": "application/json",
            "responseSchema": {"type": "STRING", "nullable": True},
            "thinkingConfig": {"thinkingBudget": 0},
        },
    },
    COUNTING[Api.MESSAGES]: {"model": "it", "messages": [user("hello")], "system": "Be brief."},
    COUNTING[Api.RESPONSES]: {"input": "hello", "instructions": "Be brief.", "previous_response_id": "x"},
    COUNTING[Api.GEMINI]: {"generateContentRequest": {"contents": [{"parts": [{"text": "hello"}]}]}},
    "/sessions": {
        "task_id": "t",
        "task": {"a": [1]},
        "step": 1,
        "attempt": 1,
        "source": "s",
        "tags": ["x"],
        "extra": {"a": 1},
        "sampling": {"temperature": 1.0, "stop": ["x"]},
        "forced": {"top_k": 5},
        "max_turns": 3,
        "allowed_tools": ["calculator"],
        "denied_tools": [],
        "thinking": True,
        "new_try": True,
    },
    "/sessions/{}/finish": {
        "reward": 1,
        "reward_terms": {"a": 0.5},
        "stop_reason": "completed",
        "reason": "done",
        "policy": "exact",
        "samples": True,
        "drain_s": 1.5,
    },
    "/weights": {"version": "v7"},
    "/weights/resume": {"version": "v8"},
}
PATHS_OF_AGENTS = (*PATHS.values(), *COUNTING.values())
Send = Callable[[str, bytes], Awaitable[None]]


@asynccontextmanager
async def sending(run: Path) -> AsyncIterator[Send]:
    async with rig(run, lambda _: "ok") as it:
        opened = await it.open(task_id="fuzzed")

        async def send(path: str, body: bytes) -> None:
            if path in PATHS_OF_AGENTS:
                answer = await it.call("POST", f"/s/{opened['key']}{path}", body)
            else:
                ended = (await it.open(new_try=True))["session"]
                answer = await it.call("POST", path.format(ended), body)
                await it.call("DELETE", f"/sessions/{ended}")
            assert answer.status in (200, 400), (path, body, answer.raw)
            assert answer.status == 200 or answer.error

        yield send
        await _still_there(it)


async def _still_there(it: Rig) -> None:
    assert (await it.ask(await it.open(task_id="after"), "hello")).status == 200


@contextmanager
def without_tracebacks(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.WARNING)
    yield
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("path", BODIES)
def test_broken_bodies_are_answered(path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def tried() -> None:
        async with sending(tmp_path / "run") as send:
            loop = asyncio.get_running_loop()
            await send(path, json.dumps(BODIES[path]).encode())
            await loop.run_in_executor(None, _hypothesized, lambda body: _sent(loop, send, path, body), BODIES[path])

    with without_tracebacks(caplog):
        asyncio.run(tried())


def _sent(loop: asyncio.AbstractEventLoop, send: Send, path: str, body: bytes) -> None:
    asyncio.run_coroutine_threadsafe(_awaited(send(path, body)), loop).result(30)


async def _awaited(what: Awaitable[None]) -> None:
    await what


def _hypothesized(send: Callable[[bytes], None], body: dict[str, Any]) -> None:
    @settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(broken(body) | st.binary(max_size=40))
    def sent(raw: bytes) -> None:
        send(raw)

    sent()

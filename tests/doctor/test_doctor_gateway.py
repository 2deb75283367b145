"""Gateways from the agent's side: Rolltape's own, and one with every answer a little wrong."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

import rolltape
from rolltape.doctor import CheckResult, Severity, check_gateway
from rolltape.doctor.agent.scripted_model import ScriptedModel
from rolltape.gateway.request import ChatRequest
from rolltape.tiny import shipped_model
from served_gateways import free_port


async def checked(url: str, key: str | None) -> dict[str, CheckResult]:
    return {one.check: one async for one in check_gateway(url, key=key)}


async def test_rolltapes_own_gateway_is_as_agents_need_it(tmp_path: Path) -> None:
    async with rolltape.Gateway(engine="tiny", tape=tmp_path / "run") as gateway:
        session = await gateway.open_session(task_id="t")
        results = await checked(gateway.url, session.key)
    assert {one.verdict for one in results.values()} <= {Severity.OK, Severity.NOTE}
    assert results["apis"].figures["served"] == ["chat", "messages", "responses"]
    assert results["history"].verdict is Severity.OK
    assert results["logprobs"].verdict is Severity.OK


class CallingModel(ScriptedModel):
    """Calls a tool whenever a user asks, and ends once there is a result."""

    def _reply(self, request: ChatRequest) -> Any:
        self.replies = 0 if request.messages[-1]["role"] == "user" else 3
        return super()._reply(request)


async def test_calls_and_their_results_go_through_every_api(tmp_path: Path) -> None:
    model = CallingModel()
    async with rolltape.Gateway(engine=model, model=shipped_model(), tape=tmp_path / "run") as gateway:
        model.prompts = gateway.service.prompts
        session = await gateway.open_session(task_id="t")
        results = await checked(f"{gateway.url}/v1/", session.key)
    assert results["tool calls"].verdict is Severity.OK
    assert results["tool calls"].measured == "a required call, and a reply to its result: chat, messages, responses"


async def test_a_gateway_that_refuses_the_key_is_a_fault_with_its_own_words(tmp_path: Path) -> None:
    async with rolltape.Gateway(engine="tiny", tape=tmp_path / "run") as gateway:
        results = await checked(gateway.url, "wrong")
    assert list(results) == ["apis"]
    assert results["apis"].verdict is Severity.FAULT
    assert "401" in results["apis"].measured


async def test_no_gateway_is_a_fault() -> None:
    results = await checked("http://127.0.0.1:9", None)
    assert [(one.check, one.verdict) for one in results.values()] == [("apis", Severity.FAULT)]


@pytest.mark.slow
async def test_another_real_gateway_is_held_to_the_same_list(tmp_path: Path) -> None:
    """rLLM's, before Rolltape's own in the place of its engine: it keeps the token ids for itself."""
    async with rolltape.Gateway(engine="tiny", tape=tmp_path / "run", open=True) as engine:
        port = free_port()
        command = [sys.executable, "-m", "rllm_model_gateway", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--worker", f"{engine.url}/v1", "--db-path", str(tmp_path / "traces.db"), "--log-level", "ERROR"]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
        try:
            opened = await post_until_answered(f"http://127.0.0.1:{port}/sessions")
            results = await checked(f"http://127.0.0.1:{port}{opened['url']}", None)
        finally:
            process.kill()
            await process.wait()
    assert {one.verdict for one in results.values()} == {Severity.OK, Severity.NOTE}
    assert results["apis"].figures["served"] == ["chat", "messages", "responses"]
    assert results["history"].measured.startswith("token ids are not returned; the second prompt has")


async def post_until_answered(url: str) -> dict[str, Any]:
    """The answer of a server that is starting."""
    async with asyncio.timeout(60), aiohttp.ClientSession() as http:
        while True:
            try:
                async with http.post(url, json={}) as response:
                    answer: dict[str, Any] = await response.json()
                    return answer
            except aiohttp.ClientError:
                await asyncio.sleep(0.2)


class Sloppy:
    """Chat Completions alone, and each thing in it wrong that agents have stumbled over."""

    def __init__(self, *, wrong: str) -> None:
        self._wrong = wrong
        self._numbers = count()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        try:
            body: dict[str, Any] = json.loads(await request.read())
            messages = body["messages"]
        except (ValueError, KeyError):
            if self._wrong == "errors":
                return web.Response(status=500, text="oops")
            return web.json_response({"error": {"message": "bad request"}}, status=400)
        if self._wrong != "keys" and request.headers["Authorization"] != "Bearer right":
            return web.json_response({"error": {"message": "who are you?"}}, status=401)
        if body.get("stream"):
            return await self._stream(request)
        reply: dict[str, Any] = {"role": "assistant", "content": "42"}
        if body.get("tools") and messages[-1]["role"] == "user":
            arguments = '{"a": 23' if self._wrong == "tool calls" else '{"a": 23, "b": 19}'
            call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
            reply = {"role": "assistant", "content": None, "tool_calls": [call]}
        given = 1 if self._wrong == "logprobs" else 2
        choice: dict[str, Any] = {"index": 0, "message": reply, "finish_reason": "stop"}
        choice["logprobs"] = {"content": [{"token": "4", "logprob": -0.1}] * given} if body.get("logprobs") else None
        ids: dict[str, Any] = {}
        if body.get("return_token_ids"):
            ids, choice["token_ids"] = {"prompt_token_ids": self._prompt(len(messages))}, [5, 6]
        if self._wrong == "hangs" and len(messages) > 1:
            await asyncio.Event().wait()
        number = 0 if self._wrong == "reply ids" else next(self._numbers)
        usage = {"prompt_tokens": len(self._prompt(len(messages))), "completion_tokens": 2}
        return web.json_response({"id": f"r-{number}", "choices": [choice], "usage": usage, **ids})

    def _prompt(self, messages: int) -> list[int]:
        """One user message is [1, 2]; a reply and another message after it are what was sampled, and [1, 2]."""
        again = [5, 7] if self._wrong == "history" else [5, 6]
        return [1, 2] if messages == 1 else [1, 2, *again, 1, 2]

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in ("4", "2"):
            event = {"id": "r", "choices": [{"index": 0, "delta": {"content": part}}]}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        if self._wrong == "long line":
            event = {"id": "r", "choices": [{"index": 0, "delta": {"content": "x" * 2**21}}]}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        if self._wrong != "streaming":
            await response.write(b"data: [DONE]\n\n")
        return response

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_get("/v1/models", self.models)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        await runner.cleanup()


async def test_a_gateway_that_stops_answering_is_asked_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolltape.doctor.gateway.apis.TIMEOUT_S", 0.5)
    async with Sloppy(wrong="hangs").listening() as url:
        results = await checked(url, "right")
    assert list(results) == ["apis", "reply ids"]
    assert results["reply ids"].verdict is Severity.FAULT
    assert "no answer in" in results["reply ids"].measured


async def test_a_stream_with_an_event_of_two_megabytes_is_read() -> None:
    async with Sloppy(wrong="long line").listening() as url:
        results = await checked(url, "right")
    assert results["streaming"].verdict is Severity.OK
    assert results["streaming"].measured.startswith("chat 3 pieces")


@pytest.mark.parametrize("wrong", ["", "reply ids", "streaming", "tool calls", "history", "logprobs", "errors", "keys"])
async def test_each_thing_that_is_wrong_with_another_gateway_is_named(wrong: str) -> None:
    async with Sloppy(wrong=wrong).listening() as url:
        results = await checked(url, "right")
    bad = [one.check for one in results.values() if one.verdict in (Severity.WARNING, Severity.FAULT)]
    assert bad == ([wrong] if wrong else [])
    assert results["apis"].figures["served"] == ["chat"]

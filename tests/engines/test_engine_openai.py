"""A chat endpoint that takes and gives text alone."""

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

import rolltape
from rolltape.doctor.engine.probing import generation
from rolltape.errors import EngineError, EngineFault, EngineUnreachable
from rolltape.gateway.engines.http import proxy_for
from rolltape.gateway.engines.openai_text import OpenAITextEngine
from rolltape.gateway.engines.protocol import Engine, Generated, Generation
from rolltape.gateway.request import ToolChoice
from rolltape.records.turn import Finish
from rolltape.tiny import shipped_model

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]


class Endpoint:
    """Remembers what it is asked; answers with one message, or hangs."""

    def __init__(
        self, message: dict[str, Any], finish: str = "stop", *, hangs: bool = False, tells_key: bool = False
    ) -> None:
        self.message, self.finish, self.hangs, self.tells_key = message, finish, hangs, tells_key
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.hosts: list[str] = []

    async def chat(self, request: web.Request) -> web.Response:
        self.bodies.append(json.loads(await request.read()))
        self.keys.append(request.headers.get("Authorization"))
        self.hosts.append(request.host)
        if self.hangs:
            await asyncio.Event().wait()
        if self.tells_key:
            return web.json_response({"error": {"message": f"{self.keys[-1]} is no good key"}}, status=401)
        choice = {"index": 0, "message": self.message, "finish_reason": self.finish}
        usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
        return web.json_response({"id": "chatcmpl-1", "model": "it-2026", "choices": [choice], "usage": usage})


@contextlib.asynccontextmanager
async def reaching(endpoint: Endpoint, **settings: Any) -> AsyncIterator[OpenAITextEngine]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", endpoint.chat)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine = OpenAITextEngine(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", **settings)
    try:
        yield engine
    finally:
        await engine.close()
        await runner.cleanup()


@pytest.fixture
def unset_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.mark.usefixtures("unset_proxies")
@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy"])
async def test_an_endpoint_is_reached_through_the_proxy_that_the_environment_names(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = Endpoint({"role": "assistant", "content": "Hi."})
    async with reaching(proxy) as direct:
        monkeypatch.setenv(name, direct.name.removeprefix("openai http://").removesuffix("/v1"))
        engine = OpenAITextEngine("http://endpoint.invalid/v1", api_key="k")
        given = await engine.generate(generation([], messages=MESSAGES))
        await engine.close()
    assert given.message == {"role": "assistant", "content": "Hi."}
    assert proxy.hosts == ["endpoint.invalid"]
    assert proxy.keys == ["Bearer k"]


@pytest.mark.usefixtures("unset_proxies")
async def test_an_https_proxy_is_asked_for_a_tunnel_with_its_own_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    heads: list[bytes] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        monkeypatch.setenv("HTTPS_PROXY", f"http://me:word@127.0.0.1:{port}")
        engine = OpenAITextEngine("https://endpoint.invalid/v1", api_key="k")
        with pytest.raises(EngineFault) as refused:
            await engine.generate(generation([], messages=MESSAGES))
        await engine.close()
    (head,) = heads
    assert head.startswith(b"CONNECT endpoint.invalid:443 ")
    assert b"Proxy-Authorization: Basic bWU6d29yZA==" in head
    assert b"Bearer k" not in head
    assert "word" not in str(refused.value)


@pytest.mark.usefixtures("unset_proxies")
async def test_loopback_and_hosts_of_no_proxy_are_reached_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "inside.example")
    async with reaching(Endpoint({"role": "assistant", "content": "Hi."})) as engine:
        assert (await engine.generate(generation([], messages=MESSAGES))).message is not None
    urls = ["http://localhost:1/v1", "http://[::1]/v1", "http://a.inside.example/v1", "https://outside.example/v1"]
    assert [proxy_for(url) for url in urls] == [None] * 4
    assert proxy_for("http://outside.example/v1") == "http://127.0.0.1:9"


@pytest.mark.usefixtures("unset_proxies")
def test_a_proxy_of_another_kind_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "socks5://me:word@127.0.0.1:9")
    with pytest.raises(EngineError, match="HTTPS_PROXY names a socks5 proxy, and only http is supported"):
        OpenAITextEngine("https://endpoint.invalid/v1")


def with_ask(wanted: Generation, **changes: Any) -> Generation:
    return msgspec.structs.replace(wanted, request=msgspec.structs.replace(wanted.request, **changes))


async def test_a_message_comes_back_and_no_ids() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "run", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call], "refusal": None}
    async with reaching(Endpoint(message, "tool_calls")) as reached:
        engine: Engine = reached
        given: Generated = await engine.generate(generation([], messages=MESSAGES, tools=TOOLS))
    assert given.message == {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]}
    assert (len(given.ids), given.logprobs, given.finish, given.cached_tokens) == (0, None, Finish.STOP, 4)
    assert not engine.token_faithful


async def test_the_request_is_passed_on_with_what_the_endpoint_can_know() -> None:
    endpoint = Endpoint({"role": "assistant", "content": "hi"})
    echoed: dict[str, Any] = {
        "role": "assistant",
        "content": "",
        "thinking_blocks": [{"signature": "s"}],
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "run", "arguments": "{}"}, "odd": 1}],
    }
    messages = [*MESSAGES, echoed, {"role": "tool", "tool_call_id": "c", "content": "done"}]
    async with reaching(endpoint) as engine:
        wanted = generation([], messages=messages, tools=TOOLS, temperature=0.5, top_k=5, stop=("END",), max_tokens=7)
        await engine.generate(with_ask(wanted, tool_choice=ToolChoice("required", "run"), parallel_tool_calls=False))
    (body,) = endpoint.bodies
    call = {"id": "c", "type": "function", "function": {"name": "run", "arguments": "{}"}}
    assert body == {
        "model": "it",
        "messages": [
            *MESSAGES,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "done"},
        ],
        "temperature": 0.5,
        "max_tokens": 7,
        "stop": ["END"],
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "run"}},
        "parallel_tool_calls": False,
    }
    assert "top_k" not in engine.applies


async def test_what_nobody_decided_is_left_to_the_endpoint() -> None:
    endpoint = Endpoint({"role": "assistant", "content": "hi"})
    async with reaching(endpoint) as engine:
        await engine.generate(generation([], messages=MESSAGES))
    assert endpoint.bodies == [{"model": "it", "messages": MESSAGES}]


PNG = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
CUSTOM = {"type": "custom", "custom": {"name": "patch", "format": {"type": "text"}}}
RAW: dict[str, Any] = {
    "model": "theirs",
    "messages": [{"role": "user", "content": [PNG], "odd": 1}],
    "tools": [TOOLS[0], CUSTOM],
    "tool_choice": "auto",
    "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": {}}},
    "reasoning_effort": "low",
    "max_completion_tokens": 9,
    "logit_bias": {"5": -100},
    "some_field_of_tomorrow": {"a": [1]},
    "stream": True,
    "stream_options": {"include_usage": True},
}
PASSED_ON = {name: value for name, value in RAW.items() if name not in ("stream", "stream_options")}


def names(*tools: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name}} for name in tools]


async def test_a_chat_body_is_passed_on_as_it_came() -> None:
    endpoint = Endpoint({"role": "assistant", "content": "hi"})
    async with reaching(endpoint) as engine:
        wanted = generation([], messages=[{"role": "user", "content": "[image]"}], tools=names("run", "patch"))
        wanted = with_ask(wanted, raw=RAW, model="theirs")
        await engine.generate(wanted)
    assert endpoint.bodies == [PASSED_ON]


async def test_what_the_owner_decided_goes_before_what_came() -> None:
    endpoint = Endpoint({"role": "assistant", "content": "hi"})
    async with reaching(endpoint, model="ours") as engine:
        wanted = generation([], tools=names("patch"), temperature=0.5, max_tokens=7)
        await engine.generate(with_ask(wanted, raw=RAW))
        await engine.generate(with_ask(generation([], name="g-2"), raw=RAW))
    first, second = endpoint.bodies
    decided = {"model": "ours", "temperature": 0.5, "max_completion_tokens": 7}
    assert first == {**PASSED_ON, "tools": [CUSTOM], **decided}
    without = {name: value for name, value in PASSED_ON.items() if name not in ("tools", "tool_choice")}
    assert second == {**without, "model": "ours"}


async def test_what_the_endpoint_says_beside_the_message_is_kept() -> None:
    message = {"role": "assistant", "content": None, "refusal": "I cannot."}
    async with reaching(Endpoint(message, "content_filter")) as engine:
        given = await engine.generate(with_ask(generation([], messages=MESSAGES), raw=RAW))
    assert given.finish is Finish.STOP
    assert given.message == message
    assert given.upstream == {
        "id": "chatcmpl-1",
        "model": "it-2026",
        "usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}},
        "finish_reason": "content_filter",
    }


async def test_the_model_can_be_set() -> None:
    endpoint = Endpoint({"role": "assistant", "content": "hi"})
    async with reaching(endpoint, model="gpt") as engine:
        await engine.generate(generation([], messages=MESSAGES, max_tokens=7))
        assert (await engine.facts()).model == "gpt"
    assert endpoint.bodies == [{"model": "gpt", "messages": MESSAGES, "max_tokens": 7}]


async def test_the_key_is_sent_and_never_told(caplog: pytest.LogCaptureFixture) -> None:
    endpoint = Endpoint({}, tells_key=True)
    caplog.set_level(logging.DEBUG)
    async with reaching(endpoint, api_key="sk-secret") as engine:
        with pytest.raises(EngineFault, match="is no good key") as caught:
            await engine.generate(generation([], messages=MESSAGES))
    assert endpoint.keys == ["Bearer sk-secret"]
    assert "sk-secret" not in caplog.text + str(caught.value) + repr(engine) + engine.name


async def test_a_reply_that_broke_off_is_no_reply() -> None:
    async with reaching(Endpoint({"role": "assistant", "content": "hi"}, "abort")) as engine:
        with pytest.raises(EngineFault, match="'abort'") as caught:
            await engine.generate(generation([], messages=MESSAGES))
    assert caught.value.status == 503


@pytest.mark.parametrize(
    ("word", "finish"),
    [("eos", Finish.STOP), ("function_call", Finish.STOP), ("length", Finish.LENGTH), ("MAX_TOKENS", Finish.LENGTH)],
)
async def test_reasons_of_other_apis_are_understood_and_kept(word: str, finish: Finish) -> None:
    async with reaching(Endpoint({"role": "assistant", "content": "hi"}, word)) as engine:
        given = await engine.generate(generation([], messages=MESSAGES))
    assert (given.finish, given.upstream["finish_reason"]) == (finish, word)


async def test_abort_and_an_endpoint_that_is_not_there() -> None:
    async with reaching(Endpoint({}, hangs=True)) as engine:
        task = asyncio.create_task(engine.generate(generation([], messages=MESSAGES)))
        await asyncio.sleep(0.1)
        await engine.abort("g-1")
        given = await task
        assert (given.finish, given.message) == (Finish.ABORT, {"role": "assistant", "content": ""})
    with pytest.raises(EngineUnreachable):
        await OpenAITextEngine("http://127.0.0.1:9/v1").facts()


async def test_through_the_gateway_only_what_was_decided_is_sent_and_the_turn_says_what_the_endpoint_said(
    tmp_path: Path,
) -> None:
    endpoint = Endpoint({"role": "assistant", "content": "hi"})
    async with (
        reaching(endpoint) as engine,
        rolltape.Gateway(engine=engine, model=shipped_model(), tape=tmp_path / "run") as gateway,
        aiohttp.ClientSession() as http,
    ):
        for forced in ({}, {"max_tokens": 50, "temperature": 0.3}):
            session = await gateway.open_session(task_id=str(forced), forced=forced)
            body = {"model": "it", "messages": MESSAGES, "top_p": 0.9}
            headers = {"Authorization": f"Bearer {session.key}"}
            url = f"{session.openai_base_url}/chat/completions"
            async with http.post(url, json=body, headers=headers) as response:
                assert response.status == 200, await response.text()
    plain, forced_body = (
        {key: body.get(key) for key in ("top_p", "temperature", "max_tokens")} for body in endpoint.bodies
    )
    assert plain == {"top_p": 0.9, "temperature": None, "max_tokens": None}
    assert forced_body == {"top_p": 0.9, "temperature": 0.3, "max_tokens": 50}
    turns = [turn for rollout in rolltape.read(tmp_path / "run").rollouts() for turn in rollout.turns]
    assert [turn.facts.extra["upstream"]["model"] for turn in turns] == ["it-2026"] * 2
    assert turns[0].facts.extra["upstream"]["usage"]["completion_tokens"] == 2

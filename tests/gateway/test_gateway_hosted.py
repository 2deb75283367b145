"""A hosted endpoint behind the gateway: what the agent sent goes on as it came, and what came back is kept."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web

import rolltape
from gateways import (
    CALCULATOR,
    PATHS,
    QUICK,
    Api,
    Rig,
    body_of,
    eventually,
    rig,
    said_finish,
    scripted,
    streamed_text_of,
    text_of,
    user,
)
from rolltape.gateway.gateway import Gateway
from rolltape.records.turn import Delivery, TurnFlag
from rolltape.tree import tree_of
from scripted_engine import Json

USAGE = {
    "prompt_tokens": 1234,
    "completion_tokens": 77,
    "prompt_tokens_details": {"cached_tokens": 1000},
    "completion_tokens_details": {"reasoning_tokens": 50},
}


class Endpoint:
    """An OpenAI-compatible endpoint that answers as it is told, and keeps what it was asked."""

    def __init__(self, **answer: Any) -> None:
        self.answer = {"message": {"role": "assistant", "content": "Hi."}, "finish_reason": "stop"} | answer
        self.more: Json = {}
        self.status, self.headers = 200, dict[str, str]()
        self.body: Json | bytes | None = None  # all of the answer; None: it is made of the above
        self.bodies: list[Json] = []

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": []})

    async def chat(self, request: web.Request) -> web.Response:
        self.bodies.append(json.loads(await request.read()))
        choice = {"index": 0, **self.answer}
        made = {"id": "c1", "model": "gpt-9-2026", "choices": [choice], "usage": USAGE, **self.more}
        body = made if self.body is None else self.body
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return web.Response(status=self.status, body=raw, content_type="application/json", headers=self.headers)


@asynccontextmanager
async def hosted(run: Path, endpoint: Endpoint, **settings: Any) -> AsyncIterator[Rig]:
    """A gateway before an endpoint; there is no tokenizer."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", endpoint.chat)
    app.router.add_get("/v1/models", endpoint.models)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    settings.setdefault("patience", QUICK)
    url = f"openai:http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        async with Gateway(engine=url, tape=run, **settings) as gateway, aiohttp.ClientSession() as http:
            yield Rig(gateway, scripted(()), run, http)
    finally:
        await runner.cleanup()


async def test_a_body_goes_on_as_it_came_and_nothing_is_put_into_it(run: Path) -> None:
    endpoint = Endpoint()
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    body = {
        "model": "gpt-9",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]}],
        "reasoning_effort": "high",
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
        "logit_bias": {"5": 1},
        "anything": {"new": [1, None]},
    }
    async with hosted(run, endpoint) as it:
        opened = await it.open()
        answer = await it.call("POST", f"/s/{opened['key']}/v1/chat/completions", body)
        assert answer.status == 200
        assert "x-rolltape-ignored-params" not in answer.headers
        await it.finish(opened, reward=1.0, samples=False)
    assert endpoint.bodies == [body]
    (turn,) = it.turns()
    assert TurnFlag.NOT_TOKEN_FAITHFUL in turn.facts.flags
    assert TurnFlag.MEDIA_LEFT_OUT not in turn.facts.flags
    assert "ignored_params" not in turn.facts.extra


async def test_a_retry_is_the_same_in_every_field_that_the_endpoint_gets(run: Path) -> None:
    endpoint = Endpoint()
    async with hosted(run, endpoint) as it:
        opened = await it.open()
        first = await it.ask(opened, "hello", logit_bias={"5": 1}, plugins=[])
        again = await it.ask(opened, "hello", retry=1, plugins=[], logit_bias={"5": 1}, stream=True)
        assert len(endpoint.bodies) == 1
        assert {event["id"] for event in again.events} == {first.json["id"]}
        others: list[Json] = [{"logit_bias": {"5": 2}, "plugins": []}, {"logit_bias": {"5": 1}, "plugins": ["web"]}]
        for fields in others:
            await it.ask(opened, "hello", retry=1, **fields)
            assert fields.items() <= endpoint.bodies[-1].items()
    assert len(it.turns()) == len(endpoint.bodies) == 3


@pytest.mark.parametrize(
    ("api", "figures"),
    [
        (Api.CHAT, ['"prompt_tokens":1234', '"completion_tokens":77', '"reasoning_tokens":50', '"model":"gpt-9-2026"']),
        (Api.RESPONSES, ['"input_tokens":1234', '"output_tokens":77', '"reasoning_tokens":50', '"model":"gpt-9-2026"']),
        (Api.MESSAGES, ['"cache_read_input_tokens":1000', '"input_tokens":234', '"output_tokens":77']),
        (Api.GEMINI, ['"promptTokenCount":1234', '"candidatesTokenCount":27', '"modelVersion":"gpt-9-2026"']),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_model_and_usage_are_the_endpoints_own(run: Path, api: Api, figures: list[str], stream: bool) -> None:
    asked: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream and api is Api.CHAT else {}
    async with hosted(run, Endpoint()) as it:
        answer = await it.ask(await it.open(), "hello", api, stream=stream, **asked)
        assert [figure for figure in figures if figure.encode() not in answer.raw] == []
    (turn,) = it.turns()
    assert turn.facts.extra["upstream"]["usage"] == USAGE
    assert turn.facts.extra["upstream"]["model"] == "gpt-9-2026"


@pytest.mark.parametrize(
    ("api", "word"),
    [(Api.CHAT, "content_filter"), (Api.MESSAGES, "refusal"), (Api.RESPONSES, "incomplete"), (Api.GEMINI, "SAFETY")],
)
async def test_a_content_filter_is_said_in_each_apis_words(run: Path, api: Api, word: str) -> None:
    async with hosted(run, Endpoint(finish_reason="content_filter")) as it:
        answer = await it.ask(await it.open(), "hello", api)
        assert said_finish(api, answer) == word


async def test_a_conversation_with_calls_is_recorded_and_exported_as_messages(run: Path) -> None:
    call = {"id": "theirs", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "1"}'}}
    endpoint = Endpoint(
        message={"role": "assistant", "content": None, "tool_calls": [call]}, finish_reason="tool_calls"
    )
    async with hosted(run, endpoint) as it:
        opened = await it.open()
        first = (await it.ask(opened, "hello", tools=[CALCULATOR])).json["choices"][0]["message"]
        endpoint.answer = {"message": {"role": "assistant", "content": "It is 1."}, "finish_reason": "stop"}
        result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "1"}
        await it.ask(opened, [user("hello"), first, result], tools=[CALCULATOR])
        await it.finish(opened, reward=1.0, samples=False)
    (rollout,) = rolltape.read(run).rollouts()
    assert [len(turn.prompt_messages) for turn in rollout.turns] == [1, 3]
    assert not list(rolltape.linearize(rollout, "exact").samples())


async def test_ids_and_logprobs_that_an_endpoint_gives_are_recorded_and_train(run: Path) -> None:
    """As vLLM's server does for a request with `return_token_ids` and `logprobs`."""
    content = [{"token": "a", "logprob": -0.25, "bytes": None, "top_logprobs": []}, {"token": "b", "logprob": -1.5}]
    endpoint = Endpoint(token_ids=[7, 8], logprobs={"content": content})
    endpoint.more = {"prompt_token_ids": [1, 2, 3]}
    async with hosted(run, endpoint) as it:
        opened = await it.open()
        told = await it.ask(opened, "hello", return_token_ids=True, logprobs=True)
        other = await it.open(task_id="u")
        streamed = await it.ask(other, "hello", return_token_ids=True, logprobs=True, stream=True)
        endpoint.more = {"prompt_token_ids": [1, 2, 3, 7, 8, 4]}
        endpoint.answer["token_ids"] = [9, 10]
        said = {"role": "assistant", "content": "Hi."}
        await it.ask(opened, [user("hello"), said, user("go on")], return_token_ids=True, logprobs=True)
        await it.finish(opened, reward=1.0, samples=False)
    for answer in (told, streamed):
        assert "x-rolltape-ignored-params" not in answer.headers
        choices = [choice for event in answer.events for choice in event["choices"]]
        assert [one for event in answer.events for one in event.get("prompt_token_ids", ())] == [1, 2, 3]
        assert [one for choice in choices for one in choice.get("token_ids", ())] == [7, 8]
        logprobs = [one for choice in choices for one in (choice["logprobs"] or {}).get("content", ())]
        assert [(one["token"], one["logprob"], one["bytes"]) for one in logprobs] == [
            ("token_id:7", -0.25, None),
            ("token_id:8", -1.5, None),
        ]
    rollout = rolltape.read(run).rollout(opened["rollout"])
    (sample,) = rolltape.linearize(rollout, "exact").samples()
    assert sample.ids.tolist() == [1, 2, 3, 7, 8, 4, 9, 10]
    assert sample.trained_mask.tolist() == [False] * 3 + [True] * 2 + [False] + [True] * 2
    assert np.array_equal(sample.logprobs[sample.trained_mask], [-0.25, -1.5, -0.25, -1.5])


async def test_who_asks_an_endpoint_of_text_for_ids_is_told_that_there_are_none(run: Path) -> None:
    async with hosted(run, Endpoint()) as it:
        opened = await it.open()
        answer = await it.ask(opened, "hello", return_token_ids=True, logprobs=True)
        refused = [
            await it.call("POST", f"/s/{opened['key']}{path}", {"model": "it", **body})
            for path, body in (
                ("/v1/completions", {"prompt": [1, 2]}),
                ("/tokenize", {"prompt": "hello"}),
                ("/tokenize", {"messages": [user("hello")]}),
                ("/detokenize", {"tokens": [1]}),
                ("/v1/messages/count_tokens", body_of(Api.MESSAGES, "hello")),
                ("/v1/responses/input_tokens", body_of(Api.RESPONSES, "hello")),
                ("/v1beta/models/it:countTokens", body_of(Api.GEMINI, "hello")),
            )
        ]
    assert b"token_ids" not in answer.raw
    assert answer.headers["x-rolltape-ignored-params"] == "token ids and logprobs: the engine returns only text"
    assert [one.status for one in refused] == [400] * 7
    assert all("accepts only messages" in one.error for one in refused)


def refusing(status: int, message: str, code: str | None = None, **headers: str) -> Endpoint:
    endpoint = Endpoint()
    endpoint.status, endpoint.headers = status, headers
    endpoint.body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    return endpoint


@pytest.mark.parametrize("api", Api)
@pytest.mark.parametrize("status", [400, 404, 413, 422])
async def test_what_an_endpoint_refuses_is_refused_in_its_words_and_is_final(run: Path, api: Api, status: int) -> None:
    endpoint = refusing(status, "logit_bias: no such token; see https://internal:8000/x, sk-abcdef123456", "bad_bias")
    async with hosted(run, endpoint) as it:
        answer = await it.ask(await it.open(), "hello", api)
    assert (answer.status, answer.headers["x-should-retry"]) == (status, "false")
    assert answer.error == "logit_bias: no such token; see …, …"
    assert len(endpoint.bodies) == 1
    if api in (Api.CHAT, Api.RESPONSES):
        assert answer.json["error"]["code"] == "bad_bias"
    (turn,) = it.turns()
    assert turn.facts.error is not None
    assert f"answered {status}: logit_bias" in turn.facts.error


@pytest.mark.parametrize("api", Api)
async def test_a_refusal_within_a_stream_is_told_in_the_endpoints_words(run: Path, api: Api) -> None:
    async with hosted(run, refusing(400, "too many tokens", "context_length_exceeded")) as it:
        answer = await it.ask(await it.open(), "hello", api, stream=True)
    assert "prompt is too long: too many tokens" in json.dumps(answer.events[-1])
    if api in (Api.CHAT, Api.RESPONSES):
        assert '"code": "context_length_exceeded"' in json.dumps(answer.events[-1])


@pytest.mark.parametrize(
    ("status", "message", "code"),
    [
        (400, "Too long.", "context_length_exceeded"),
        (400, "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens.", None),
        (400, "the request exceeds the available context size, try increasing it", "exceed_context_size_error"),
        (400, "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576).", None),
        (413, "prompt is too long: 210000 tokens > 200000 maximum", None),
    ],
)
async def test_a_prompt_that_is_too_long_for_the_endpoint_is_the_policys_own_doing(
    run: Path, status: int, message: str, code: str | None
) -> None:
    endpoint = refusing(status, message, code)
    async with hosted(run, endpoint) as it:
        opened = await it.open()
        answer = await it.ask(opened, "hello")
        session = it.gateway.service.sessions.of_id(opened["session"])
        assert (session.overflowed, session.failure) == (True, None)
        endpoint.status, endpoint.body = 200, None
        await it.ask(opened, "less")
        assert not session.overflowed
    assert (answer.status, answer.json["error"]["code"]) == (status, "context_length_exceeded")
    assert answer.error.startswith("prompt is too long: ")


@pytest.mark.parametrize("api", Api)
async def test_a_busy_endpoint_s_429_and_its_retry_after_reach_the_agent(run: Path, api: Api) -> None:
    async with hosted(run, refusing(429, "slow down", **{"Retry-After": "30"})) as it:
        opened = await it.open()
        answer = await it.ask(opened, "hello", api)
        session = it.gateway.service.sessions.of_id(opened["session"])
        assert session.failure is not None
    assert (answer.status, answer.headers["Retry-After"]) == (429, "30")
    assert "x-should-retry" not in answer.headers
    assert answer.error == "the endpoint is busy: slow down"


@pytest.mark.parametrize("status", [401, 402, 403])
async def test_the_gateways_own_key_is_not_the_agents_and_a_retry_does_not_help(run: Path, status: int) -> None:
    endpoint = refusing(status, "Incorrect API key provided")
    async with hosted(run, endpoint) as it:
        opened = await it.open()
        answer = await it.ask(opened, "hello")
        assert it.gateway.service.sessions.of_id(opened["session"]).failure is not None
    assert (answer.status, answer.headers["x-should-retry"]) == (502, "false")
    assert "provided" not in answer.error
    (turn,) = it.turns()
    assert f"answered {status}: Incorrect API key provided" in (turn.facts.error or "")


async def test_an_error_in_an_answer_of_status_200_is_an_error(run: Path) -> None:
    endpoint = Endpoint()
    endpoint.body = {"error": {"message": "no such parameter", "code": 400}}
    async with hosted(run, endpoint) as it:
        answer = await it.ask(await it.open(), "hello")
    assert (answer.status, answer.error) == (400, "no such parameter")


def calling(**call: Any) -> Json:
    return {"message": {"role": "assistant", "content": None, "tool_calls": [{"id": "1", **call}]}}


def saying(**fields: Any) -> Json:
    return {"message": {"role": "assistant", **fields}}


PATCH = {"type": "custom", "custom": {"name": "patch"}}
# What an endpoint answers, and what the agent gets: text, reasoning, and calls with their arguments.
ODD: dict[str, tuple[Json, tuple[str | None, str | None, list[tuple[str, str]]]]] = {
    "arguments as an object": (
        calling(type="function", function={"name": "calculator", "arguments": {"expression": "1"}}),
        (None, None, [("calculator", '{"expression":"1"}')]),
    ),
    "arguments null": (
        calling(type="function", function={"name": "calculator", "arguments": None}),
        (None, None, [("calculator", "{}")]),
    ),
    "no arguments, no type": (calling(function={"name": "calculator"}), (None, None, [("calculator", "{}")])),
    "custom tool": (
        calling(type="custom", custom={"name": "patch", "input": "abc"}),
        (None, None, [("patch", '{"input": "abc"}')]),
    ),
    "legacy call": (
        saying(function_call={"name": "calculator", "arguments": "{}"}),
        (None, None, [("calculator", "{}")]),
    ),
    "a call without a name": (calling(), ('{"id":"1"}', None, [])),
    "a call that is a text": (saying(content="Hi", tool_calls=["x"]), ('Hi\n"x"', None, [])),
    "content parts": (saying(content=[{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]), ("Hi", None, [])),
    "content with thoughts": (
        saying(content=[{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"text": "Hi"}]),
        ("Hi", "hm", []),
    ),
    "content that is a number": (saying(content=5), ("5", None, [])),
    "reasoning as an object": (saying(content="Hi", reasoning={"text": "hm"}), ("Hi", "hm", [])),
    "reasoning as a list": (saying(content="Hi", reasoning_content=["h", {"text": "m"}]), ("Hi", "hm", [])),
    "a message that is null": ({"message": None}, ("", None, [])),
    "finish null": ({"finish_reason": None}, ("Hi.", None, [])),
    "finish of another API": ({"finish_reason": "end_turn"}, ("Hi.", None, [])),
}


@pytest.mark.parametrize("name", ODD)
async def test_an_odd_reply_becomes_an_ordinary_one_in_every_api(run: Path, name: str) -> None:
    answer, (text, reasoning, calls) = ODD[name]
    endpoint = Endpoint(**answer)
    async with hosted(run, endpoint) as it:
        for api in Api:
            for stream in (False, True):
                told = await it.ask(await it.open(task_id=f"{api} {stream}"), "hello", api, stream=stream)
                assert told.status == 200, told.raw
                assert b'"error":{' not in told.raw
        opened = await it.open(task_id="tools")
        chat = await it.ask(opened, "hello", tools=[CALCULATOR, PATCH])
        await it.ask(await it.open(task_id="again"), [user("hello"), chat.json["choices"][0]["message"], user("go on")])
    assert len(endpoint.bodies) == 10
    (turn,) = rolltape.read(run).rollout(opened["rollout"]).turns
    message = turn.reply.to_dict() if turn.reply else {}
    assert message.get("content") in (text, text or None)
    assert message.get("reasoning_content") == reasoning
    found = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    assert found == calls
    unread = name in ("a call without a name", "a call that is a text")
    assert (TurnFlag.MALFORMED_CALL in turn.facts.flags) == unread
    assert turn.facts.extra["upstream"].get("finish_reason") == endpoint.answer["finish_reason"]


async def test_a_custom_tools_call_goes_back_as_one(run: Path) -> None:
    endpoint = Endpoint(**calling(type="custom", custom={"name": "patch", "input": "abc"}))
    async with hosted(run, endpoint) as it:
        message = (await it.ask(await it.open(), "hello", tools=[PATCH])).json["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert (call["type"], call["custom"]) == ("custom", {"name": "patch", "input": "abc"})


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        (None, (0, 0)),
        ({}, (0, 0)),
        ({"prompt_tokens": None, "completion_tokens": None, "total_tokens": None}, (0, 0)),
        ({"prompt_tokens": "3", "completion_tokens": "2"}, (3, 2)),
        ({"prompt_tokens": 3.0, "completion_tokens": True}, (3, 0)),
        ({"prompt_tokens": 3, "completion_tokens": 2, "completion_tokens_details": [1]}, (3, 2)),
        ({"prompt_tokens": 3, "completion_tokens": 2, "completion_tokens_details": {"reasoning_tokens": "9"}}, (3, 2)),
        ({"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 9}}, (3, 2)),
        ([1], (0, 0)),
    ],
)
async def test_usage_that_makes_no_sense_is_left_out(run: Path, usage: Any, counts: tuple[int, int]) -> None:
    endpoint = Endpoint()
    endpoint.more = {"usage": usage, "id": 5, "model": 7, "system_fingerprint": {}}
    async with hosted(run, endpoint) as it:
        for api in Api:
            assert (await it.ask(await it.open(task_id=api), "hello", api)).status == 200
        told = (await it.ask(await it.open(task_id="again"), "hello")).json
        messages = (await it.ask(await it.open(task_id="m"), "hello", Api.MESSAGES)).json["usage"]
        gemini = (await it.ask(await it.open(task_id="g"), "hello", Api.GEMINI)).json["usageMetadata"]
    assert (told["usage"]["prompt_tokens"], told["usage"]["completion_tokens"]) == counts
    assert told["model"] == "7"
    assert messages["input_tokens"] >= 0
    assert gemini.get("candidatesTokenCount", 0) >= 0


@pytest.mark.parametrize("api", Api)
async def test_text_that_is_no_unicode_is_repaired_and_numbers_that_are_none_are_null(run: Path, api: Api) -> None:
    endpoint = Endpoint()
    choice = b'{"message":{"content":"a\\ud800b"},"finish_reason":"stop"}'
    endpoint.body = b'{"choices":[%s],"usage":{"cost":1e999,"prompt_tokens":3}}' % choice
    async with hosted(run, endpoint) as it:
        answer = await it.ask(await it.open(), "hello", api)
    assert "a\ufffdb" in json.dumps(answer.json, ensure_ascii=False)
    assert len(endpoint.bodies) == 1
    (turn,) = it.turns()
    assert TurnFlag.REPAIRED_UNICODE in turn.facts.flags
    assert turn.facts.extra["upstream"]["usage"] == {"cost": None, "prompt_tokens": 3}


OTHER = {"type": "function", "function": {"name": "other", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("api", Api)
async def test_a_call_of_a_denied_tool_is_delivered_as_text_and_flagged(run: Path, api: Api) -> None:
    endpoint = Endpoint(**calling(function={"name": "calculator", "arguments": '{"expression": "1"}'}))
    async with hosted(run, endpoint) as it:
        answer = await it.ask(await it.open(denied_tools=["calculator"]), "hello", api)
    assert text_of(api, answer) == '{"name":"calculator","arguments":"{\\"expression\\": \\"1\\"}"}'
    assert "denied_tool" in answer.headers["x-rolltape-flags"]
    (turn,) = it.turns()
    assert turn.facts.extra["denied"] == ["calculator"]


@pytest.mark.parametrize(
    ("choice", "passed_on"),
    [
        ({"type": "function", "function": {"name": "calculator"}}, None),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [CALCULATOR, OTHER]}}, None),
        ({"type": "function", "function": {"name": "other"}}, {"type": "function", "function": {"name": "other"}}),
        ("required", "required"),
    ],
)
async def test_a_tool_choice_that_names_a_denied_tool_is_not_passed_on(run: Path, choice: Any, passed_on: Any) -> None:
    endpoint = Endpoint()
    async with hosted(run, endpoint) as it:
        opened = await it.open(denied_tools=["calculator"])
        await it.ask(opened, "hello", tools=[CALCULATOR, OTHER], tool_choice=choice)
    (body,) = endpoint.bodies
    assert (body["tools"], body.get("tool_choice")) == ([OTHER], passed_on)


async def test_a_denied_tool_that_is_forced_through_another_api_is_not_forced(run: Path) -> None:
    endpoint = Endpoint()
    tools = [{"name": name, "input_schema": {"type": "object"}} for name in ("calculator", "other")]
    async with hosted(run, endpoint) as it:
        opened = await it.open(denied_tools=["calculator"])
        forced = {"type": "tool", "name": "calculator"}
        await it.ask(opened, "hello", Api.MESSAGES, tools=tools, tool_choice=forced)
    (body,) = endpoint.bodies
    assert ([tool["function"]["name"] for tool in body["tools"]], body["tool_choice"]) == (["other"], "auto")


UNTOLD = "thinking: a hosted endpoint has no parameter for it"
LOST = "output_config.effort 'high': not shown to the model"


@pytest.mark.parametrize(
    ("api", "asked", "passed_on", "listed"),
    [
        (Api.MESSAGES, {"thinking": {"type": "disabled"}}, "none", None),
        (Api.MESSAGES, {"thinking": {"type": "adaptive"}}, None, UNTOLD),
        (Api.MESSAGES, {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, "high", None),
        (Api.MESSAGES, {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, "none", LOST),
        (Api.RESPONSES, {"reasoning": {"effort": "minimal"}}, "minimal", None),
        (Api.RESPONSES, {"reasoning": {"effort": "none"}}, "none", None),
        (Api.GEMINI, {"generationConfig": {"thinkingConfig": {"thinkingBudget": 0}}}, "none", None),
        (Api.GEMINI, {"generationConfig": {"thinkingConfig": {"thinkingBudget": -1}}}, None, UNTOLD),
        (Api.GEMINI, {"generationConfig": {"thinkingConfig": {"thinkingLevel": "LOW"}}}, "low", None),
        (Api.CHAT, {"reasoning_effort": "low"}, "low", None),
    ],
)
async def test_how_much_to_think_reaches_the_endpoint_in_chats_words_or_is_listed(
    run: Path, api: Api, asked: Json, passed_on: str | None, listed: str | None
) -> None:
    endpoint = Endpoint()
    async with hosted(run, endpoint) as it:
        answer = await it.ask(await it.open(), "hi", api, **asked)
    assert (answer.status, endpoint.bodies[0].get("reasoning_effort")) == (200, passed_on)
    assert answer.headers.get("x-rolltape-ignored-params") == listed


@pytest.mark.parametrize("api", Api)
async def test_what_a_session_decides_and_an_endpoint_cannot_be_told_is_listed(run: Path, api: Api) -> None:
    async with hosted(run, Endpoint()) as it:
        opened = await it.open(thinking=False, context_budget=10)
        answer = await it.ask(opened, "hi " * 100_000, api)
    assert answer.status == 200
    (turn,) = it.turns()
    untold = [f"{name}: a hosted endpoint has no parameter for it" for name in ("thinking", "context_budget")]
    assert turn.ignored_params[-2:] == untold
    assert answer.headers["x-rolltape-ignored-params"].endswith("; ".join(untold))


SIGNED = {"google": {"thought_signature": "c2ln"}}
# What endpoints add to a message: OpenRouter details of the reasoning, which it wants back, and images; OpenAI links.
OWN = {
    "reasoning_details": [{"type": "reasoning.encrypted", "data": "ZW5j", "id": "rs_1", "index": 0}],
    "images": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}],
    "annotations": [{"type": "url_citation", "url_citation": {"url": "https://example.org", "start_index": 0}}],
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("drops", [False, True])
async def test_fields_of_an_endpoints_own_reach_the_agent_and_come_back(run: Path, stream: bool, drops: bool) -> None:
    """Gemini refuses a call that comes back without its signature."""
    call = {"id": "1", "type": "function", "index": 0, "extra_content": SIGNED}
    function = {"name": "calculator", "arguments": '{"expression": "1"}'}
    message = {"role": "assistant", "content": None, "audio": None, "tool_calls": [{**call, "function": function}]}
    endpoint = Endpoint(message=message | OWN, finish_reason="tool_calls")
    async with hosted(run, endpoint) as it:
        opened = await it.open()
        answer = await it.ask(opened, "hello", tools=[CALCULATOR], stream=stream)
        pieces = [choice["delta" if stream else "message"] for event in answer.events for choice in event["choices"]]
        told = {name: value for piece in pieces for name, value in piece.items()}
        (made,) = told["tool_calls"]
        echo = {"role": "assistant", "tool_calls": [made]} | ({} if drops else {name: told[name] for name in OWN})
        endpoint.answer = {"message": {"role": "assistant", "content": "It is 1."}, "finish_reason": "stop"}
        result = {"role": "tool", "tool_call_id": made["id"], "content": "1"}
        await it.ask(opened, [user("hello"), echo, result], tools=[CALCULATOR])
    assert {name: told[name] for name in OWN} == OWN
    assert (made["function"], made["extra_content"]) == (function, SIGNED)
    assert endpoint.bodies[1]["messages"][1] == echo | {"tool_calls": [made | {"id": "1"}]}
    first, second = it.turns()
    assert first.reply is not None
    assert {name: first.reply.to_dict()[name] for name in OWN} == OWN
    assert second.facts.extra.get("echoes", []) == (["fields_dropped"] if drops else [])
    (rollout,) = rolltape.read(run).rollouts()
    assert [placed.message_parent is None for placed in tree_of(rollout.sessions[0]).turns] == [True, False]


async def test_what_an_agent_drops_of_an_endpoints_own_fields_is_no_fork_in_an_open_gateway(run: Path) -> None:
    endpoint = Endpoint(message={"role": "assistant", "content": "Hi.", **OWN})
    async with hosted(run, endpoint, open=True) as it:
        said = [user("hello")]
        for _ in range(2):
            await it.call("POST", "/v1/chat/completions", body_of(Api.CHAT, said), x_api_key="k")
            said += [{"role": "assistant", "content": "Hi."}, user("go on")]
        assert len(it.gateway.service.sessions) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_usage_and_fingerprint_of_an_endpoint_reach_the_agent(run: Path, stream: bool) -> None:
    logprobs = {"content": [{"token": "Hi.", "logprob": -0.5, "bytes": [72], "top_logprobs": []}], "refusal": None}
    endpoint = Endpoint(logprobs=logprobs)
    reported = {**USAGE, "total_tokens": 1400, "cost": 0.0125, "cost_details": {"upstream_inference_cost": None}}
    endpoint.more = {"usage": reported, "system_fingerprint": "fp_1"}
    asked: Json = {"logprobs": True, "stream_options": {"include_usage": True}} if stream else {"logprobs": True}
    async with hosted(run, endpoint) as it:
        answer = await it.ask(await it.open(), "hello", stream=stream, **asked)
        both = await it.ask(await it.open(task_id="u"), "hello", logprobs=True, return_token_ids=True)
        unasked = await it.ask(await it.open(task_id="v"), "hello")
    assert [event["usage"] for event in answer.events if event.get("usage")] == [reported]
    assert answer.events[-1]["system_fingerprint"] == "fp_1"
    assert [c["logprobs"] for event in answer.events for c in event["choices"] if c.get("logprobs")] == [logprobs]
    assert "x-rolltape-ignored-params" not in answer.headers
    assert both.headers["x-rolltape-ignored-params"] == "token ids: the engine returns only text"
    assert unasked.json["choices"][0]["logprobs"] is None


class OneAtATime(Endpoint):
    """An endpoint that answers nothing else while it generates."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self._looks = asyncio.Semaphore(0)
        self._count = looks
        self.generating = False

    async def models(self, request: web.Request) -> web.Response:
        if self.generating:
            self._looks.release()
            await asyncio.Event().wait()
        return await super().models(request)

    async def chat(self, request: web.Request) -> web.Response:
        self.generating = True
        for _ in range(self._count):
            await self._looks.acquire()
        self.generating = False
        return await super().chat(request)


async def test_an_endpoint_that_answers_nothing_else_while_it_generates_is_not_given_up(run: Path) -> None:
    endpoint = OneAtATime(looks=5)
    async with hosted(run, endpoint) as it:
        assert (await it.ask(await it.open(), "hello")).status == 200
    assert len(endpoint.bodies) == 1


async def test_such_an_endpoint_is_not_to_blame_if_the_agent_leaves(run: Path) -> None:
    endpoint = OneAtATime(looks=1_000_000)
    async with hosted(run, endpoint) as it:
        asking = it.asking(await it.open(), "hello")
        await eventually(lambda: endpoint.generating)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    (turn,) = it.turns()
    assert "engine_errors" not in turn.facts.extra


PICTURE = "data:image/png;base64,AAAA"
SOURCE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
# The parts of a user message with an image and another medium, in each API's form.
SEEN: dict[Api, list[Json]] = {
    Api.MESSAGES: [
        {"type": "text", "text": "this", "citations": []},
        {"type": "image", "source": SOURCE, "cache_control": {"type": "ephemeral"}},
        {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}},
        {"type": "document", "source": SOURCE | {"media_type": "application/pdf"}},
    ],
    Api.RESPONSES: [
        {"type": "input_text", "text": "this"},
        {"type": "input_image", "image_url": PICTURE, "detail": "low"},
        {"type": "input_image", "image_url": "https://example.org/a.png"},
        {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,AAAA"},
    ],
    Api.GEMINI: [
        {"text": "this"},
        {"inlineData": {"mimeType": "image/png", "data": "AAAA"}},
        {"fileData": {"mimeType": "image/png", "fileUri": "https://example.org/a.png"}},
        {"inlineData": {"mimeType": "application/pdf", "data": "AAAA"}},
    ],
}


@pytest.mark.parametrize("api", SEEN)
async def test_images_reach_an_endpoint_from_every_api_and_nothing_beside_them(run: Path, api: Api) -> None:
    endpoint = Endpoint()
    *images, _ = SEEN[api]
    async with hosted(run, endpoint) as it:
        seen = await it.ask(await it.open(), [{"role": "user", "content": images}], api)
        partly = await it.ask(await it.open(task_id="u"), [{"role": "user", "content": SEEN[api]}], api)
    detail = {"detail": "low"} if api is Api.RESPONSES else {}
    passed_on = [
        {"type": "text", "text": "this"},
        {"type": "image_url", "image_url": {"url": PICTURE, **detail}},
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
    ]
    assert endpoint.bodies[0]["messages"] == [{"role": "user", "content": passed_on}]
    *first, document = endpoint.bodies[1]["messages"][0]["content"]
    assert (first, document.keys(), document["type"]) == (passed_on, {"type", "text"}, "text")
    assert "x-rolltape-ignored-params" not in seen.headers
    assert partly.headers["x-rolltape-ignored-params"] == "1 of 3 media: shown to the model as a placeholder"
    assert ["media_left_out" in turn.facts.flags for turn in it.turns()] == [False, True]


async def test_an_image_in_a_tools_result_is_a_placeholder_since_results_are_text(run: Path) -> None:
    endpoint = Endpoint()
    used = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image", "source": SOURCE}]}
    async with hosted(run, endpoint) as it:
        said = [user("look"), used, {"role": "user", "content": [result]}]
        answer = await it.ask(await it.open(), said, Api.MESSAGES)
    placeholder = "[image: image/png, 3 bytes; this model reads text only]"
    assert endpoint.bodies[0]["messages"][2]["content"] == placeholder
    assert answer.headers["x-rolltape-ignored-params"] == "1 of 1 media: shown to the model as a placeholder"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_reasoning_keeps_the_name_that_the_endpoint_gives_it(run: Path, stream: bool, name: str) -> None:
    """Groq refuses a conversation with `reasoning_content`, which is DeepSeek's name."""
    async with hosted(run, Endpoint(message={"role": "assistant", "content": "Hi.", name: "hm"})) as it:
        answer = await it.ask(await it.open(), "hello", stream=stream)
    pieces = [choice["delta" if stream else "message"] for event in answer.events for choice in event["choices"]]
    told = {field: value for piece in pieces for field, value in piece.items() if field.startswith("reasoning")}
    assert told == {name: "hm"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", Api)
async def test_a_refusal_of_the_model_reaches_the_agent(run: Path, api: Api, stream: bool) -> None:
    """OpenAI's models refuse in a field of their own where a schema was asked for. Only Chat Completions has it."""
    endpoint = Endpoint(message={"role": "assistant", "content": None, "refusal": "I cannot.", "audio": {"id": "a"}})
    async with hosted(run, endpoint) as it:
        opened = await it.open()
        answer = await it.ask(opened, "hello", api, stream=stream)
        if api is Api.CHAT:
            pieces = [c["delta" if stream else "message"] for event in answer.events for c in event["choices"]]
            assert [piece["refusal"] for piece in pieces if piece.get("refusal")] == ["I cannot."]
            echo = {"role": "assistant", "content": None, "refusal": "I cannot."}
            assert (await it.ask(opened, [user("hello"), echo, user("go on")])).status == 200
        else:
            assert (streamed_text_of(api, answer) if stream else text_of(api, answer)) == "I cannot."


@pytest.mark.parametrize("ended", [False, True], ids=["open", "ended"])
@pytest.mark.parametrize("api", [Api.CHAT, Api.MESSAGES])
async def test_an_endpoint_gets_its_own_ids_of_calls_back(run: Path, api: Api, ended: bool) -> None:
    """Mistral refuses ids that are not nine letters and digits. The agent gets unique ones."""
    function = {"name": "calculator", "arguments": '{"expression": "1"}'}
    made = [{"id": one, "type": "function", "function": function} for one in ("D681PevKs", "", "x", "x")]
    endpoint = Endpoint(message={"role": "assistant", "content": None, "tool_calls": made}, finish_reason="tool_calls")
    tools = [CALCULATOR] if api is Api.CHAT else [{"name": "calculator", "input_schema": {"type": "object"}}]

    def asked(first: Json) -> tuple[list[str], list[Json]]:
        if api is Api.CHAT:
            echo = first["choices"][0]["message"]
            ids = [call["id"] for call in echo["tool_calls"]]
            return ids, [echo, *({"role": "tool", "tool_call_id": one, "content": "1"} for one in ids)]
        for block in first["content"]:
            block["id"] = f"{block['name']}_{block['id']}"  # as kimi-cli does
        ids = [block["id"] for block in first["content"]]
        results = [{"type": "tool_result", "tool_use_id": one, "content": "1"} for one in ids]
        return ids, [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": results}]

    async with hosted(run, endpoint, open=True, open_idle_s=0.1 if ended else 60) as it:
        body = body_of(api, "hello", tools=tools)
        headers = {"x_rolltape_session": "s", "x_api_key": "k"}
        ids, rest = asked((await it.call("POST", PATHS[api], body, **headers)).json)
        again = body_of(api, [user("hello"), *rest], tools=tools)
        for _ in range(2):
            if ended:  # the conversation goes on in another session
                await eventually(lambda: not len(it.gateway.service.sessions))
            assert (await it.call("POST", PATHS[api], again, **headers)).status == 200
    assert len(set(ids)) == 4
    assert not {"D681PevKs", "x"} & set(ids)
    _, assistant, *results = endpoint.bodies[-1]["messages"]
    sent = ["D681PevKs", *(one.removeprefix("calculator_") for one in ids[1:])]
    assert [call["id"] for call in assistant["tool_calls"]] == sent
    assert [result["tool_call_id"] for result in results] == sent


class ReasoningModel(Endpoint):
    """An endpoint that refuses the older name of the limit, as OpenAI does for its models that think."""

    async def chat(self, request: web.Request) -> web.Response:
        if "max_tokens" not in json.loads(await request.read()):
            return await super().chat(request)
        self.bodies.append(json.loads(await request.read()))
        message = "Unsupported parameter: 'max_tokens' is not supported with this model. "
        error = {
            "message": f"{message}Use 'max_completion_tokens' instead.",
            "type": "invalid_request_error",
            "param": "max_tokens",
            "code": "unsupported_parameter",
        }
        return web.json_response({"error": error}, status=400)


async def test_a_limit_goes_on_under_the_name_that_the_endpoint_knows(run: Path) -> None:
    endpoint = ReasoningModel()
    async with hosted(run, endpoint) as it:
        opened = await it.open()
        answers = [await it.ask(opened, f"hello {number}", Api.MESSAGES) for number in range(2)]
        own = await it.ask(opened, "hello", max_tokens=5)
    assert [answer.status for answer in answers] == [200, 200]
    limits = [(body.get("max_tokens"), body.get("max_completion_tokens")) for body in endpoint.bodies]
    assert limits == [(512, None), (None, 512), (None, 512), (5, None)]
    assert (own.status, own.json["error"]["code"]) == (400, "unsupported_parameter")  # it is the agent's own name


TOO_LONG = "This model's maximum context length is 4096 tokens."


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ([{"error": {"code": 400, "message": TOO_LONG, "status": "INVALID_ARGUMENT"}}], TOO_LONG),  # Google's
        (
            {
                "error": {
                    "message": "Provider returned error",
                    "code": 400,
                    "metadata": {"raw": json.dumps({"error": {"message": TOO_LONG}}), "provider_name": "p"},
                }
            },
            f"Provider returned error: {TOO_LONG}",
        ),
        ({"error": {"message": "Provider returned error", "metadata": {"raw": TOO_LONG}}}, TOO_LONG),  # OpenRouter's
        ({"error": {"message": TOO_LONG, "metadata": {"raw": None}}}, TOO_LONG),
    ],
)
async def test_the_reason_is_found_wherever_an_endpoint_puts_it(run: Path, body: Any, told: str) -> None:
    endpoint = Endpoint()
    endpoint.status, endpoint.body = 400, json.dumps(body).encode()
    async with hosted(run, endpoint) as it:
        answer = await it.ask(await it.open(), "hello")
    assert answer.json["error"]["code"] == "context_length_exceeded"
    assert told in answer.error
    assert "{" not in answer.error


async def test_tools_that_an_endpoint_runs_itself_go_on_unless_the_session_forbids_them(run: Path) -> None:
    endpoint = Endpoint()
    search, builtin = {"type": "browser_search"}, {"type": "builtin_function", "function": {"name": "$web_search"}}
    tools = [search, CALCULATOR, builtin]
    async with hosted(run, endpoint) as it:
        for spec in ({}, {"denied_tools": ["browser_search"]}, {"allowed_tools": ["calculator"]}):
            answer = await it.ask(await it.open(task_id=str(spec), **spec), "hello", tools=tools)
            assert answer.status == 200, answer.raw
    assert [body["tools"] for body in endpoint.bodies] == [tools, [CALCULATOR, builtin], [CALCULATOR]]
    assert answer.headers["x-rolltape-ignored-params"].startswith("tools: browser_search is denied in this session; ")


async def test_a_tool_that_nobody_here_runs_is_listed(run: Path) -> None:
    async with rig(run) as it:
        answer = await it.ask(await it.open(), "hello", tools=[{"type": "browser_search"}, CALCULATOR])
    assert answer.headers["x-rolltape-ignored-params"] == "tools: 'browser_search' is not offered here"


@pytest.mark.parametrize("api", [Api.MESSAGES, Api.RESPONSES, Api.GEMINI])
async def test_an_endpoint_gets_its_own_fields_of_a_call_back_from_apis_without_them(run: Path, api: Api) -> None:
    written = {"name": "calculator", "arguments": '{"expression":"1"}'}
    call: Json = {"id": "1", "type": "function", "function": written, "extra_content": SIGNED}
    details = OWN["reasoning_details"]
    message = {"role": "assistant", "reasoning": "hm", "reasoning_details": details, "tool_calls": [call]}
    endpoint = Endpoint(message={"content": None, **message}, finish_reason="tool_calls")
    function = {"name": "calculator", "parameters": {"type": "object"}}
    async with hosted(run, endpoint) as it:
        opened = await it.open()
        tools: list[Json]
        match api:
            case Api.MESSAGES:
                tools = [{"name": "calculator", "input_schema": {"type": "object"}}]
                first = (await it.ask(opened, "hello", api, tools=tools)).json["content"]
                result = {"type": "tool_result", "tool_use_id": first[-1]["id"], "content": "1"}
                rest = [{"role": "assistant", "content": first}, {"role": "user", "content": [result]}]
            case Api.RESPONSES:
                tools = [{"type": "function", **function}]
                first = (await it.ask(opened, "hello", api, tools=tools)).json["output"]
                rest = [
                    *first,
                    {"type": "function_call_output", "call_id": first[-1]["call_id"], "output": "1"},
                ]
            case _:
                tools = [{"functionDeclarations": [function]}]
                first = (await it.ask(opened, "hello", api, tools=tools)).json["candidates"][0]["content"]
                result = {"functionResponse": {"name": "calculator", "response": {"output": "1"}}}
                rest = [{"role": "assistant", "content": first["parts"]}, {"role": "user", "content": [result]}]
        await it.ask(opened, [user("hello"), *rest], api, tools=tools)
    assert endpoint.bodies[1]["messages"][1] == {"content": None, **message}


async def test_an_agent_cannot_write_such_fields_itself(run: Path) -> None:
    endpoint = Endpoint()
    async with hosted(run, endpoint) as it:
        for own in ("x", {"role": "system"}):
            said = [user("hello") | {"endpoint_fields": own}]
            assert (await it.ask(await it.open(task_id=str(own)), said, Api.RESPONSES)).status == 200
    assert [body["messages"] for body in endpoint.bodies] == [[user("hello")]] * 2


async def test_messages_from_another_api_have_the_plainest_form(run: Path) -> None:
    """DeepSeek takes texts and no parts, OpenAI no assistant without a text and calls."""
    endpoint = Endpoint()
    thought = {"type": "thinking", "thinking": "hm", "signature": "theirs"}
    used = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "1"}]}
    said = [
        {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": [thought]},
        user("go on"),
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [result]},
    ]
    system = [
        {"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "brief."},
    ]
    async with hosted(run, endpoint) as it:
        assert (await it.ask(await it.open(), said, Api.MESSAGES, system=system)).status == 200
    contents = [message["content"] for message in endpoint.bodies[0]["messages"]]
    assert contents == ["Be brief.", "one two", "", "go on", None, "1"]


async def test_a_developer_of_another_api_is_the_system(run: Path) -> None:
    """Codex has such messages, and of the endpoints only OpenAI knows the role; over Chat the body goes on as it is."""
    endpoint = Endpoint()
    said = [{"role": "developer", "content": "Be brief."}, user("hello")]
    async with hosted(run, endpoint) as it:
        for api in (Api.RESPONSES, Api.CHAT):
            assert (await it.ask(await it.open(task_id=api), said, api)).status == 200
    assert [body["messages"][0]["role"] for body in endpoint.bodies] == ["system", "developer"]


async def test_a_client_that_hung_up_goes_on_from_the_part_of_a_hosted_reply_that_it_got(run: Path) -> None:
    endpoint = Endpoint(message={"role": "assistant", "content": "one two " * 2**19})
    async with hosted(run, endpoint) as it:
        opened = await it.open()
        path = f"{it.gateway.url}/s/{opened['key']}{PATHS[Api.CHAT]}"
        response = await it.http.post(path, json=body_of(Api.CHAT, "count", stream=True))
        while b"one two" not in await response.content.readany():
            pass
        response.close()
        session = it.gateway.service.sessions.of_id(opened["session"])
        await eventually(lambda: Delivery.UNDELIVERED in session.deliveries.values())
        said = [user("count"), {"role": "assistant", "content": "one two one"}, user("go on")]
        answer = await it.ask(opened, said)
        assert answer.status == 200, answer.raw
        await it.finish(opened)
    assert [turn.facts.extra.get("echoes", []) for turn in it.turns()] == [[], ["partial"]]

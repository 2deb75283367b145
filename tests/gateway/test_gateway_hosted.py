"""A hosted endpoint behind the gateway: what the agent sent goes on as it came, and what came back is kept."""

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
from gateways import CALCULATOR, Api, Rig, said_finish, scripted, user
from rolltape.gateway.gateway import Gateway
from rolltape.records.turn import TurnFlag
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
        self.bodies: list[Json] = []

    async def chat(self, request: web.Request) -> web.Response:
        self.bodies.append(json.loads(await request.read()))
        choice = {"index": 0, **self.answer}
        return web.json_response({"id": "c1", "model": "gpt-9-2026", "choices": [choice], "usage": USAGE, **self.more})


@asynccontextmanager
async def hosted(run: Path, endpoint: Endpoint, **settings: Any) -> AsyncIterator[Rig]:
    """A gateway before an endpoint; there is no tokenizer."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", endpoint.chat)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
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
            )
        ]
    assert b"token_ids" not in answer.raw
    assert answer.headers["x-rolltape-ignored-params"] == "token ids and logprobs: the engine gives text alone"
    assert [one.status for one in refused] == [400] * 4
    assert all("takes messages alone" in one.error for one in refused)

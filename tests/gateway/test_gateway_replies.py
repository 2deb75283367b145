"""Replies on the wire: streamed as unstreamed, at once, honest about what was not done, and counted alike."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from anthropic.types import Message
from google.genai.types import GenerateContentResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

import rolltape
from gateways import (
    CALCULATOR,
    PATHS,
    Answer,
    Api,
    body_of,
    path_of,
    rig,
    scripted,
    slowly,
    streamed_text_of,
    text_of,
    tiny_gateway,
    user,
)
from rolltape.cli import run as rolltape_command
from rolltape.gateway.wire.chat.dialect import CHAT
from rolltape.gateway.wire.gemini.dialect import GEMINI
from rolltape.gateway.wire.messages.dialect import MESSAGES
from rolltape.gateway.wire.protocol import Dialect
from rolltape.gateway.wire.responses.dialect import RESPONSES
from rolltape.records.rollout import EventKind
from rolltape.records.turn import TurnFlag
from scripted_engine import tool_call

APIS = list(Api)
KEEPALIVES = {Api.CHAT: b": keepalive", Api.MESSAGES: b'"ping"', Api.RESPONSES: b"event: response.in_progress"}
WIRES: dict[Api, Dialect] = {Api.CHAT: CHAT, Api.RESPONSES: RESPONSES, Api.MESSAGES: MESSAGES, Api.GEMINI: GEMINI}
QUESTION = "What is 12 + 7?"


async def test_a_streamed_reply_says_what_the_whole_one_says_on_the_shipped_model(run: Path) -> None:
    async with tiny_gateway(run, forced={"seed": 7, "max_tokens": 48}) as it:
        for api in APIS:
            whole = await it.ask(await it.open(task_id=f"{api} whole"), QUESTION, api)
            usage: dict[str, Any] = {"stream_options": {"include_usage": True}} if api is Api.CHAT else {}
            streamed = await it.ask(await it.open(task_id=f"{api} streamed"), QUESTION, api, stream=True, **usage)
            assert text_of(api, whole) == streamed_text_of(api, streamed) != ""
            assert _usage(api, whole.json) == _usage(api, _last(api, streamed))
    assert rolltape_command(["check", str(run)]) == 0


def _usage(api: Api, body: dict[str, Any]) -> tuple[int, int]:
    usage = body["usageMetadata" if api is Api.GEMINI else "usage"]
    match api:
        case Api.CHAT:
            return usage["prompt_tokens"], usage["completion_tokens"]
        case Api.GEMINI:
            return usage["promptTokenCount"], usage["totalTokenCount"]
        case _:
            return usage["input_tokens"], usage["output_tokens"]


def _last(api: Api, streamed: Answer) -> dict[str, Any]:
    events = streamed.events
    match api:
        case Api.CHAT:
            return next(event for event in events if event.get("usage"))
        case Api.MESSAGES:
            return next(event for event in events if event["type"] == "message_delta")
        case Api.RESPONSES:
            response: dict[str, Any] = events[-1]["response"]
            return response
        case Api.GEMINI:
            return events[-1]


@pytest.mark.parametrize("api", APIS)
async def test_a_stream_opens_before_the_engine_has_answered_and_is_kept_alive(run: Path, api: Api) -> None:
    async with rig(run, slowly("a b c d e f g h", 0.05), keepalive_s=0.05) as it:
        opened = await it.open()
        url = f"{it.gateway.url}/s/{opened['key']}{path_of(api, stream=True)}"
        async with it.http.post(url, json=body_of(api, "hello", stream=True)) as response:
            first = await response.content.readany()
            assert it.engine.said == []
            assert response.headers["content-type"].startswith("text/event-stream")
            rest = await response.content.read()
        assert _keepalives(api, first + rest) >= 2
        assert streamed_text_of(api, Answer(200, {}, first + rest)) == "a b c d e f g h"


def _keepalives(api: Api, raw: bytes) -> int:
    if api is Api.GEMINI:  # empty lines: each event has one, and one opens the stream
        return raw.count(b"\n") - 2 * raw.count(b"data:") - 1
    return raw.count(KEEPALIVES[api])


async def test_the_sdks_models_take_every_reply(run: Path) -> None:
    script = ["<think>\nhm\n</think>\n\nSo. " + tool_call("calculator", {"expression": "1"})] * 5
    async with rig(run, script) as it:
        opened = await it.open()
        tools: dict[Api, list[dict[str, Any]]] = {
            Api.CHAT: [CALCULATOR],
            Api.MESSAGES: [{"name": "calculator", "input_schema": CALCULATOR["function"]["parameters"]}],
            Api.RESPONSES: [{"type": "function", **CALCULATOR["function"]}],
            Api.GEMINI: [{"functionDeclarations": [CALCULATOR["function"]]}],
        }
        replies = {api: await it.ask(opened, "hello", api, tools=tools[api]) for api in APIS}
        chat = ChatCompletion.model_validate(replies[Api.CHAT].json, strict=True)
        assert chat.choices[0].finish_reason == "tool_calls"
        message = Message.model_validate(replies[Api.MESSAGES].json)
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
        response = Response.model_validate(replies[Api.RESPONSES].json)
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
        generated = GenerateContentResponse.model_validate(replies[Api.GEMINI].json)
        assert [call.name for call in generated.function_calls or ()] == ["calculator"]
        streamed = await it.ask(opened, "hello", tools=tools[Api.CHAT], stream=True)
        for event in streamed.events:
            ChatCompletionChunk.model_validate(event, strict=True)


@pytest.mark.parametrize(
    ("api", "fields", "named"),
    [
        (Api.CHAT, {"tools": [CALCULATOR], "tool_choice": "required"}, "tool_choice"),
        (Api.CHAT, {"logit_bias": {"5": 1}}, "logit_bias"),
        (Api.CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (Api.MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
        (Api.RESPONSES, {"text": {"format": {"type": "json_object"}}}, "text.format"),
        (Api.RESPONSES, {"reasoning": {"effort": "high"}}, "reasoning.effort 'high'"),
        (Api.GEMINI, {"tools": [{"googleSearch": {}}]}, "tools"),
    ],
)
async def test_what_cannot_be_honored_is_said_in_a_header_and_on_the_turn(
    run: Path, api: Api, fields: dict[str, Any], named: str
) -> None:
    async with rig(run, lambda _: "ok", constrain="none") as it:
        opened = await it.open()
        for stream in (False, True):
            answer = await it.ask(opened, "hello", api, stream=stream, **fields)
            assert named in answer.headers["x-rolltape-ignored-params"], answer.raw
            assert answer.headers["x-rolltape-unhonoured"] == answer.headers["x-rolltape-ignored-params"]
        await it.finish(opened)
    for turn in it.turns():
        assert any(said.startswith(named) for said in turn.facts.extra["ignored_params"])


async def test_a_turn_reads_its_prefix_miss_and_ignored_params_under_the_names_of_0_1_0_too(run: Path) -> None:
    async with rig(run, lambda _: "ok") as it:
        opened = await it.open()
        await it.ask(opened, "hello", logit_bias={"5": 1})
        await it.finish(opened)
    (turn,) = it.turns()
    assert turn.prefix_miss == turn.facts.extra["prefix_miss"] == "first_turn"
    assert turn.ignored_params == turn.facts.extra["ignored_params"]
    old = {"prompt_why": "no_reply", "unhonoured": ["seed: the engine does not apply it"]}
    before = turn.with_facts(msgspec.structs.replace(turn.facts, extra=old))
    assert (before.prefix_miss, before.ignored_params) == ("no_reply", old["unhonoured"])
    neither = turn.with_facts(msgspec.structs.replace(turn.facts, extra={}))
    assert (neither.prefix_miss, neither.ignored_params) == (None, [])


async def test_nothing_is_said_where_all_was_honored(run: Path) -> None:
    async with rig(run) as it:
        answer = await it.ask(await it.open(), "hello", temperature=0.5, max_tokens=9)
        assert "x-rolltape-ignored-params" not in answer.headers


IMAGES: dict[Api, dict[str, Any]] = {
    Api.CHAT: {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    Api.MESSAGES: {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
    Api.RESPONSES: {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
    Api.GEMINI: {"inlineData": {"mimeType": "image/png", "data": "AAAA"}},
}


@pytest.mark.parametrize("api", APIS)
async def test_images_become_placeholders_and_are_on_the_tape(run: Path, api: Api) -> None:
    async with rig(run, ["I cannot see it."]) as it:
        opened = await it.open()
        answer = await it.ask(opened, [{"role": "user", "content": [IMAGES[api]]}], api)
        assert answer.status == 200
        assert "shown to the model as a placeholder" in answer.headers["x-rolltape-ignored-params"]
        assert "[image: image/png, 3 bytes" in it.engine.said[0].asked.prompt
    (turn,) = rolltape.read(run).rollout(opened["rollout"]).turns
    assert turn.facts.flags == (TurnFlag.MEDIA_LEFT_OUT,)
    (part,) = turn.prompt_messages[0]["content"]
    assert part["media"] == IMAGES[api]


@pytest.mark.parametrize("api", APIS)
async def test_images_are_refused_in_the_apis_shape_if_so_set(run: Path, api: Api) -> None:
    async with rig(run, images="refuse") as it:
        opened = await it.open()
        answer = await it.ask(opened, [{"role": "user", "content": [IMAGES[api]]}], api)
        assert (answer.status, answer.headers["x-should-retry"]) == (400, "false")
        assert "image" in answer.error
        assert it.engine.requests == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_for_no_token_at_all_is_answered_without_the_engine(run: Path, stream: bool) -> None:
    """It warms Anthropic's cache, and is no turn of the task."""
    async with rig(run, ["Hello."]) as it:
        opened = await it.open(max_turns=1)
        warmed = await it.ask(opened, "hello", Api.MESSAGES, max_tokens=0, stream=stream)
        assert it.engine.requests == 0
        ending = warmed.events[-2]["delta"] if stream else warmed.json
        assert ending["stop_reason"] == "max_tokens"
        answer = await it.ask(opened, "hello", Api.MESSAGES)
        assert text_of(Api.MESSAGES, answer) == "Hello."
        finished = await it.finish(opened, reward=1.0)
    assert [turn.facts.auxiliary for turn in it.turns()] == ["probe", None]
    assert finished["ledger"] == {"trained": len(it.turns()[1].sampled_ids)}


async def test_counting_tokens_agrees_with_the_request_that_follows(run: Path) -> None:
    async with rig(run, ["first", "second"]) as it:
        opened = await it.open()
        messages = [user(QUESTION)]
        more: dict[str, Any] = {
            "system": "Be brief.",
            "tools": [{"name": "calculator", "input_schema": {"type": "object"}}],
        }
        for _ in range(2):
            body = body_of(Api.MESSAGES, messages, **more)
            counted = await it.call("POST", f"/s/{opened['key']}/v1/messages/count_tokens", _without_limit(body))
            answer = await it.ask(opened, messages, Api.MESSAGES, **more)
            usage = answer.json["usage"]
            assert counted.json == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
            messages += [{"role": "assistant", "content": answer.json["content"]}, user("And more?")]
        assert (await it.finish(opened))["turns"] == 2


def _without_limit(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != "max_tokens"}


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("//v1/responses/", "/v1/responses"),
        ("/v1/tokenize", "/tokenize"),
        ("/with/session=a/messages", "/v1/messages"),
        ("/models/org/it:streamGenerateContent", "/v1beta/models/org/it:streamGenerateContent"),
        ("/v1/v1beta/models/it:countTokens", "/v1beta/models/it:countTokens"),
        ("/models/it:predict", None),
        ("/v1/embeddings", None),
    ],
)
async def test_a_base_url_that_is_wrong_is_told_where_the_route_is(run: Path, path: str, meant: str | None) -> None:
    async with rig(run) as it:
        refused = await it.call("POST", path, {})
    assert refused.status == 404
    served = (
        "the model replies at /v1/chat/completions, /v1/completions, /inference/v1/generate, /v1/responses, "
        "/v1/messages, /{version}/models/{model}:{method}"
    )
    told = served if meant is None else f"change the base URL so that its clients ask at {meant}"
    assert refused.error == f"Not Found: POST {path}; {told}"


async def test_a_wrong_method_is_told_which_one_to_send(run: Path) -> None:
    async with rig(run) as it:
        refused = [await it.call("GET", "/v1/chat/completions"), await it.call("DELETE", "/v1/models")]
    assert [(one.status, one.error) for one in refused] == [
        (405, "Method Not Allowed: GET /v1/chat/completions; send POST"),
        (405, "Method Not Allowed: DELETE /v1/models; send GET or HEAD"),
    ]


async def test_models_greetings_and_health(run: Path) -> None:
    async with rig(run) as it:
        opened = await it.open()
        base = f"/s/{opened['key']}"
        listed = (await it.call("GET", f"{base}/v1/models")).json
        assert [model["id"] for model in listed["data"]] == ["scripted"]
        assert (await it.call("GET", f"{base}/v1/models/org/name")).json["id"] == "org/name"
        assert (await it.call("GET", "/v1/models")).status == 401
        for path in ("/", f"{base}/", base):
            assert (await it.call("HEAD", path)).status == 200
        for path in ("/livez", "/readyz", "/health", "/healthz"):
            assert (await it.call("GET", path)).status == 200


@pytest.mark.parametrize("headers", [{}, {"anthropic_version": "2023-06-01"}, {"x_goog_api_key": "any"}])
async def test_an_address_that_does_not_exist_is_refused_as_an_api_would(run: Path, headers: dict[str, str]) -> None:
    async with rig(run) as it:
        for method, path, status in (("GET", "/v2/chat", 404), ("GET", "/v1/messages", 405)):
            answer = await it.call(method, path, None, **headers)
            assert (answer.status, answer.headers["x-should-retry"]) == (status, "false")
            assert path in answer.error


async def test_many_sessions_at_once_each_get_their_own(run: Path) -> None:
    def script(asked: Any) -> str:
        number = asked.prompt.partition("number ")[2].split("<")[0]
        return f"this is {number}"

    engine = scripted(script, conversation=lambda asked: asked.number)
    async with rig(run, engine) as it:
        opened = [await it.open(attempt=attempt) for attempt in range(30)]
        asks = [
            it.asking(one, f"number {number}", APIS[number % len(APIS)], stream=number % 3 == 0)
            for number, one in enumerate(opened)
        ]
        answers = await asyncio.gather(*asks)
        for number, answer in enumerate(answers):
            read = streamed_text_of if number % 3 == 0 else text_of
            assert read(APIS[number % len(APIS)], answer) == f"this is {number}"
        finished = await asyncio.gather(*(it.finish(one) for one in opened))
        assert all(one["ledger"].keys() == {"trained"} for one in finished)


async def test_a_body_that_is_compressed_is_read(run: Path) -> None:
    async with rig(run) as it:
        opened = await it.open()
        url = f"{it.gateway.url}/s/{opened['key']}{PATHS[Api.CHAT]}"
        body = json.dumps(body_of(Api.CHAT, "hello")).encode()
        async with it.http.post(url, data=body, compress="gzip") as response:
            assert response.status == 200


async def test_a_refused_request_and_what_was_not_applied_are_shown(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with rig(run, ["ok"]) as it:
        opened = await it.open(max_turns=1)
        await it.ask(opened, "hello", n=33)
        await it.ask(opened, "hello", logit_bias={"1": 1})
        await it.ask(opened, "more")
        status = it.gateway.status()
        await it.finish(opened)
    assert status["ignored_params"] == {"logit_bias: ignored": 1}
    rollout = rolltape.read(run).rollout(opened["rollout"])
    refused = [event.data["status"] for event in rollout.events if event.kind == EventKind.REFUSAL]
    assert refused == [400, 429]
    assert rolltape_command(["show", str(run), opened["rollout"]]) == 0
    shown = capsys.readouterr().out
    assert "refused: 400 n is 33; give a whole number" in shown
    assert "refused: 429 session" in shown
    assert "not applied: logit_bias: ignored" in shown


@pytest.mark.parametrize("stray", [5, "text", [3], [{"function": 7}]])
async def test_whatever_a_user_message_has_for_calls_its_rollout_can_be_cut(run: Path, stray: object) -> None:
    async with rig(run, lambda _: "ok") as it:
        opened = await it.open()
        for text in ("one", "two"):
            assert (await it.ask(opened, [user("Hello."), user(text) | {"tool_calls": stray}])).status == 200
        await it.finish(opened, reward=1.0)
    rollouts = rolltape.read(run).rollouts()
    assert [len(rolltape.linearize(rollout, "exact").forks) for rollout in rollouts] == [1]

"""Google's SDK against a server made of the wire: what it sends is read, what it gets it takes."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from google import genai
from google.genai import errors, types

from canned_wire import CannedServer, Refusal, assert_known, call, canned, canned_server
from rolltape.gateway.request import OutputSchema, SamplingParams, ToolChoice
from rolltape.gateway.turn.gateway_turn import GatewayTurn
from rolltape.gateway.wire.gemini.dialect import GEMINI
from rolltape.records.messages import canonical_message
from rolltape.records.turn import Finish

FULL = {
    "reasoning_content": "hm\n",
    "content": " I run it.\n\n",
    "tool_calls": [call("run", '{"cmd": "ls  -l", "timeout": 5000.0}', id="call_1"), call("look", "", id="call_2")],
}
SIGNED = b"rolltape_r1"


def client_of(url: str, **options: Any) -> Any:
    return genai.Client(api_key="any", http_options=types.HttpOptions(base_url=url, **options))


@pytest.fixture(scope="module")
def server() -> Iterator[CannedServer]:
    with canned_server(GEMINI, GEMINI.routes[0].path) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: CannedServer) -> Any:
    return client_of(server.url)


def asked(client: Any, server: CannedServer, contents: Any = "go", **config: Any) -> Any:
    """What is read from a request that the SDK sends."""
    client.models.generate_content(model="tiny", contents=contents, config=types.GenerateContentConfig(**config))
    return server.asks[-1]


def chunks(client: Any) -> list[Any]:
    return list(client.models.generate_content_stream(model="tiny", contents="go"))


def joined(responses: list[Any]) -> dict[str, Any]:
    """What a reply says: texts in a row are one, an empty one is none."""
    parts: list[dict[str, Any]] = []
    for response in responses:
        for part in response.candidates[0].content.parts:
            plain = part.model_dump(exclude_none=True)
            if parts and "text" in plain and "text" in parts[-1] and plain.get("thought") == parts[-1].get("thought"):
                parts[-1]["text"] += plain["text"]
            else:
                parts.append(plain)
    last = responses[-1]
    usage = last.usage_metadata.model_dump(exclude_none=True)
    return {"parts": parts, "finish": last.candidates[0].finish_reason, "usage": usage, "id": last.response_id}


def test_a_reply_is_a_response_of_the_sdk(client: Any, server: CannedServer) -> None:
    server.answer = canned(FULL)
    response = client.models.generate_content(model="tiny", contents="go")
    assert_known(response)
    assert response.model_dump(
        exclude_none=True, exclude={"sdk_http_response", "automatic_function_calling_history"}
    ) == {
        "candidates": [
            {
                "content": {
                    "parts": [
                        {"text": "hm\n", "thought": True},
                        {"text": " I run it.\n\n", "thought_signature": SIGNED},
                        {
                            "function_call": {
                                "id": "call_1",
                                "name": "run",
                                "args": {"cmd": "ls  -l", "timeout": 5000.0},
                            },
                            "thought_signature": SIGNED,
                        },
                        {"function_call": {"id": "call_2", "name": "look", "args": {}}},
                    ],
                    "role": "model",
                },
                "finish_reason": types.FinishReason.STOP,
                "index": 0,
            }
        ],
        "model_version": "tiny",
        "response_id": "r1",
        "usage_metadata": {
            "prompt_token_count": 100,
            "cached_content_token_count": 60,
            "candidates_token_count": 18,
            "thoughts_token_count": 7,
            "total_token_count": 125,
        },
    }


REPLIES = {
    "full": canned(FULL),
    "text": canned({"content": "fine"}),
    "long": canned({"content": "two\nlines\u2028apart\x85 \U0001f600" * 9000}),
    "long-call": canned({"content": None, "tool_calls": [call("write", json.dumps({"text": "é" * 50_000}))]}),
    "parts": canned({"content": [{"type": "text", "text": "in "}, {"type": "text", "text": "parts"}]}),
    "invalid": canned({"content": "\ud800 no Unicode"}),
    "cut-off": canned({"reasoning_content": "cut of", "content": ""}, finish=Finish.LENGTH),
    "stop-string": canned({"content": "a"}, finish=Finish.STOP_STRING, stop_string="\n\n"),
    "over-budget": canned({"content": None}, finish=Finish.LENGTH, room=0),
    "no-object": canned({"content": None, "tool_calls": [call("run", "[1]")]}),
}


@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES)
def test_streamed_is_the_same_as_whole(client: Any, server: CannedServer, reply: GatewayTurn) -> None:
    server.answer = reply
    whole = client.models.generate_content(model="tiny", contents="go")
    assert joined(chunks(client)) == joined([whole])
    assert server.asks[-1].stream
    assert not server.asks[-2].stream


def test_the_async_client_gets_the_same(server: CannedServer) -> None:
    server.answer = canned(FULL)

    async def both() -> tuple[Any, list[Any]]:
        async with client_of(server.url).aio as client:
            whole = await client.models.generate_content(model="tiny", contents="go")
            stream = await client.models.generate_content_stream(model="tiny", contents="go")
            return whole, [chunk async for chunk in stream]

    whole, streamed = asyncio.run(both())
    assert joined(streamed) == joined([whole])


@pytest.mark.parametrize(
    ("finish", "reason"),
    [
        (Finish.STOP, "STOP"),
        (Finish.STOP_STRING, "STOP"),
        (Finish.LENGTH, "MAX_TOKENS"),
        (Finish.ABORT, "OTHER"),
        (Finish.ERROR, "OTHER"),
    ],
)
def test_the_finish_reason_says_how_it_ended(client: Any, server: CannedServer, finish: Finish, reason: str) -> None:
    server.answer = canned({"content": "a"}, finish=finish)
    assert chunks(client)[-1].candidates[0].finish_reason == types.FinishReason(reason)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES)
def test_what_a_chat_sends_back_means_what_it_got(
    client: Any, server: CannedServer, reply: GatewayTurn, stream: bool
) -> None:
    server.answer = reply
    chat = client.chats.create(model="tiny")
    if stream:
        list(chat.send_message_stream("go"))
    else:
        chat.send_message("go")
    chat.send_message("on")
    first, echo, last = server.asks[-1].messages
    assert (first["content"], last["content"]) == ("go", "on")
    meant = canonical_message(json.loads(json.dumps(reply.message).replace("\\ud800", "\\ufffd")))
    if isinstance(meant.get("content"), list):
        meant["content"] = "in parts"
    assert canonical_message(echo) == meant
    assert echo["id"] == "r1"


STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    413: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


@pytest.mark.parametrize(("status", "word"), STATUSES.items())
def test_a_refusal_is_the_sdks_error(server: CannedServer, status: int, word: str) -> None:
    client = client_of(server.url, retry_options=types.HttpRetryOptions(attempts=1))
    server.answer = Refusal(status, "the session has ended")
    for ask in (lambda: client.models.generate_content(model="tiny", contents="go"), lambda: chunks(client)):
        with pytest.raises(errors.ClientError if status < 500 else errors.ServerError) as raised:
            ask()
        assert (raised.value.code, raised.value.status) == (status, word)
        assert raised.value.message == "the session has ended"


def test_a_refusal_that_is_final_says_so_to_gemini_cli_which_would_ask_on() -> None:
    """By its header the SDK would not know, nor would gemini-cli, which looks for a reason among the details."""
    reasons = {
        status: [
            detail["reason"]
            for detail in json.loads(GEMINI.error(status, "no", final=True))["error"].get("details", ())
        ]
        for status in (400, 429, 502, 503)
    }
    assert reasons == {400: [], 429: ["MODEL_CAPACITY_EXHAUSTED"], 502: [], 503: ["MODEL_CAPACITY_EXHAUSTED"]}
    for status in (429, 503):  # an engine is busy, and gemini-cli asks again
        assert "details" not in json.loads(GEMINI.error(status, "no"))["error"]


def test_an_error_within_a_stream_is_raised(client: Any, server: CannedServer) -> None:
    server.answer = Refusal(502, "the engine died: {", in_stream=True)
    with pytest.raises(errors.ServerError) as raised:
        chunks(client)
    assert (raised.value.code, raised.value.message) == (502, "the engine died: {")


def test_sampling_and_tools_are_read(client: Any, server: CannedServer) -> None:
    server.answer = canned({"content": "a"})
    schema = types.Schema(
        type=types.Type.OBJECT,
        properties={
            "cmd": types.Schema(type=types.Type.STRING, nullable=True),
            "n": types.Schema(type=types.Type.INTEGER),
        },
        property_ordering=["n", "cmd"],
        required=["cmd"],
    )
    look = types.FunctionDeclaration(name="look", parameters_json_schema={"type": "object", "x_y": 1})
    run = types.FunctionDeclaration(name="run", description="Run it.", parameters=schema)
    ask = asked(
        client,
        server,
        system_instruction="Be brief.",
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        seed=3,
        max_output_tokens=7,
        stop_sequences=["##", "\n"],
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        candidate_count=1,
        response_modalities=["TEXT"],
        thinking_config=types.ThinkingConfig(thinking_budget=0),
        safety_settings=[{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}],
        tools=[types.Tool(function_declarations=[run, look])],
        tool_config={"function_calling_config": {"mode": "ANY", "allowed_function_names": ["run"]}},
        automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
    )
    assert (ask.api, ask.model) == ("gemini", "tiny")
    assert ask.client.startswith("google-genai-sdk/")
    assert ask.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "go"}]
    assert ask.sampling == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        seed=3,
        max_tokens=7,
        stop=("##", "\n"),
        presence_penalty=0.5,
        frequency_penalty=-0.5,
    )
    parameters = ask.tools[0]["function"].pop("parameters")
    assert parameters == {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "cmd": {"type": ["string", "null"]}},
        "required": ["cmd"],
    }
    assert list(parameters["properties"]) == ["n", "cmd"]
    assert ask.tools == [
        {"type": "function", "function": {"name": "run", "description": "Run it."}},
        {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "x_y": 1}}},
    ]
    assert (ask.tool_choice, ask.thinking, ask.ignored_params) == (ToolChoice("required", "run"), False, ())


def test_a_schema_that_the_sdk_makes_of_a_type_is_a_json_schema(client: Any, server: CannedServer) -> None:
    server.answer = canned({"content": '["a"]'})
    ask = asked(client, server, response_mime_type="application/json", response_schema=list[str])
    wanted = {"type": "array", "items": {"type": "string"}}
    assert ask.output_schema == OutputSchema("generationConfig.responseSchema", wanted | {"title": "Placeholder"})
    ask = asked(client, server, response_mime_type="application/json", response_json_schema=wanted)
    assert ask.output_schema == OutputSchema("generationConfig.responseJsonSchema", wanted)


def test_a_bytes_part_becomes_a_placeholder_and_is_kept(client: Any, server: CannedServer) -> None:
    server.answer = canned({"content": "a"})
    image = types.Part.from_bytes(data=b"abc", mime_type="image/png")
    uploaded = types.Part.from_uri(file_uri="gs://bucket/a.pdf", mime_type="application/pdf")
    ask = asked(client, server, ["See.", image, uploaded])
    text, *media = ask.messages[0]["content"]
    assert text == {"type": "text", "text": "See."}
    assert [part["text"] for part in media] == [
        "[image: image/png, 3 bytes; this model reads text only]",
        "[document: gs://bucket/a.pdf; this model reads text only]",
    ]
    assert media[0]["media"] == {"inlineData": {"data": "YWJj", "mimeType": "image/png"}}
    assert ask.media == ("contents[0].parts[1]", "contents[0].parts[2]")

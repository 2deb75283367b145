"""OpenAI's SDK against a server made of the Chat Completions wire: what it sends is read, what it gets it takes."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, cast

import openai
import pytest
from hypothesis import given, settings
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from canned_wire import CannedServer, Refusal, call, canned, canned_server, streamed, whole
from rolltape.gateway.request import ChatRequest, OutputSchema, SamplingParams, ToolChoice
from rolltape.gateway.turn.gateway_turn import GatewayTurn
from rolltape.gateway.wire.chat.dialect import CHAT
from rolltape.records.messages import canonical_message
from rolltape.records.turn import Finish
from wire_bodies import broken, read_or_refused, refusal, reply_messages

USER = {"role": "user", "content": "go"}
FULL = {
    "reasoning_content": "hm\n",
    "content": " I run it.\n\n",
    "tool_calls": [call("run", '{"cmd": "ls  -l", "timeout": 5000.0}'), call("look", "", id="call_2")],
}
RUN = {"type": "function", "function": {"name": "run", "description": "Runs.", "parameters": {"type": "object"}}}
PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Patches."}}


@pytest.fixture(scope="module")
def server() -> Iterator[CannedServer]:
    with canned_server(CHAT, "/v1/chat/completions") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: CannedServer) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as sdk:
        yield sdk


def read(**fields: Any) -> ChatRequest:
    return CHAT.read(json.dumps({"model": "tiny", "messages": [USER]} | fields).encode())


def chunks(ask: ChatRequest, reply: GatewayTurn) -> list[dict[str, Any]]:
    events = streamed(CHAT, ask, reply)
    lines = [event.removeprefix(b"data: ") for event in events.split(b"\n\n") if event]
    assert lines[-1] == b"[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def accumulated(ask: ChatRequest, reply: GatewayTurn) -> Any:
    state = cast("Any", ChatCompletionStreamState())
    for chunk in chunks(ask, reply):
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    return state.get_final_completion()


def plain(message: Any) -> dict[str, Any]:
    """A message of the SDK as its users send it back."""
    sent: dict[str, Any] = message.to_dict(exclude_none=True)
    for one in sent.get("tool_calls") or ():
        for key in ("index", "parsed_arguments"):
            one.pop(key, None)
            one.get("function", {}).pop(key, None)
    return sent


def test_a_reply_is_a_completion_of_the_sdk(client: Any, server: CannedServer) -> None:
    server.answer = canned(FULL)
    completion = client.chat.completions.create(model="tiny", messages=[USER])
    ChatCompletion.model_validate(completion.to_dict(), strict=True)
    assert completion.to_dict() == {
        "id": "chatcmpl-r1",
        "object": "chat.completion",
        "created": 1,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "refusal": None, **FULL},
                "logprobs": None,
                "finish_reason": "tool_calls",
            }
        ],
        "usage": {
            "prompt_tokens": 100,
            "completion_tokens": 25,
            "total_tokens": 125,
            "prompt_tokens_details": {"cached_tokens": 60},
            "completion_tokens_details": {"reasoning_tokens": 7},
        },
    }


@pytest.mark.parametrize("message", [FULL, {"content": "hi"}, {"content": ""}, {**FULL, "content": ""}])
def test_the_sdk_puts_a_stream_together_to_the_whole(
    client: Any, server: CannedServer, message: dict[str, Any]
) -> None:
    server.answer = canned(message)
    whole = client.chat.completions.create(model="tiny", messages=[USER])
    asking = {"model": "tiny", "messages": [USER], "stream_options": {"include_usage": True}}
    with client.chat.completions.stream(**asking) as stream:
        streamed = stream.get_final_completion()
    assert plain(streamed.choices[0].message) == plain(whole.choices[0].message)
    assert streamed.choices[0].finish_reason == whole.choices[0].finish_reason
    assert streamed.usage.to_dict() == whole.usage.to_dict()
    assert streamed.id == whole.id


def test_the_async_sdk_takes_replies_and_streams(server: CannedServer) -> None:
    server.answer = canned(FULL)

    async def both() -> tuple[Any, list[Any]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any") as sdk:
            asking: Any = {"model": "tiny", "messages": [USER]}
            whole = await sdk.chat.completions.create(**asking)
            stream = await sdk.chat.completions.create(**asking, stream=True)
            return whole, [chunk async for chunk in stream]

    whole, received = asyncio.run(both())
    assert whole.choices[0].message.content == " I run it.\n\n"
    assert [chunk.choices[0].finish_reason for chunk in received] == [None] * (len(received) - 1) + ["tool_calls"]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in received) == " I run it.\n\n"


@pytest.mark.parametrize(("client", "chunked"), [("OpenAI/Python", [[0], [1]]), ("", [[0, 1]])])
def test_each_call_has_a_chunk_but_for_clients_that_take_one_chunk_alone(client: str, chunked: list[list[int]]) -> None:
    ask = CHAT.read(json.dumps({"model": "m", "messages": [USER]}).encode(), {"User-Agent": client})
    found = [chunk["choices"][0]["delta"].get("tool_calls") for chunk in chunks(ask, canned(FULL))]
    assert [[one["index"] for one in calls] for calls in found if calls] == chunked


def test_every_chunk_is_one_of_the_sdk() -> None:
    for chunk in chunks(read(stream_options={"include_usage": True}), canned(FULL)):
        ChatCompletionChunk.model_validate(chunk, strict=True)


def test_usage_is_streamed_only_if_asked_for() -> None:
    asked = [chunk.get("usage") for chunk in chunks(read(stream_options={"include_usage": True}), canned(FULL))]
    assert [usage is not None for usage in asked] == [False] * 5 + [True]
    assert not any("usage" in chunk for chunk in chunks(read(), canned(FULL)))


@pytest.mark.parametrize(
    ("finish", "message", "reason"),
    [
        (Finish.STOP, {"content": "hi"}, "stop"),
        (Finish.STOP_STRING, {"content": "hi"}, "stop"),
        (Finish.STOP, FULL, "tool_calls"),
        (Finish.LENGTH, {"content": "hi"}, "length"),
        (Finish.ABORT, {"content": "hi"}, "stop"),
    ],
)
def test_how_a_reply_ended_is_said_in_the_words_of_the_api(
    finish: Finish, message: dict[str, Any], reason: str
) -> None:
    reply = canned(message, finish=finish)
    assert json.loads(whole(CHAT, read(), reply))["choices"][0]["finish_reason"] == reason
    assert chunks(read(), reply)[-1]["choices"][0]["finish_reason"] == reason


@settings(max_examples=150, deadline=None)
@given(reply_messages())
def test_an_echo_means_what_the_reply_said(message: dict[str, Any]) -> None:
    reply = canned(message)
    once = ChatCompletion.model_validate_json(whole(CHAT, read(), reply)).choices[0].message
    pieces = accumulated(read(), reply).choices[0].message
    for sent in (plain(once), plain(pieces)):
        echoed = read(messages=[USER, sent]).messages[1]
        assert canonical_message(echoed) == canonical_message(reply.message)
        assert [one["id"] for one in echoed.get("tool_calls", [])] == [
            one["id"] for one in message.get("tool_calls", [])
        ]


def test_a_call_of_a_custom_tool_goes_out_and_comes_back_as_free_text() -> None:
    ask = read(tools=[RUN, PATCH])
    assert ask.custom_tools == {"patch"}
    assert ask.tools is not None
    assert ask.tools[1]["function"]["parameters"]["required"] == ["input"]
    reply = canned({"content": "", "tool_calls": [call("patch", '{"input": "*** é\\n"}'), call("run", "{}", id="c2")]})
    sent = json.loads(whole(CHAT, ask, reply))["choices"][0]["message"]
    assert sent["tool_calls"][0] == {"id": "call_1", "type": "custom", "custom": {"name": "patch", "input": "*** é\n"}}
    assert sent["tool_calls"][1]["type"] == "function"
    assert canonical_message(read(messages=[USER, sent]).messages[1]) == canonical_message(reply.message)


def test_a_call_of_a_custom_tool_with_other_arguments_goes_back_as_the_model_wrote_it() -> None:
    reply = canned({"content": "", "tool_calls": [call("patch", '{"input": "x", "more": 1}')]})
    sent = json.loads(whole(CHAT, read(tools=[PATCH]), reply))["choices"][0]["message"]
    assert sent["tool_calls"] == reply.message["tool_calls"]


def test_a_whole_conversation_is_kept_as_it_came() -> None:
    conversation = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]},
        {"role": "developer", "content": "And kind."},
        {"role": "user", "content": "go", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call("run", '{"cmd" : "ls"}')]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
    ]
    assert read(messages=conversation).messages == conversation


def test_reasoning_comes_back_under_either_name() -> None:
    for name in ("reasoning", "reasoning_content"):
        message = {"role": "assistant", "content": "x", name: "hm"}
        expected = {"role": "assistant", "content": "x", "reasoning_content": "hm"}
        assert read(messages=[USER, message]).messages[1] == expected


def test_sampling_parameters_are_read() -> None:
    ask = read(temperature=0, top_p=0.5, top_k=-1, min_p=0.1, seed=7, max_tokens=9, stop="a", presence_penalty=1)
    assert ask.sampling == SamplingParams(
        temperature=0, top_p=0.5, top_k=-1, min_p=0.1, seed=7, max_tokens=9, stop=("a",), presence_penalty=1
    )
    more = read(max_tokens=9, max_completion_tokens=5.0, stop=["a", "b"], frequency_penalty=-1, repetition_penalty=1.1)
    assert more.sampling == SamplingParams(max_tokens=5, stop=("a", "b"), frequency_penalty=-1, repetition_penalty=1.1)
    assert ask.ignored_params == more.ignored_params == ()


def test_tools_and_their_choice_are_read() -> None:
    assert read(tools=[RUN]).tools == [RUN]
    assert read(tools=[RUN], tool_choice="none", parallel_tool_calls=False).tool_choice == ToolChoice("none")
    named = {"type": "function", "function": {"name": "run"}}
    assert read(tools=[RUN], tool_choice=named).tool_choice == ToolChoice("required", "run")
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    assert read(tools=[RUN, PATCH], tool_choice=allowed).tool_choice == ToolChoice("required", "run")
    loose = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}}
    ask = read(tools=[RUN, PATCH], tool_choice=loose)
    assert ask.tool_choice == ToolChoice("auto")
    assert ask.ignored_params == ("tool_choice.allowed_tools.tools: all tools stay offered",)


def test_thinking_is_asked_for_by_effort_or_outright() -> None:
    assert read().thinking is None
    assert read(reasoning_effort="none").thinking is False
    assert read(reasoning_effort="minimal").thinking is True
    assert read(reasoning_effort="high", chat_template_kwargs={"enable_thinking": False}).thinking is False
    assert read(reasoning_effort="high", thinking={"type": "disabled"}).thinking is False  # as kimi-cli sends it
    assert read(thinking={"type": "enabled"}, chat_template_kwargs={"enable_thinking": False}).thinking is False
    asked = read(thinking={"type": "enabled"})
    assert (asked.thinking, asked.ignored_params) == (True, ())
    for unknown in ({"type": ["auto"]}, {"type": "auto"}, {}, True):
        asked = read(thinking=unknown)
        assert (asked.thinking, asked.ignored_params) == (None, ("thinking: not known here; ignored",))


def test_what_cannot_be_honored_is_named() -> None:
    ask = read(
        top_logprobs=2,
        logit_bias={"5": 1},
        response_format={"type": "json_object"},
        verbosity="low",
        chat_template_kwargs={"tone": "x"},
        tools=[{"type": "function", "function": {"name": "run", "strict": True}}],
        user="ann",
        store=False,
        metadata={"a": "b"},
        **{"ö\r\nx: y": 1},
    )
    assert ask.output_schema == OutputSchema("response_format", {"type": "object"})
    assert ask.strict_tools == {"run"}
    assert ask.ignored_params == (
        "chat_template_kwargs.tone: not known here; ignored",
        "top_logprobs: ignored without logprobs",
        "logit_bias: ignored",
        "verbosity: not known here; ignored",
        "\\xf6\\r\\nx: y: not known here; ignored",
    )


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "messages is missing"),
        ({"messages": []}, "messages is []; give at least one"),
        ({"messages": "hi"}, "messages is 'hi'; give a list"),
        ({"messages": [USER, 5]}, "messages[1] is 5; give an object"),
        ({"messages": [{"role": "function"}]}, "messages[0].role is 'function'; functions were replaced by tools"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content is missing"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id is missing"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"arguments": ""}}]}]},
            "messages[0].tool_calls[0].function.name is missing",
        ),
        ({"messages": [USER], "n": 33}, "n is 33; give a whole number of at least 1 and of at most 32"),
        ({"messages": [USER], "functions": []}, "functions was replaced by tools"),
        ({"messages": [USER], "temperature": -1}, "temperature is -1; give a number of at least 0"),
        ({"messages": [USER], "max_tokens": 0.5}, "max_tokens is 0.5; give a whole number of at least 1"),
        ({"messages": [USER], "seed": 10**400}, "seed is 1000000"),
        ({"messages": [USER], "stop": [5]}, "stop[0] is 5; give a text"),
        ({"messages": [USER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function."),
        ({"messages": [USER], "stream": "yes"}, "stream is 'yes'; give true or false"),
        ({"messages": [USER], "model": ""}, "model is ''; give a text that is not empty"),
    ],
)
def test_a_bad_request_is_refused_by_its_path(body: dict[str, Any], said: str) -> None:
    assert refusal(CHAT, **({"model": "tiny"} | body)).startswith(said)


@settings(max_examples=300, deadline=None)
@given(
    broken(
        {
            "model": "tiny",
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "x"}]},
                {"role": "assistant", "content": "x", "tool_calls": [call("run", "{}")], "reasoning_content": "x"},
                {"role": "tool", "tool_call_id": "call_1", "content": "x"},
            ],
            "tools": [RUN, PATCH],
            "tool_choice": {"type": "function", "function": {"name": "run"}},
            "stream_options": {"include_usage": True},
            "response_format": {"type": "json_schema", "json_schema": {}},
            "chat_template_kwargs": {"enable_thinking": True},
            "temperature": 1,
            "max_tokens": 5,
            "stop": ["x"],
            "reasoning_effort": "low",
        }
    )
)
def test_a_broken_body_is_read_or_refused_and_never_raises_otherwise(raw: bytes) -> None:
    ask = read_or_refused(CHAT, raw)
    if ask is not None:
        assert all(header.isascii() and header.isprintable() for header in ask.ignored_params)
        json.dumps(ask.messages, ensure_ascii=False).encode()


def test_text_that_is_no_unicode_is_replaced_and_said() -> None:
    ask = CHAT.read(b'{"model": "tiny", "messages": [{"role": "user", "content": "a\\ud800b"}]}')
    assert ask.messages == [{"role": "user", "content": "a\ufffdb"}]
    assert ask.repaired
    assert not read().repaired


def test_the_sdk_raises_what_the_gateway_refuses(client: Any, server: CannedServer) -> None:
    server.answer = Refusal(429, "enough")
    with pytest.raises(openai.RateLimitError, match="enough"):
        client.chat.completions.create(model="tiny", messages=[USER])
    with pytest.raises(openai.BadRequestError, match="messages is missing"):
        client.chat.completions.create(model="tiny", messages=None)


def test_the_sdk_raises_an_error_within_a_stream(client: Any, server: CannedServer) -> None:
    server.answer = Refusal(502, "the engine is gone", in_stream=True)
    with pytest.raises(openai.APIError, match="the engine is gone"):
        list(client.chat.completions.create(model="tiny", messages=[USER], stream=True))


def test_names_predictions_and_storage_are_named_and_metadata_is_kept() -> None:
    named = {"role": "user", "name": "ann", "content": "hi"}
    ask = read(messages=[named, named], prediction={"type": "content", "content": "x"}, store=True, metadata={"a": "b"})
    assert ask.metadata == {"a": "b"}
    assert ask.ignored_params == (
        "messages: a name is not shown to the model",
        "store: the turn is on the tape, and cannot be fetched by its id",
        "prediction: ignored",
    )
    assert read(store=False).ignored_params == ()


def test_a_refusal_beside_the_content_is_kept_and_named() -> None:
    refused = {"role": "assistant", "content": None, "refusal": "No."}
    ask = read(messages=[USER, refused, USER])
    assert ask.messages[1] == refused
    assert ask.ignored_params == ("messages: a refusal beside the content is not shown to the model",)
    part = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert read(messages=[USER, part, USER]).messages[1]["content"] == [{"type": "text", "text": "No."}]


def test_audio_video_and_files_become_placeholders() -> None:
    sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    paper = {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,AAAAAA=="}}
    film = {"type": "video_url", "video_url": {"url": "https://films.example/a.mp4"}}
    ask = read(messages=[{"role": "user", "content": [film, sound, paper]}])
    assert [part["text"] for part in ask.messages[0]["content"]] == [
        "[video: https://films.example/a.mp4; this model reads text only]",
        "[audio: wav, 3 bytes; this model reads text only]",
        "[document: a.pdf, application/pdf, 4 bytes; this model reads text only]",
    ]

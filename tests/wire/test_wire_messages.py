"""Anthropic's SDK against a server made of the wire: what it sends is read, what it gets it takes."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, cast

import anthropic
import pytest
from anthropic.types import Message as SdkMessage
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter

from canned_wire import CannedServer, Refusal, assert_known, call, canned, canned_server
from canned_wire import streamed as streamed_events
from rolltape.gateway.request import SamplingParams, ToolChoice
from rolltape.gateway.turn.gateway_turn import GatewayTurn
from rolltape.gateway.wire.messages.dialect import MESSAGES
from rolltape.records.messages import canonical_message
from rolltape.records.turn import Finish

USER = {"role": "user", "content": "go"}
FULL = {
    "reasoning_content": "hm\n",
    "content": " I run it.\n\n",
    "tool_calls": [call("run", '{"cmd": "ls  -l", "timeout": 5000.0}', id="toolu_1"), call("look", "", id="toolu_2")],
}


@pytest.fixture(scope="module")
def server() -> Iterator[CannedServer]:
    def counted(body: bytes) -> bytes:
        return MESSAGES.counted(len(MESSAGES.read_counting(body).messages))

    with canned_server(MESSAGES, "/v1/messages", count_tokens=counted) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: CannedServer) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key="any") as sdk:
        yield sdk


def asked(client: Any, server: CannedServer, **fields: Any) -> Any:
    """What is read from a request that the SDK sends."""
    client.messages.create(**({"model": "tiny", "max_tokens": 9, "messages": [USER]} | fields))
    return server.asks[-1]


def streamed(client: Any, **fields: Any) -> Any:
    with client.messages.stream(model="tiny", max_tokens=9, messages=[USER], **fields) as stream:
        return stream.get_final_message()


def dumped(message: Any) -> dict[str, Any]:
    """A message of the SDK as plain data; the fields that its stream helper adds to every message left out."""
    plain: dict[str, Any] = message.to_dict(exclude_none=True)
    return plain


def test_a_reply_is_a_message_of_the_sdk(client: Any, server: CannedServer) -> None:
    server.answer = canned(FULL)
    message = client.messages.create(model="tiny", max_tokens=9, messages=[USER])
    assert_known(SdkMessage.model_validate(message.to_dict(), strict=True))
    assert dumped(message) == {
        "id": "msg_r1",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [
            {"type": "thinking", "thinking": "hm\n", "signature": "rolltape_r1"},
            {"type": "text", "text": " I run it.\n\n"},
            {"type": "tool_use", "id": "toolu_1", "name": "run", "input": {"cmd": "ls  -l", "timeout": 5000.0}},
            {"type": "tool_use", "id": "toolu_2", "name": "look", "input": {}},
        ],
        "stop_reason": "tool_use",
        "usage": {
            "input_tokens": 40,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 60,
            "output_tokens": 25,
            "output_tokens_details": {"thinking_tokens": 7},
        },
    }


@pytest.mark.parametrize(
    "reply",
    [
        canned(FULL),
        canned({"content": "fine"}),
        canned({"content": "two\nlines\u2028apart\x85 \U0001f600" * 9000}),
        canned({"content": None, "tool_calls": [call("write", json.dumps({"text": "é" * 50_000}))]}),
        canned({"content": [{"type": "text", "text": "in "}, {"type": "text", "text": "parts"}]}),
        canned({"content": "\ud800 no Unicode"}),
        canned({"reasoning_content": "cut of", "content": ""}, finish=Finish.LENGTH),
        canned({"content": "a"}, finish=Finish.STOP_STRING, stop_string="\n\n"),
        canned({"content": None}, finish=Finish.LENGTH, room=0),
    ],
    ids=["full", "text", "long", "long-call", "parts", "invalid", "cut-off", "stop-string", "over-budget"],
)
def test_streamed_is_the_same_as_whole(client: Any, server: CannedServer, reply: GatewayTurn) -> None:
    server.answer = reply
    whole = client.messages.create(model="tiny", max_tokens=9, messages=[USER])
    assert dumped(streamed(client)) == dumped(whole)


def test_the_async_client_gets_the_same(server: CannedServer) -> None:
    server.answer = canned(FULL)

    async def both() -> tuple[Any, Any]:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="any") as sdk:
            client = cast("Any", sdk)
            whole = await client.messages.create(model="tiny", max_tokens=9, messages=[USER])
            async with client.messages.stream(model="tiny", max_tokens=9, messages=[USER]) as stream:
                return whole, await stream.get_final_message()

    whole, final = asyncio.run(both())
    assert dumped(final) == dumped(whole)


def test_each_event_is_one_of_the_sdk(client: Any, server: CannedServer) -> None:
    server.answer = canned(FULL)
    events = list(client.messages.create(model="tiny", max_tokens=9, messages=[USER], stream=True))
    strict: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    for event in events:
        assert_known(strict.validate_python(event.to_dict(), strict=True))
    kinds = [event.type for event in events]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    in_pieces = [block[0], *[block[1]] * 3, block[2]]
    signed = [*in_pieces[:2], *in_pieces[1:]]
    assert kinds == ["message_start", *signed, *in_pieces, *block * 2, "message_delta", "message_stop"]  # no keepalive
    assert events[0].message.usage.cache_read_input_tokens == 60


def test_keepalives_are_pings_but_for_claude_code_which_does_not_count_those() -> None:
    body = json.dumps({"model": "m", "max_tokens": 1, "messages": [USER]}).encode()
    for client, sent in {
        "AsyncAnthropic/Python 0.60": b'"ping"',
        "claude-cli/2.1.197 (external)": b"message_delta",
    }.items():
        assert sent in MESSAGES.stream(canned({}), MESSAGES.read(body, {"User-Agent": client})).keepalive()


def test_no_event_line_is_longer_than_readers_take() -> None:
    ask = MESSAGES.read(json.dumps({"model": "m", "max_tokens": 1, "messages": [USER]}).encode())
    message = {"content": "\u2028" * 40_000, "tool_calls": [call("write", json.dumps({"text": "\U0001f600" * 40_000}))]}
    lines = streamed_events(MESSAGES, ask, canned(message), pieces=1).split(b"\n")
    assert max(map(len, lines)) < 2**17


@pytest.mark.parametrize(
    ("reply", "reason", "sequence"),
    [
        (canned({"content": "a"}), "end_turn", None),
        (canned({"content": "a", "tool_calls": [call("f", "{}")]}), "tool_use", None),
        (canned({"content": "a"}, finish=Finish.STOP_STRING, stop_string="##"), "stop_sequence", "##"),
        (canned({"content": "a", "tool_calls": [call("f", "{}")]}, finish=Finish.LENGTH), "max_tokens", None),
        (canned({"content": "a"}, finish=Finish.ABORT), "max_tokens", None),
        (canned({"content": ""}, finish=Finish.LENGTH, room=0), "model_context_window_exceeded", None),
    ],
)
def test_the_stop_reason_says_how_it_ended(
    client: Any, server: CannedServer, reply: GatewayTurn, reason: str, sequence: str | None
) -> None:
    server.answer = reply
    message = streamed(client)
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)


@pytest.mark.parametrize(
    "message", [FULL, {"content": " \n"}, {"reasoning_content": "hm", "content": "a"}, {"content": ""}]
)
def test_what_the_sdk_sends_back_means_what_it_got(client: Any, server: CannedServer, message: dict[str, Any]) -> None:
    server.answer = canned(message)
    for got in (client.messages.create(model="tiny", max_tokens=9, messages=[USER]), streamed(client)):
        echo = asked(client, server, messages=[USER, got.to_param(), USER]).messages[1]
        assert canonical_message(echo) == canonical_message(server.answer.message)


def test_an_empty_text_is_no_block(client: Any, server: CannedServer) -> None:
    server.answer = canned({"content": "", "tool_calls": [call("f", "{}")]})
    assert [block.type for block in streamed(client).content] == ["tool_use"]


@pytest.mark.parametrize(
    ("status", "error", "kind"),
    [
        (400, anthropic.BadRequestError, "invalid_request_error"),
        (401, anthropic.AuthenticationError, "authentication_error"),
        (403, anthropic.PermissionDeniedError, "permission_error"),
        (404, anthropic.NotFoundError, "not_found_error"),
        (429, anthropic.RateLimitError, "rate_limit_error"),
        (500, anthropic.InternalServerError, "api_error"),
        (502, anthropic.InternalServerError, "api_error"),
        (503, anthropic.ServiceUnavailableError, "api_error"),
        (529, anthropic.OverloadedError, "overloaded_error"),
    ],
)
def test_a_refusal_is_the_sdks_error(
    client: Any, server: CannedServer, status: int, error: type[anthropic.APIStatusError], kind: str
) -> None:
    server.answer = Refusal(status, "the session has ended")
    for stream in (False, True):
        with pytest.raises(error, match="the session has ended") as raised:
            client.messages.create(model="tiny", max_tokens=9, messages=[USER], stream=stream)
        assert raised.value.type == kind


def test_an_error_within_a_stream_is_raised_and_nothing_after_it(client: Any, server: CannedServer) -> None:
    server.answer = Refusal(502, "the engine died", in_stream=True)
    with pytest.raises(anthropic.APIStatusError, match="the engine died") as raised:
        streamed(client)
    assert raised.value.type == "api_error"


def test_a_body_that_cannot_be_honored_is_a_bad_request(client: Any, server: CannedServer) -> None:
    block = {"type": "container_upload", "file_id": "f"}
    with pytest.raises(anthropic.BadRequestError) as raised:
        asked(client, server, messages=[{"role": "user", "content": [{"type": "text", "text": "see"}, block]}])
    said = "messages[0].content[1].type is 'container_upload'; blocks of this type are not supported here"
    assert raised.value.api_message == said


def test_tokens_are_counted_of_any_conversation(client: Any) -> None:
    messages = [USER, {"role": "assistant", "content": "I begin"}]
    assert client.messages.count_tokens(model="tiny", system="short", messages=messages).input_tokens == 3


def test_sampling_and_tools_are_read(client: Any, server: CannedServer) -> None:
    server.answer = canned({"content": "a"})
    ask = asked(
        client,
        server,
        max_tokens=7,
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 40},
        stop_sequences=["##", "\n"],
        thinking={"type": "disabled"},
        metadata={"user_id": "u"},
        service_tier="auto",
        tool_choice={"type": "tool", "name": "run", "disable_parallel_tool_use": True},
        tools=[
            {
                "name": "run",
                "description": "Run it.",
                "input_schema": {"type": "object", "properties": {"cmd": {"type": "string"}}},
                "cache_control": {"type": "ephemeral"},
            },
            {"type": "custom", "name": "look", "input_schema": {"type": "object"}},
        ],
    )
    assert ask.sampling == SamplingParams(temperature=0.5, top_p=0.9, top_k=40, max_tokens=7, stop=("##", "\n"))
    assert ask.tools == [
        {
            "type": "function",
            "function": {
                "name": "run",
                "description": "Run it.",
                "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}},
            },
        },
        {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}},
    ]
    assert (ask.tool_choice, ask.parallel_tool_calls) == (ToolChoice("required", "run"), False)
    assert (ask.thinking, ask.stream, ask.output_schema, ask.ignored_params) == (False, False, None, ())

"""OpenAI's SDK against a server made of the Responses wire: what it sends is read, what it gets it takes."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, cast

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from canned_wire import CannedServer, Refusal, call, canned, canned_server, streamed
from canned_wire import whole as whole_body
from rolltape.errors import BadRequest
from rolltape.gateway.request import ChatRequest, Effort, OutputSchema, SamplingParams, ToolChoice
from rolltape.gateway.turn.gateway_turn import GatewayTurn
from rolltape.gateway.wire.responses.dialect import RESPONSES
from rolltape.records.messages import canonical_message
from rolltape.records.turn import Finish
from wire_bodies import broken, read_or_refused, refusal, reply_messages

USER = {"role": "user", "content": "go"}
FULL = {
    "reasoning_content": "hm\n",
    "content": " I run it.\n\n",
    "tool_calls": [call("run", '{"cmd": "ls  -l", "timeout": 5000.0}'), call("look", "", id="call_2")],
}
RUN = {"type": "function", "name": "run", "description": "Runs.", "parameters": {"type": "object"}, "strict": False}
PATCH = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"}}
CREW = {"type": "namespace", "name": "crew", "description": "Agents.", "tools": [RUN, PATCH]}
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.mark.parametrize(
    ("item", "name"),
    [
        ({"type": "function_call_output", "call_id": "c", "output": "x"}, "role"),
        ({"type": "function_call_output", "call_id": "c", "output": "x"}, "content"),
        ({"type": "custom_tool_call_output", "call_id": "c", "output": "x"}, "tool_call_id"),
        ({"type": "message", "role": "assistant", "content": "x"}, "tool_calls"),
        ({"type": "message", "role": "assistant", "content": "x"}, "reasoning_content"),
    ],
)
@pytest.mark.parametrize("value", ["banana", 1, True, ["a"], {"a": 1}])
def test_a_stray_field_that_would_stand_for_a_part_of_the_message_is_refused(
    item: dict[str, Any], name: str, value: object
) -> None:
    with pytest.raises(BadRequest, match=rf"input\[1\]\.{name} is .*leave it out"):
        read(input=[USER, {**item, name: value}])


@pytest.fixture(scope="module")
def server() -> Iterator[CannedServer]:
    with canned_server(RESPONSES, "/v1/responses") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: CannedServer) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as sdk:
        yield sdk


def read(**fields: Any) -> ChatRequest:
    return RESPONSES.read(json.dumps({"model": "tiny", "input": "go"} | fields).encode())


def whole(ask: ChatRequest, reply: GatewayTurn) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(whole_body(RESPONSES, ask, reply))
    return said


def events(ask: ChatRequest, reply: GatewayTurn) -> list[dict[str, Any]]:
    sent = streamed(RESPONSES, ask, reply)
    found = []
    for event in sent.decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def echoed(items: list[dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    """The messages that are read when a client sends items back after its own message."""
    return read(input=[USER, *items], **fields).messages[1:]


def test_a_reply_is_a_response_of_the_sdk(client: Any, server: CannedServer) -> None:
    server.answer = canned(FULL)
    response = client.responses.create(model="tiny", input="go")
    Response.model_validate(response.to_dict(), strict=True)
    assert response.status == "completed"
    assert response.output_text == " I run it.\n\n"
    assert response.id == "resp_r1"
    assert [item.to_dict() for item in response.output] == [
        {
            "id": "rs_rt_r1",
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm\n"}],
            "encrypted_content": "rt1.aG0K",
            "status": "completed",
        },
        {
            "id": "msg_rt_r1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": " I run it.\n\n", "annotations": [], "logprobs": []}],
        },
        {
            "id": "fc_rt0_r1",
            "type": "function_call",
            "arguments": '{"cmd": "ls  -l", "timeout": 5000.0}',
            "call_id": "call_1",
            "name": "run",
            "status": "completed",
        },
        {
            "id": "fc_rt1_r1",
            "type": "function_call",
            "arguments": "",
            "call_id": "call_2",
            "name": "look",
            "status": "completed",
        },
    ]
    assert response.usage.to_dict() == {
        "input_tokens": 100,
        "input_tokens_details": {"cached_tokens": 60, "cache_write_tokens": 0},
        "output_tokens": 25,
        "output_tokens_details": {"reasoning_tokens": 7},
        "total_tokens": 125,
    }


def test_the_sdk_puts_a_stream_together_to_the_whole(client: Any, server: CannedServer) -> None:
    for message in (FULL, {"content": "hi"}, {"content": ""}, {"content": "", "reasoning_content": "hm"}):
        server.answer = canned(message)
        at_once = client.responses.create(model="tiny", input="go")
        with client.responses.stream(model="tiny", input="go") as stream:
            streamed = stream.get_final_response()
        # The helper adds empty fields for what it parsed.
        assert streamed.to_dict(exclude_none=True) == at_once.to_dict(exclude_none=True)


def test_the_async_sdk_takes_replies_and_streams(server: CannedServer) -> None:
    server.answer = canned(FULL)

    async def both() -> tuple[Any, list[Any]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any") as sdk:
            at_once = await sdk.responses.create(model="tiny", input="go")
            stream = await sdk.responses.create(model="tiny", input="go", stream=True)
            return at_once, [event async for event in stream]

    at_once, received = asyncio.run(both())
    assert received[-1].response.to_dict() == at_once.to_dict()
    assert [event.sequence_number for event in received] == list(range(len(received)))


def test_the_events_of_a_stream_are_those_of_the_api() -> None:
    ask = read(tools=[PATCH])
    reply = canned(
        {"content": "a", "reasoning_content": "b", "tool_calls": [call("patch", '{"input": "x"}'), call("run", "{}")]}
    )
    made = events(ask, reply)
    for event in made:
        EVENTS.validate_python(event, strict=True)
    assert [event["type"].removeprefix("response.") for event in made] == [
        "created",
        "in_progress",
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert [event["sequence_number"] for event in made] == list(range(len(made)))
    done = [event["item"] for event in made if event["type"] == "response.output_item.done"]
    assert done == whole(ask, reply)["output"]


def test_a_reply_cut_off_by_its_length_is_incomplete() -> None:
    reply = canned({"content": "hi"}, finish=Finish.LENGTH)
    last = events(read(), reply)[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"] == whole(read(), reply)
    assert whole(read(), reply)["output"][0]["status"] == "incomplete"
    Response.model_validate(whole(read(), reply), strict=True)


@settings(max_examples=150, deadline=None)
@given(reply_messages(), st.booleans())
def test_an_echo_means_what_the_reply_said(message: dict[str, Any], with_ids: bool) -> None:
    reply = canned(message)
    response = Response.model_validate_json(whole_body(RESPONSES, read(), reply))
    items = [item.to_dict(exclude_none=True) for item in response.output]
    if not with_ids:
        items = [{key: value for key, value in item.items() if key != "id"} for item in items]
    (back,) = echoed(items)
    assert canonical_message(back) == canonical_message(reply.message)
    assert back.get("id") == ("r1" if with_ids else None)
    assert [one["id"] for one in back.get("tool_calls", [])] == [one["id"] for one in message.get("tool_calls", [])]


@settings(max_examples=60, deadline=None)
@given(st.lists(reply_messages(), min_size=2, max_size=4))
def test_items_of_replies_that_follow_on_each_other_are_told_apart_by_their_ids(
    messages: list[dict[str, Any]],
) -> None:
    replies = [canned(message, id=f"r_{index}") for index, message in enumerate(messages)]
    items = [item for reply in replies for item in whole(read(), reply)["output"]]
    back = echoed(items)
    assert [canonical_message(one) for one in back] == [canonical_message(reply.message) for reply in replies]


@pytest.mark.parametrize("kept", ["content", "encrypted_content"])
def test_reasoning_comes_back_by_either_way(kept: str) -> None:
    item = whole(read(), canned(FULL))["output"][0]
    part = {"id": item["id"], "type": "reasoning", "summary": [], kept: item[kept]}
    assert echoed([part])[0]["reasoning_content"] == "hm\n"


def test_reasoning_that_another_server_encrypted_is_kept_unread() -> None:
    (message,) = echoed([{"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}])
    assert message == {"role": "assistant", "content": None, "encrypted_content": "gAAA"}


def test_items_of_another_server_are_put_together_by_their_order() -> None:
    items: list[dict[str, Any]] = [
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "run", "arguments": "{}"},
        {"type": "function_call", "id": "fc_2", "call_id": "c2", "name": "run", "arguments": "{}"},
        {"type": "message", "id": "msg_2", "role": "assistant", "content": "b", "phase": "final_answer"},
    ]
    first, second = echoed(items)
    assert first == {
        "role": "assistant",
        "content": "a",
        "reasoning_content": "hm",
        "tool_calls": [call("run", "{}", id="c1"), call("run", "{}", id="c2")],
        "id": "msg_1",
    }
    assert second == {"role": "assistant", "content": "b", "id": "msg_2", "phase": "final_answer"}


def test_a_request_of_codex_is_read() -> None:
    ask = read(
        instructions="Be brief.",
        input=[
            {"type": "message", "id": "msg_a", "role": "developer", "content": [{"type": "input_text", "text": "d"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in ("a", "b")]},
            {"type": "function_call", "call_id": "c1", "name": "run", "namespace": "crew", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "ok"}]},
            {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
        ],
        tools=[RUN, CREW, {"type": "web_search"}],
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"effort": "high", "summary": "auto"},
        store=False,
        stream=True,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        client_metadata={"a": "b"},
        text={"verbosity": "low"},
    )
    assert ask.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "d", "id": "msg_a"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call("crew__run", "{}", id="c1")]},
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
        {"role": "assistant", "content": None, "tool_calls": [call("patch", '{"input": "x"}', id="c2")]},
        {"role": "tool", "tool_call_id": "c2", "content": "done"},
    ]
    assert [tool["function"]["name"] for tool in ask.tools or ()] == ["run", "crew__run", "crew__patch"]
    assert (ask.tools or [])[0] == {
        "type": "function",
        "function": {"name": "run", "description": "Runs.", "parameters": {"type": "object"}, "strict": False},
    }
    assert ask.custom_tools == {"crew__patch"}
    assert (ask.thinking, ask.effort) == (True, Effort("reasoning.effort", "high"))
    assert ask.stream
    assert ask.ignored_params == (
        "tools: the grammar of 'crew__patch' is shown to the model and not enforced",
        "tools: 'web_search' is not offered here",
        "reasoning.summary: the reasoning itself is given",
        "text.verbosity: not known here; ignored",
    )


def test_calls_of_custom_and_namespaced_tools_go_out_and_come_back() -> None:
    ask = read(tools=[RUN, PATCH, CREW])
    calls = [call("patch", '{"input": "é"}'), call("crew__run", "{}", id="c2"), call("crew__patch", '{"input": ""}')]
    reply = canned({"content": "", "tool_calls": calls})
    items = whole(ask, reply)["output"]
    assert [(item["type"], item.get("namespace"), item["name"]) for item in items] == [
        ("custom_tool_call", None, "patch"),
        ("function_call", "crew", "run"),
        ("custom_tool_call", "crew", "patch"),
    ]
    assert canonical_message(echoed(items)[0]) == canonical_message(reply.message)


def test_a_call_of_a_custom_tool_with_other_arguments_goes_back_as_the_model_wrote_it() -> None:
    reply = canned({"content": "", "tool_calls": [call("patch", '{"inputs": "x"}')]})
    (item,) = whole(read(tools=[PATCH]), reply)["output"]
    assert (item["type"], item["arguments"]) == ("function_call", '{"inputs": "x"}')


def test_a_tool_that_openai_runs_is_named_whatever_its_fields_are() -> None:
    computer = {"type": "computer_use_preview", "environment": "linux", "display_width": 1, "display_height": 1}
    container = {"type": "shell", "environment": {"type": "container_auto"}}
    ask = read(tools=[computer, container])
    assert (ask.tools, ask.ignored_params) == (
        None,
        (
            "tools: 'computer_use_preview' is not offered here",
            "tools: 'shell' is not offered here",
        ),
    )


def test_metadata_comes_back_with_the_response() -> None:
    assert whole(read(metadata={"a": "b"}), canned({"content": "hi"}))["metadata"] == {"a": "b"}


def test_parameters_are_read() -> None:
    ask = read(temperature=0.5, top_p=0.9, max_output_tokens=50, parallel_tool_calls=False, tools=[RUN])
    assert ask.sampling == SamplingParams(temperature=0.5, top_p=0.9, max_tokens=50)
    assert not ask.parallel_tool_calls
    assert read(tools=[RUN], tool_choice={"type": "function", "name": "run"}).tool_choice == ToolChoice(
        "required", "run"
    )
    schema = read(text={"format": {"type": "json_schema", "name": "x", "schema": {}}})
    assert schema.output_schema == OutputSchema("text.format", {})
    assert schema.ignored_params == ()
    assert read(reasoning={"effort": "none"}).thinking is False


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"input": []}, "input is []; give a text, or a list of items"),
        ({"input": 5}, "input is 5; give a list"),
        ({"input": [5]}, "input[0] is 5; give an object"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0] refers to an item that no reply here has"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type is 'computer_call'; known are message, reasoning"),
        ({"input": [{"role": "bot", "content": "x"}]}, "input[0].role is 'bot'; known are system"),
        ({"input": [{"type": "function_call", "name": "x", "arguments": "{}"}]}, "input[0].call_id is missing"),
        ({"conversation": "conv_1"}, "conversation is 'conv_1'; it is not stored here"),
        ({"background": True}, "background is True; nothing is stored here"),
        ({"max_output_tokens": 0}, "max_output_tokens is 0; give a whole number of at least 1"),
        ({"tools": [{"type": "function"}]}, "tools[0].name is missing"),
        ({"tools": [{**RUN, "parameters": 5}]}, "tools[0].parameters is 5; give an object"),
    ],
)
def test_a_bad_request_is_refused_by_its_path(body: dict[str, Any], said: str) -> None:
    assert refusal(RESPONSES, **({"model": "tiny", "input": "go"} | body)).startswith(said)


@settings(max_examples=300, deadline=None)
@given(
    broken(
        {
            "model": "tiny",
            "instructions": "x",
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
                *cast("list[dict[str, Any]]", whole(read(tools=[PATCH]), canned(FULL))["output"]),
                {"type": "function_call_output", "call_id": "call_1", "output": "x"},
                {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "x"},
            ],
            "tools": [RUN, PATCH, CREW],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "run"}]},
            "reasoning": {"effort": "low", "summary": "auto"},
            "text": {"format": {"type": "json_schema"}},
            "include": ["reasoning.encrypted_content"],
            "truncation": "auto",
            "max_output_tokens": 5,
        }
    )
)
def test_a_broken_body_is_read_or_refused_and_never_raises_otherwise(raw: bytes) -> None:
    ask = read_or_refused(RESPONSES, raw)
    if ask is not None:
        assert all(header.isascii() and header.isprintable() for header in ask.ignored_params)
        json.dumps(ask.messages, ensure_ascii=False).encode()


def test_the_sdk_raises_what_the_gateway_refuses(client: Any, server: CannedServer) -> None:
    server.answer = Refusal(401, "no key")
    with pytest.raises(openai.AuthenticationError, match="no key"):
        client.responses.create(model="tiny", input="go")
    with pytest.raises(openai.BadRequestError, match="nothing is stored here"):
        client.responses.create(model="tiny", input="go", background=True)


@pytest.mark.parametrize(("status", "code"), [(502, "server_error"), (503, "invalid_prompt")])
def test_an_error_within_a_stream_is_a_failed_response(
    client: Any, server: CannedServer, status: int, code: str
) -> None:
    server.answer = Refusal(status, "the engine is gone", in_stream=True)
    received = list(client.responses.create(model="tiny", input="go", stream=True))
    assert [event.sequence_number for event in received] == [0, 1, 2, 3]  # the third keeps it alive
    failed = EVENTS.validate_python(received[-1].to_dict(), strict=True)
    assert (failed.type, failed.response.id, failed.response.status) == ("response.failed", "resp_r1", "failed")
    assert (failed.response.error.code, failed.response.error.message) == (code, "the engine is gone")

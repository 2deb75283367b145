"""Requests of the Gemini API: every field is read, named as ignored, or refused by its path."""

import copy
import itertools
import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from canned_wire import canned, streamed, whole
from rolltape.gateway.request import ChatRequest, OutputSchema, ToolChoice
from rolltape.gateway.wire.gemini.dialect import GEMINI
from rolltape.gateway.wire.gemini.request import to_json_schema
from rolltape.records.messages import Message, canonical_message
from wire_bodies import broken, read_or_refused, refusal, reply_messages

Json = dict[str, Any]

USER: Json = {"role": "user", "parts": [{"text": "go"}]}
RUN: Json = {"functionDeclarations": [{"name": "run"}, {"name": "look"}]}
PATH = {"model": "m", "method": "generateContent"}


def read(**fields: Any) -> ChatRequest:
    return GEMINI.read(json.dumps({"contents": [USER]} | fields).encode(), path=PATH)


def refused(**fields: Any) -> str:
    return refusal(GEMINI, **({"model": "m", "contents": [USER]} | fields))


def parts(*given: Json, role: str = "user") -> Json:
    return {"role": role, "parts": list(given)}


def function_call(name: str, **fields: Any) -> Json:
    return {"functionCall": {"name": name, **fields}}


def function_response(name: str, response: Json, **fields: Any) -> Json:
    return {"functionResponse": {"name": name, "response": response, **fields}}


def test_contents_of_the_model_in_a_row_are_one_reply() -> None:
    """A chat of the Python SDK keeps a content for each event of a stream."""
    pieces: list[Json] = [
        {"text": "h", "thought": True},
        {"text": "m", "thought": True},
        {"text": "I "},
        {"text": "run."},
    ]
    contents = [parts(piece, role="model") for piece in [*pieces, function_call("run", id="c"), {"text": ""}]]
    made = {"id": "c", "type": "function", "function": {"name": "run", "arguments": "{}"}}
    assert read(contents=[USER, *contents, USER]).messages[1:2] == [
        {"role": "assistant", "content": "I run.", "reasoning_content": "hm", "tool_calls": [made]}
    ]


def test_a_content_without_parts_is_a_message_without_text() -> None:
    messages = read(contents=[USER, {"role": "model"}, {"role": "user", "parts": []}]).messages[1:]
    assert messages == [{"role": "assistant", "content": None}, {"role": "user", "content": ""}]


def test_results_without_ids_are_matched_by_name_and_order() -> None:
    calls = [function_call("run", id="a"), function_call("look", id="b"), function_call("run", id="c")]
    results = [function_response(name, {"n": at}) for at, name in enumerate(["run", "run", "look", "run"])]
    messages = read(contents=[USER, parts(*calls, role="model"), parts(*results, {"text": "go on"})]).messages
    ids = [message.get("tool_call_id") for message in messages[2:]]
    assert ids == ["a", "c", "b", "call_contents[2].parts[3].functionResponse", None]


def test_calls_without_ids_keep_one_while_the_conversation_grows() -> None:
    contents = [USER, parts(function_call("run"), role="model"), parts(function_response("run", {"output": "x"}))]
    shorter = read(contents=contents).messages
    longer = read(contents=[*contents, parts({"text": "done"}, role="model"), USER]).messages
    assert longer[: len(shorter)] == shorter
    assert shorter[2]["tool_call_id"] == shorter[1]["tool_calls"][0]["id"]


@pytest.mark.parametrize(
    ("response", "shown"),
    [
        ({"output": "two\nlines"}, "two\nlines"),
        ({"output": {"a": 1}}, '{"a":1}'),
        ({"result": "x"}, '{"result":"x"}'),
        ({"output": "x", "error": "y"}, '{"output":"x","error":"y"}'),
        ({}, "{}"),
    ],
)
def test_a_result_is_shown_as_the_api_defines_it(response: Json, shown: str) -> None:
    (message,) = read(contents=[parts(function_response("run", response, id="c"))]).messages
    assert message == {"role": "tool", "tool_call_id": "c", "content": shown}


def test_a_failed_result_is_marked_and_media_in_one_are_placeholders() -> None:
    image = {"inlineData": {"mimeType": "image/png", "data": "AAAA"}}
    failed = function_response("run", {"error": "no"}, id="c")
    seen = function_response("run", {"output": "see"}, id="d", parts=[image])
    first, second = read(contents=[parts(failed, seen)]).messages
    assert first == {"role": "tool", "tool_call_id": "c", "content": "no", "is_error": True}
    assert [part["text"] for part in second["content"]] == [
        "see",
        "[image: image/png, 3 bytes; this model reads text only]",
    ]


def test_signatures_of_others_are_kept_and_ours_name_the_reply() -> None:
    signed = [{"text": "a", "thoughtSignature": "skip"}, {"text": "b", "thoughtSignature": "cm9sbHRhcGVfcjE="}]
    for ours in ("cm9sbHRhcGVfcjE=", "cm9sbHRhcGVfcjE"):  # some leave the padding out
        signed[1]["thoughtSignature"] = ours
        _, reply, _ = read(contents=[USER, parts(*signed, role="model"), USER]).messages
        assert reply == {"role": "assistant", "content": "ab", "id": "r1", "thinking_signatures": ["skip"]}


def test_names_in_snake_case_are_read_and_those_of_the_client_stay() -> None:
    declared = {
        "name": "f",
        "parameters": {"type": "OBJECT", "properties": {"my_field": {"any_of": [{"type": "STRING"}]}}},
    }
    ask = read(
        system_instruction={"parts": [{"text": "sys"}]},
        contents=[USER, parts({"function_call": {"name": "f", "args": {"my_field": 1}}}, role="model"), USER],
        tools=[{"function_declarations": [declared]}],
        tool_config={"function_calling_config": {"mode": "NONE"}},
        generation_config={"max_output_tokens": 9, "top_p": 0.5},
        labels={"rolltape_session": "a"},
    )
    assert ask.messages[0] == {"role": "system", "content": "sys"}
    assert ask.messages[2]["tool_calls"][0]["function"]["arguments"] == '{"my_field":1}'
    assert ask.tools == [
        {
            "type": "function",
            "function": {
                "name": "f",
                "parameters": {"type": "object", "properties": {"my_field": {"anyOf": [{"type": "string"}]}}},
            },
        }
    ]
    assert (ask.sampling.max_tokens, ask.sampling.top_p, ask.tool_choice.mode) == (9, 0.5, "none")
    assert (ask.metadata, ask.ignored_params) == ({"rolltape_session": "a"}, ())


@pytest.mark.parametrize(
    ("schema", "meant"),
    [
        ({"type": "STRING"}, {"type": "string"}),
        ({"type": "TYPE_UNSPECIFIED", "title": "t"}, {"title": "t"}),
        ({"type": "STRING", "enum": ["a"], "nullable": True}, {"type": ["string", "null"], "enum": ["a", None]}),
        ({"anyOf": [{"type": "STRING"}], "nullable": True}, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
        (
            {"type": "ARRAY", "items": {"type": "NUMBER"}, "minItems": "2"},
            {"type": "array", "items": {"type": "number"}, "minItems": 2},
        ),
        ({"type": "STRING", "example": "a", "nullable": False}, {"type": "string", "examples": ["a"]}),
        (
            {"ref": "#/defs/a", "defs": {"a": {"type": "BOOLEAN"}}},
            {"$ref": "#/$defs/a", "$defs": {"a": {"type": "boolean"}}},
        ),
        (
            {"type": "object", "properties": {"type": {"type": "string"}}},
            {"type": "object", "properties": {"type": {"type": "string"}}},
        ),
        ({"type": 5, "items": [1], "properties": 7}, {"type": 5, "items": [1], "properties": 7}),
    ],
)
def test_schemas_become_json_schemas(schema: Json, meant: Json) -> None:
    assert to_json_schema(schema) == meant


@pytest.mark.parametrize(
    ("config", "thinking", "ignored"),
    [
        ({}, None, ()),
        ({"includeThoughts": True}, None, ()),
        ({"includeThoughts": False}, None, ("includeThoughts: thoughts are shown in full",)),
        ({"thinkingBudget": 0}, False, ()),
        ({"thinkingBudget": -1}, True, ()),
        ({"thinkingBudget": 64}, True, ("thinkingBudget: thinking is limited only by maxOutputTokens",)),
        ({"thinkingLevel": "LOW"}, True, ()),
    ],
)
def test_thinking_is_turned_on_and_off_and_not_measured(
    config: Json, thinking: bool | None, ignored: tuple[str]
) -> None:
    ask = read(generationConfig={"thinkingConfig": config})
    assert ask.thinking is thinking
    assert ask.ignored_params == tuple(f"generationConfig.thinkingConfig.{one}" for one in ignored)


@pytest.mark.parametrize(
    ("config", "choice", "strict", "ignored"),
    [
        ({"mode": "AUTO"}, ToolChoice(), False, False),
        ({}, ToolChoice(), False, False),
        ({"mode": "NONE"}, ToolChoice("none"), False, False),
        ({"mode": "none"}, ToolChoice("none"), False, False),  # as in Google's own examples
        ({"mode": "ANY"}, ToolChoice("required"), False, False),
        ({"mode": "ANY", "allowedFunctionNames": ["look"]}, ToolChoice("required", "look"), False, False),
        ({"mode": "ANY", "allowedFunctionNames": ["look", "run"]}, ToolChoice("required"), False, False),
        ({"mode": "AUTO", "allowedFunctionNames": ["look"]}, ToolChoice(), False, True),
        ({"mode": "VALIDATED"}, ToolChoice(), True, False),
    ],
)
def test_the_mode_says_whether_functions_are_called(
    config: Json, choice: ToolChoice, strict: bool, ignored: bool
) -> None:
    ask = read(tools=[RUN], toolConfig={"functionCallingConfig": config})
    assert (ask.tool_choice, bool(ask.strict_tools)) == (choice, strict)
    path = "toolConfig.functionCallingConfig.allowedFunctionNames"
    assert ask.ignored_params == ((f"{path}: all functions stay offered",) if ignored else ())


def test_a_single_object_may_stand_for_a_list() -> None:
    """Google's own examples with curl write it so."""
    declared = {"name": "run", "parameters": {"type": "OBJECT", "properties": {"parts": {"type": "OBJECT"}}}}
    ask = read(
        system_instruction={"parts": {"text": "sys"}},
        contents={"role": "user", "parts": {"text": "go"}},
        tools={"function_declarations": declared},
    )
    assert ask.messages == [{"role": "system", "content": "sys"}, {"role": "user", "content": "go"}]
    assert ask.tools is not None
    assert ask.tools[0]["function"]["parameters"]["properties"] == {"parts": {"type": "object"}}


def test_a_reply_in_json_without_a_schema_is_an_object_or_a_list() -> None:
    schema = read(generationConfig={"responseMimeType": "application/json"}).output_schema
    assert schema == OutputSchema("generationConfig.responseMimeType", {"type": ["object", "array"]})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": [{"googleSearch": {}}]}, "tools: googleSearch is not offered here, functions are"),
        (
            {"generationConfig": {"responseMimeType": "text/x.enum"}},
            "generationConfig.responseMimeType 'text/x.enum': not",
        ),
        (
            {"generationConfig": {"responseSchema": {"type": "OBJECT"}}},
            "generationConfig.responseSchema: ignored without the responseMimeType application/json",
        ),
        (
            {"generationConfig": {"responseModalities": ["TEXT", "IMAGE"]}},
            "generationConfig.responseModalities: the model writes text only",
        ),
        ({"generationConfig": {"mediaResolution": "LOW"}}, "generationConfig.mediaResolution: not known here"),
        ({"toolConfig": {"retrievalConfig": {}}}, "toolConfig.retrievalConfig: not known here"),
        ({"somethingNew": 1}, "somethingNew: not known here"),
        ({"tools": [{"functionDeclarations": [{"name": "f", "response": {}}]}]}, "tools: response is not shown"),
    ],
)
def test_what_is_not_done_is_named(fields: Json, named: str) -> None:
    (ignored,) = read(**fields).ignored_params
    assert ignored.startswith(named)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"contents": []}, "contents is []; give at least one content"),
        ({"contents": [parts({"text": "a"}, role="system")]}, "contents[0].role is 'system'; known are"),
        ({"contents": [USER, parts({"text": "a"}, role="model")]}, "contents[1] is the model's: a reply cannot be"),
        ({"contents": [parts({"text": 5})]}, "contents[0].parts[0].text is 5; give a text"),
        ({"contents": [parts({"executableCode": {}})]}, "contents[0].parts[0].text is missing; known are text"),
        (
            {"contents": [parts({"inlineData": {"mimeType": "image/png"}})]},
            "contents[0].parts[0].inlineData.data is missing",
        ),
        (
            {"contents": [parts(function_call("run", args=[]), role="model"), USER]},
            "contents[0].parts[0].functionCall.args is []",
        ),
        ({"systemInstruction": "a"}, "systemInstruction is 'a'; give an object"),
        ({"cachedContent": "cachedContents/a"}, "cachedContent is 'cachedContents/a'; nothing is cached here"),
        ({"tools": [RUN, RUN]}, "tools[1].functionDeclarations[0].name is 'run'; there is another"),
        (
            {"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}},
            "toolConfig.functionCallingConfig.mode is 'ANY'; no",
        ),
        (
            {"toolConfig": {"functionCallingConfig": {"mode": "SOME"}}},
            "toolConfig.functionCallingConfig.mode is 'SOME'",
        ),
        (
            {"tools": [RUN], "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["x"]}}},
            "toolConfig.functionCallingConfig.allowedFunctionNames is ['x']; no function 'x'",
        ),
        ({"generationConfig": {"candidateCount": 9}}, "generationConfig.candidateCount is 9; give a whole number"),
        ({"generationConfig": {"maxOutputTokens": 0}}, "generationConfig.maxOutputTokens is 0; give a whole number"),
        ({"generationConfig": {"stopSequences": [""]}}, "generationConfig.stopSequences is ['']; give texts"),
        (
            {"generationConfig": {"responseModalities": ["AUDIO"]}},
            "generationConfig.responseModalities is ['AUDIO']; the",
        ),
        ({"model": ""}, "model is ''; give a text that is not empty"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_path(fields: Json, said: str) -> None:
    assert refused(**fields).startswith(said)


def test_counting_takes_contents_or_a_whole_request_and_any_last_content() -> None:
    contents = [USER, parts({"text": "I begin"}, role="model")]
    plain = GEMINI.read_counting(json.dumps({"contents": contents}).encode(), PATH)
    inner = {"model": "models/m", "contents": contents, "systemInstruction": parts({"text": "sys"})}
    full = GEMINI.read_counting(json.dumps({"generateContentRequest": inner}).encode(), PATH)
    assert (len(plain.messages), len(full.messages)) == (2, 3)


@given(reply_messages(), st.integers(1, 3))
def test_an_echo_means_what_the_reply_meant(message: Json, pieces: int) -> None:
    reply = canned(message, id="r42")
    ask = read()
    (candidate,) = json.loads(whole(GEMINI, ask, reply))["candidates"]
    events = streamed(GEMINI, ask, reply, pieces=pieces).split(b"\n\n")
    chunks = [json.loads(event.strip()[5:])["candidates"][0]["content"] for event in events if event.strip()]
    for contents in (
        [candidate["content"]],
        chunks,
        [parts(*itertools.chain(*(one["parts"] for one in chunks)), role="model")],
    ):
        echo = read(contents=[USER, *contents, USER]).messages[1]
        assert canonical_message(echo) == canonical_message(reply.message)
        assert Message.snapshot(echo, "echo").canonical == Message.snapshot(reply.message, "reply").canonical
        assert echo["id"] == "r42"
        assert [one["id"] for one in echo.get("tool_calls", ())] == [one["id"] for one in message.get("tool_calls", ())]


TYPICAL: Json = {
    "model": "models/m",
    "systemInstruction": parts({"text": "sys"}),
    "contents": [
        parts({"text": "hi"}, {"fileData": {"mimeType": "image/png", "fileUri": "https://a/b.png"}}),
        parts(
            {"text": "hm", "thought": True},
            {"text": "ok", "thoughtSignature": "cm9sbHRhcGVfcjE="},
            function_call("run", id="c", args={"a": [1, {"b": None}]}),
            role="model",
        ),
        parts(function_response("run", {"output": "one"}, id="c"), function_response("run", {"error": {}})),
    ],
    "tools": [
        {
            "functionDeclarations": [
                {"name": "run", "parameters": {"type": "OBJECT", "properties": {"a": {"type": "STRING"}}}}
            ]
        }
    ],
    "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["run"]}},
    "generationConfig": {
        "temperature": 1,
        "topK": 40,
        "stopSequences": ["x"],
        "responseMimeType": "application/json",
        "responseSchema": {"type": "ARRAY", "items": {"type": "STRING"}, "nullable": True},
        "thinkingConfig": {"thinkingBudget": 5, "includeThoughts": False},
    },
    "labels": {"a": "b"},
}


def test_the_typical_body_is_read() -> None:
    assert read_or_refused(GEMINI, json.dumps(TYPICAL).encode()) is not None


@given(broken(TYPICAL))
def test_a_broken_body_is_read_or_refused_and_never_raises_otherwise(raw: bytes) -> None:
    ask = read_or_refused(GEMINI, raw)
    for index, message in enumerate(ask.messages if ask else ()):
        Message.snapshot(message, f"message {index}")


@given(st.sampled_from(["", "tools", "toolConfig", "generationConfig"]), st.text(), st.integers(1, 60))
def test_unknown_fields_are_passed_over(holder: str, name: str, count: int) -> None:
    changed = copy.deepcopy(TYPICAL)
    inner = changed[holder] if holder else changed
    (inner[0] if isinstance(inner, list) else inner).update({f"x{name}{index}": index for index in range(count)})
    ask = read_or_refused(GEMINI, json.dumps(changed).encode())
    assert ask is not None
    assert len(ask.ignored_params) < 30


@pytest.mark.parametrize("opened", [b"[", b'{"a":', b'{"contents":['])
def test_a_body_nested_without_end_is_refused(opened: bytes) -> None:
    assert read_or_refused(GEMINI, opened * 100_000) is None

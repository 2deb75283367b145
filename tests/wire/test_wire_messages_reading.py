"""Bodies of the Messages API: what they mean in chat form, and what is refused by name."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canned_wire import call, canned, streamed, whole
from rolltape.gateway.request import ChatRequest, Effort, OutputSchema, ToolChoice
from rolltape.gateway.wire.messages.dialect import MESSAGES
from rolltape.records.messages import Message, Root, canonical_message
from wire_bodies import broken, read_or_refused, refusal, reply_messages

MARK = {"cache_control": {"type": "ephemeral"}}
RUN = {"name": "run", "input_schema": {"type": "object"}}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def result(content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, **more}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "go"}]} | fields


def read(**fields: Any) -> ChatRequest:
    return MESSAGES.read(json.dumps(body(**fields)).encode())


def history(*messages: tuple[str, Any], **fields: Any) -> list[dict[str, Any]]:
    given_messages = [{"role": role, "content": content} for role, content in messages]
    return read(messages=[*given_messages, {"role": "user", "content": "go"}], **fields).messages[:-1]


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    (message,) = history(("assistant", list(blocks)))
    return message


def test_the_system_prompt_is_the_first_message_and_cache_marks_are_left_out() -> None:
    assert history(system="Be brief.") == [{"role": "system", "content": "Be brief."}]
    parts = [text("You are", **MARK), text(" here.")]
    assert history(system=parts) == [{"role": "system", "content": [text("You are"), text(" here.")]}]


def test_a_system_message_within_the_conversation_stays_where_it_is() -> None:
    assert history(("user", [text("hi", **MARK)]), ("system", "mind this"), ("system", [text("and that")])) == [
        {"role": "user", "content": [text("hi")]},
        {"role": "system", "content": "mind this"},
        {"role": "system", "content": [text("and that")]},
    ]


def test_tool_results_become_tool_messages_in_the_order_they_came() -> None:
    blocks = [text("before"), result("one", is_error=False, **MARK), text("a"), text("b"), result([text("two")])]
    assert history(("user", [*blocks, result(None, is_error=True), text("after")])) == [
        {"role": "user", "content": [text("before")]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "one"},
        {"role": "user", "content": [text("a"), text("b")]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": [text("two")]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "", "is_error": True},
        {"role": "user", "content": [text("after")]},
    ]


def test_an_assistants_blocks_become_one_message() -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": "rolltape_r7"}
    use = {"type": "tool_use", "id": "toolu_1", "name": "run", "input": {"b": 1.0, "a": "é"}, **MARK}
    assert assistant(thinking, text(" ok "), use) == {
        "role": "assistant",
        "content": " ok ",
        "id": "r7",
        "reasoning_content": "hm",
        "tool_calls": [call("run", '{"b":1.0,"a":"é"}', id="toolu_1")],
    }
    assert assistant(use, text("ok"))["content"] == "ok"
    assert assistant() == {"role": "assistant", "content": None}
    assert assistant(text("a"), text("b"))["content"] == [text("a"), text("b")]


def test_thinking_of_another_model_keeps_its_signatures() -> None:
    blocks = [{"type": "thinking", "thinking": words, "signature": f"of {words}"} for words in ("a", "", "b")]
    assert assistant(*blocks, {"type": "redacted_thinking", "data": "xyz"}, text("ok")) == {
        "role": "assistant",
        "content": "ok",
        "reasoning_content": "a\n\nb",
        "thinking_signatures": ["of a", "of ", "of b"],
        "redacted_thinking": ["xyz"],
    }


@pytest.mark.parametrize(
    ("fields", "choice", "parallel"),
    [
        ({}, ToolChoice(), True),
        ({"tool_choice": {"type": "auto"}}, ToolChoice("auto"), True),
        ({"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}, ToolChoice("required"), False),
        ({"tool_choice": {"type": "tool", "name": "run"}}, ToolChoice("required", "run"), True),
        ({"tool_choice": {"type": "none"}}, ToolChoice("none"), True),
    ],
)
def test_tool_choice(fields: dict[str, Any], choice: ToolChoice, parallel: bool) -> None:
    ask = read(tools=[RUN], **fields)
    assert (ask.tool_choice, ask.parallel_tool_calls) == (choice, parallel)


@pytest.mark.parametrize(
    ("thinking", "wanted", "ignored_params"),
    [
        (None, None, ()),
        ({"type": "adaptive"}, True, ()),
        ({"type": "disabled"}, False, ()),
        (
            {"type": "enabled", "budget_tokens": 2048},
            True,
            ("thinking.budget_tokens: thinking is limited only by max_tokens",),
        ),
        ({"type": "adaptive", "display": "omitted"}, True, ("thinking.display: thinking is shown in full",)),
        ({"type": "between_tools"}, True, ("thinking.type: the model may think at any time",)),
    ],
)
def test_thinking(thinking: Any, wanted: bool | None, ignored_params: tuple[str, ...]) -> None:
    ask = read(thinking=thinking)
    assert (ask.thinking, ask.ignored_params) == (wanted, ignored_params)


def test_a_schema_for_the_output_is_read_under_both_names() -> None:
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    ask = read(output_config={"format": schema, "effort": "high"})
    assert ask.output_schema == OutputSchema("output_config.format", {"type": "object"})
    assert (ask.effort, ask.ignored_params) == (Effort("output_config.effort", "high"), ())
    assert read(output_format=schema).output_schema == OutputSchema("output_format", {"type": "object"})
    assert read(output_config={"effort": None}).output_schema is None


def test_what_cannot_be_honored_is_said() -> None:
    ask = read(
        tools=[
            RUN | {"strict": True, "defer_loading": False, "eager_input_streaming": True},
            {"type": "web_search_20250305", "name": "web_search"},
            {"type": "mcp_toolset", "mcp_server_name": "s"},
        ],
        container="c1",
        mcp_servers=[],
        metadata={"user_id": "u"},
        context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
    )
    assert [tool["function"]["name"] for tool in ask.tools or ()] == ["run"]
    assert ask.strict_tools == {"run"}
    assert ask.ignored_params == (
        "tools: 'web_search_20250305' is not offered here",
        "tools: 'mcp_toolset' is not offered here",
        "context_management.edits: the history is read as it is sent",
        "container: not known here; ignored",
        "mcp_servers: not known here; ignored",
    )


def test_tools_that_anthropic_defines_and_clients_run_are_offered_as_functions() -> None:
    """As the tape has them: the same words must mean the same tool for as long as a run goes on."""
    ask = read(
        tools=[
            {"type": "bash_20250124", "name": "bash", "strict": True, "cache_control": {"type": "ephemeral"}},
            {"type": "text_editor_20250124", "name": "str_replace_editor"},
            {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 9},
            {"type": "memory_20250818", "name": "memory", "defer_loading": True},
            {"type": "computer_20250124", "name": "computer", "display_width_px": 9, "display_height_px": 9},
        ],
        tool_choice={"type": "tool", "name": "bash"},
    )
    properties = {
        tool["function"]["name"]: tool["function"]["parameters"]["properties"] for tool in ask.all_tools or ()
    }
    assert {name: list(given) for name, given in properties.items()} == {
        "bash": ["command", "restart"],
        "str_replace_editor": [
            "command", "path", "file_text", "old_str", "new_str", "insert_line", "view_range",
        ],
        "str_replace_based_edit_tool": [
            "command", "path", "file_text", "old_str", "new_str", "insert_line", "insert_text", "view_range",
        ],
        "memory": [
            "command", "path", "file_text", "old_str", "new_str", "insert_line", "insert_text", "old_path", "new_path",
            "view_range",
        ],
    }  # fmt: skip
    editors = [properties[name]["command"]["enum"] for name in ("str_replace_editor", "str_replace_based_edit_tool")]
    assert editors == [
        ["view", "create", "str_replace", "insert", "undo_edit"],
        ["view", "create", "str_replace", "insert"],
    ]
    assert [tool["function"]["name"] for tool in ask.deferred_tools] == ["memory"]
    assert ask.strict_tools == {"bash"}
    assert ask.tool_choice == ToolChoice("required", "bash")
    assert ask.ignored_params == ("tools: 'computer_20250124' is not offered here",)


def test_keeping_all_thinking_is_what_is_done_anyway() -> None:
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]  # Claude Code 2.1 sends this with every request
    assert read(context_management={"edits": edits}).ignored_params == ()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": None}, "max_tokens is missing; say how many tokens the reply may have at most"),
        ({"max_tokens": -1}, "max_tokens is -1; give a whole number of at least 0"),
        ({"model": ""}, "model is ''; give a text that is not empty"),
        ({"messages": []}, "messages is []; give at least one message"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role is 'tool'; known are user,"),
        ({"messages": [{"content": "a"}]}, "messages[0].role is missing; give user, assistant or system"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is missing; give a text or a list of blocks"),
        ({"system": [{"type": "text"}]}, "system[0].text is missing; give a text"),
        ({"temperature": "hot"}, "temperature is 'hot'; give a number of at least 0"),
        ({"stop_sequences": [""]}, "stop_sequences is ['']; give texts that are not empty"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema is missing; give an object"),
        ({"tools": [RUN, RUN]}, "tools[1].name is 'run'; there is another tool of that name; give each its own"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type is 'any'; no tools are offered; give some, or leave"),
        ({"tools": [RUN], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name is 'x'; offered are run"),
        ({"thinking": {"type": "deep"}}, "thinking.type is 'deep'; known are enabled"),
        ({"thread": {"type": "join"}}, "thread.type is 'join'; known are create, continue"),
        ({"thread": {"type": "continue"}}, "thread.previous_message_id is missing; give a text"),
    ],
)
def test_a_refusal_names_the_field(fields: dict[str, Any], said: str) -> None:
    assert refusal(MESSAGES, **body(**fields)).startswith(said)


@pytest.mark.parametrize(
    ("role", "block", "said"),
    [
        ("user", {"type": "document"}, "messages[0].content[0].source is missing; give an object"),
        ("user", {"type": "tool_reference"}, "messages[0].content[0].tool_name is missing"),
        ("user", text("a") | {"tool_reference": {"b": 1}}, "messages[0].content[0].tool_reference is {'b': 1}; leave"),
        ("user", text("a") | {"tool_reference": "b"}, "messages[0].content[0].tool_reference is 'b'; leave it out"),
        ("user", {"type": "thinking"}, "messages[0].content[0].type is 'thinking'; blocks of this type are not"),
        ("assistant", {"type": "server_tool_use"}, "messages[0].content[0].type is 'server_tool_use'; blocks of"),
        ("assistant", {"type": "tool_use", "id": "a", "name": "f"}, "messages[0].content[0].input is missing; give"),
        ("system", result("a"), "messages[0].content[0].type is 'tool_result'; blocks of this type are not"),
    ],
)
def test_a_block_that_has_no_place_is_refused(role: str, block: dict[str, Any], said: str) -> None:
    assert refusal(MESSAGES, **body(messages=[{"role": role, "content": [block]}])).startswith(said)


def test_a_reply_cannot_be_begun_for_the_model() -> None:
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "I beg"}]
    assert refusal(MESSAGES, **body(messages=messages)) == (
        "messages[1] is the assistant's: a reply cannot be begun for the model; end with a user message"
    )
    counted = MESSAGES.read_counting(json.dumps({"model": "tiny", "messages": messages}).encode())
    assert (counted.messages, counted.sampling.max_tokens) == (messages, None)


def test_text_that_is_no_unicode_is_replaced_and_said() -> None:
    ask = MESSAGES.read(json.dumps(body(system="\ud800")).encode())
    assert (ask.repaired, ask.messages[0]["content"]) == (True, "\ufffd")


def as_javascript_writes(value: Any) -> Any:
    """A value parsed and written by Claude Code: whole floats lose their point, and keys come in another order."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, dict):
        return {key: as_javascript_writes(value[key]) for key in reversed(value)}
    return [as_javascript_writes(item) for item in value] if isinstance(value, list) else value


def streamed_blocks(events: bytes) -> list[dict[str, Any]]:
    """The content that a client puts together from a stream."""
    blocks: list[dict[str, Any]] = []
    for line in events.split(b"\n"):
        event = json.loads(line[6:]) if line.startswith(b"data: ") else {}
        if event.get("type") == "content_block_start":
            blocks.append(event["content_block"])
        for key, piece in event.get("delta", {}).items() if event.get("type") == "content_block_delta" else ():
            if key != "type":
                blocks[event["index"]][key] = blocks[event["index"]].get(key, "") + piece
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block.pop("partial_json"))
    return blocks


@given(reply_messages())
def test_an_echo_means_what_the_reply_meant(message: dict[str, Any]) -> None:
    reply = canned(message, id="r42")
    ask = read(stream=True)
    content = json.loads(whole(MESSAGES, ask, reply))["content"]
    assert streamed_blocks(streamed(MESSAGES, ask, reply)) == content
    for echoed in (content, as_javascript_writes(content)):
        echo = assistant(*echoed)
        assert canonical_message(echo) == canonical_message(reply.message)
        assert Message.snapshot(echo, "echo").canonical == Message.snapshot(reply.message, "reply").canonical
        assert echo.get("id") == ("r42" if message.get("reasoning_content") else None)
        assert [one["id"] for one in echo.get("tool_calls", ())] == [one["id"] for one in message.get("tool_calls", ())]


TYPICAL = body(
    system=[text("sys", **MARK)],
    messages=[
        {"role": "user", "content": [text("hi"), text("there", **MARK)]},
        {"role": "system", "content": "mind"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "rolltape_r1"},
                {"type": "redacted_thinking", "data": "x"},
                text("ok"),
                {"type": "tool_use", "id": "toolu_1", "name": "run", "input": {"a": [1, {"b": None}]}},
            ],
        },
        {"role": "user", "content": [result([text("one")], is_error=True), result("two"), text("go")]},
    ],
    tools=[RUN | {"strict": True, **MARK}, {"type": "bash_20250124", "name": "bash"}],
    tool_choice={"type": "tool", "name": "run", "disable_parallel_tool_use": True},
    stop_sequences=["a"],
    temperature=1,
    top_p=1,
    top_k=5,
    stream=True,
    thinking={"type": "enabled", "budget_tokens": 1024},
    output_config={"effort": "high", "format": {"type": "json_schema", "schema": {}}},
    output_format={"type": "json_schema"},
    context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
)


def check(raw: bytes) -> None:
    """What is read can be recorded, and what is ignored_params can be said in a header."""
    ask = read_or_refused(MESSAGES, raw)
    if ask is None:
        return
    for message in ask.messages:
        Message.snapshot(message, "message")
    Root.snapshot(ask.tools, None, "tools")
    assert len("; ".join(ask.ignored_params)) < 4000
    assert "".join(ask.ignored_params).isascii()


@given(broken(TYPICAL))
def test_a_broken_body_is_read_or_refused_and_never_raises_otherwise(raw: bytes) -> None:
    check(raw)


@given(st.sampled_from(["", "tools", "thinking", "output_config"]), st.text(), st.integers(1, 60))
def test_unknown_fields_are_passed_over(holder: str, name: str, count: int) -> None:
    changed = copy.deepcopy(TYPICAL)
    inner = changed[holder] if holder else changed
    (inner[0] if isinstance(inner, list) else inner).update({f"x{name}{index}": index for index in range(count)})
    check(json.dumps(changed).encode())


@pytest.mark.parametrize("opened", [b"[", b'{"a":', b'{"model":"m","max_tokens":1,"system":['])
def test_a_body_nested_without_end_is_refused(opened: bytes) -> None:
    assert read_or_refused(MESSAGES, opened * 100_000) is None


def test_a_deferred_tool_is_told_of_where_it_is_referred_to() -> None:
    found = [{"type": "tool_reference", "tool_name": "edit"}, {"type": "tool_reference", "tool_name": "gone"}]
    edit = {"name": "edit", "input_schema": {"type": "object"}, "defer_loading": True}
    ask = read(tools=[RUN, edit], messages=[{"role": "user", "content": [result(found)]}], tool_choice={"type": "auto"})
    assert [tool["function"]["name"] for tool in ask.tools or ()] == ["run"]
    assert [tool["function"]["name"] for tool in ask.all_tools or ()] == ["run", "edit"]
    first, second = ask.messages[0]["content"]
    assert json.loads(first["text"]) == ask.deferred_tools[0]
    assert second["text"] == "gone is available."
    assert ask.ignored_params == ()


def test_documents_that_are_text_are_read_and_others_become_placeholders() -> None:
    plain = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "All of it."}}
    parts = {"type": "document", "source": {"type": "content", "content": [text("Part one."), text(" Part two.")]}}
    pdf = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
    paper = {"type": "document", "title": "A paper", "source": pdf}
    far = {"type": "image", "source": {"type": "url", "url": "https://pictures.example/a.png"}}
    ask = read(messages=[{"role": "user", "content": [plain, parts, paper, far, result([paper])]}])
    said = [part["text"] for message in ask.messages for part in message["content"]]
    assert said == [
        "All of it.",
        "Part one. Part two.",
        "[document: A paper, application/pdf, 5 bytes; this model reads text only]",
        "[image: https://pictures.example/a.png; this model reads text only]",
        "[document: A paper, application/pdf, 5 bytes; this model reads text only]",
    ]
    assert ask.media == ("messages[0].content[2]", "messages[0].content[3]", "messages[0].content[4].content[0]")


def test_what_a_document_of_text_has_beside_it_is_named_and_its_cache_mark_is_left_out() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "All of it."}
    plain = {"type": "document", "source": source, "title": "A", "context": "B", "citations": {"enabled": True}}
    ask = read(messages=[{"role": "user", "content": [plain | MARK]}])
    assert ask.messages == [{"role": "user", "content": [text("All of it.", media=plain)]}]
    assert ask.ignored_params == (
        "messages: citations of documents are not given",
        "messages: the title and the context of a document are not shown to the model",
    )


def test_search_results_are_read_where_they_stand() -> None:
    said = {"title": "A page", "source": "https://a.example", "content": [text("One."), text(" Two.")]}
    found = {"type": "search_result", "citations": {"enabled": True}, **said}
    ask = read(messages=[{"role": "user", "content": [found | MARK, result([found])]}])
    part = text("A page\nhttps://a.example\nOne. Two.", media=found)
    assert [message["content"] for message in ask.messages] == [[part], [part]]
    assert (ask.media, ask.ignored_params) == ((), ("messages: citations of search results are not given",))


@pytest.mark.parametrize("media_type", ["x" * 5000, {"a": [1, 2]}, 5])
def test_a_placeholder_is_short_whatever_a_medium_says_of_itself(media_type: object) -> None:
    image = {
        "type": "image",
        "title": "y" * 5000,
        "source": {"type": "base64", "media_type": media_type, "data": "AAAA"},
    }
    said = read(messages=[{"role": "user", "content": [image]}]).messages[0]["content"][0]["text"]
    typed = f", {media_type[:80]}" if isinstance(media_type, str) else ""
    assert said == f"[image: {'y' * 80}{typed}, 3 bytes; this model reads text only]"


def test_redacted_thinking_metadata_and_betas_are_named_or_kept() -> None:
    redacted = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, text("Hm.")]}
    messages = [redacted, {"role": "user", "content": "go"}]
    fields = json.dumps(body(messages=messages, metadata={"user_id": "u"})).encode()
    ask = MESSAGES.read(fields, {"anthropic-beta": "claude-code-20250219, context-1m-2025-08-07", "User-Agent": "me"})
    assert (ask.metadata, ask.client) == ({"user_id": "u"}, "me")
    assert ask.ignored_params == (
        "messages: redacted_thinking cannot be read; it is not shown to the model",
        "anthropic-beta context-1m-2025-08-07: ignored",
    )

"""What an agent gets of a reply, and that its echo is the message that was recorded."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prompts.conversing import ASKED, LOOK, TINY, ids_of
from rolltape.gateway.prompts import ChatPrompts, Parsed
from rolltape.gateway.prompts.reply import arguments_text
from rolltape.gateway.turn.replies import chat_message
from rolltape.records.messages import Message
from rolltape.records.turn import Ids, TokenChain


def parsed(prompts: ChatPrompts, ids: Ids, thinking: bool | None = None, **options: Any) -> Parsed:
    prompt = TokenChain(prompts.render([ASKED], [LOOK], thinking).ids)
    return prompts.parse(prompt, ids, [LOOK], thinking, **options)


def read(prompts: ChatPrompts, text: str, **options: Any) -> Parsed:
    stopped = options.pop("stopped", True)
    return parsed(prompts, ids_of(prompts, text, stopped=stopped), **options)


def call(inner: str) -> str:
    return f"<tool_call>\n{inner}\n</tool_call>"


GOOD = call('{"name": "look", "arguments": {"city": "Köln"}}')


def test_thinking_text_and_calls_are_told_apart(prompts: ChatPrompts) -> None:
    reply = read(prompts, f"<think>\nI look.\n</think>\n\nBoth.\n{GOOD}\n{GOOD}")
    assert (reply.reasoning, reply.content) == ("I look.", "Both.")
    assert [(one.name, one.arguments) for one in reply.calls] == [("look", '{"city": "Köln"}')] * 2
    assert not reply.malformed
    thought = ids_of(prompts, "<think>\nI look.\n</think>", stopped=False)
    assert reply.reasoning_tokens == len(thought)


def test_a_reply_in_chat_form_has_calls_under_the_ids_given(prompts: ChatPrompts) -> None:
    message = chat_message(read(prompts, f"<think>\nhm\n</think>\n\n{GOOD}"), ["call_1"])
    assert message == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"city": "Köln"}'}}
        ],
    }
    assert chat_message(read(prompts, ""), []) == {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "look", "arguments": {"city": ',
        "look(Köln)",
        '{"arguments": {}}',
        '{"name": 5, "arguments": {}}',
        '{"name": "look", "arguments": [1]}',
        '{"name": "look", "arguments": "Köln"}',
        '{"name": "look", "arguments": {"n": NaN}}',
        '{"name": "look", "arguments": {"n": -Infinity}}',
        '{"name": "look", "arguments": {"n": 1e999}}',
        '{"name": "look", "arguments": {"n": 1' + "0" * 400 + "}}",
        '{"name": "look", "arguments": {"n": 1' + "0" * 5000 + "}}",
        '{"name": "look", "arguments": {"s": "\\ud800"}}',
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": "look", "arguments": ' + '{"a": ' * 150 + "1" + "}" * 150 + "}",
        '{"name": "look", "arguments": ' + "[" * 3000 + "]" * 3000 + "}",
    ],
    ids=lambda body: body[:40],
)
def test_a_malformed_call_makes_the_whole_reply_text(tiny: ChatPrompts, body: str) -> None:
    reply = read(tiny, f"<think>\nhm\n</think>\n\nBoth.\n{GOOD}\n{call(body)}")
    assert reply.malformed
    assert reply.calls == ()
    assert reply.content == f"Both.\n{GOOD}\n{call(body)}"
    assert reply.reasoning == "hm"


def test_a_call_that_was_cut_off_is_delivered_as_text(prompts: ChatPrompts) -> None:
    whole = ids_of(prompts, f"<think>\nhm\n</think>\n\nI look.\n{GOOD}", stopped=False)
    reply = parsed(prompts, whole[:-3])
    assert reply.malformed
    assert reply.calls == ()
    assert f"I look.\n{GOOD}".startswith(reply.content)
    assert "<tool_call>" in reply.content


def test_calls_that_may_not_be_made_are_text(prompts: ChatPrompts) -> None:
    reply = read(prompts, f"<think>\nhm\n</think>\n\nI look.\n\n{GOOD}\nSo.", calls_as_text=True)
    assert (reply.content, reply.reasoning, reply.calls) == (f"I look.\n\n{GOOD}\nSo.", "hm", ())
    assert read(prompts, "Cold.", calls_as_text=True) == read(prompts, "Cold.")


def test_a_call_of_an_unknown_tool_is_delivered(prompts: ChatPrompts) -> None:
    reply = read(prompts, call('{"name": "jump", "arguments": {}}'))
    assert [one.name for one in reply.calls] == ["jump"]


@pytest.mark.parametrize("body", ['{"name": "look"}', '{"name": "look", "arguments": null}'])
def test_a_call_without_arguments_has_none(prompts: ChatPrompts, body: str) -> None:
    assert [one.arguments for one in read(prompts, call(body)).calls] == ["{}"]


def test_of_two_equal_keys_the_last_one_counts(prompts: ChatPrompts) -> None:
    reply = read(prompts, call('{"name": "look", "arguments": {"city": "a", "city": "b"}}'))
    assert [one.arguments for one in reply.calls] == ['{"city": "b"}']


def test_text_after_calls_is_not_part_of_the_message(prompts: ChatPrompts) -> None:
    reply = read(prompts, f"Both.\n{GOOD}\nand\n{GOOD}\nSo long.")
    assert reply.content == "Both."
    assert len(reply.calls) == 2


def test_unfinished_thinking_is_thinking(prompts: ChatPrompts) -> None:
    reply = read(prompts, "<think>\nIt is", stopped=False)
    assert (reply.content, reply.reasoning, reply.malformed) == ("", "It is", False)
    assert reply.reasoning_tokens == len(ids_of(prompts, "<think>\nIt is", stopped=False))


def test_a_call_inside_thinking_is_no_call(prompts: ChatPrompts) -> None:
    reply = read(prompts, f"<think>\nPerhaps {GOOD}?\n</think>\n\nNo.")
    assert (reply.content, reply.calls) == ("No.", ())


def test_a_prompt_that_ends_in_an_empty_thought_leaves_only_text(prompts: ChatPrompts) -> None:
    assert read(prompts, "Cold.", thinking=False) == Parsed(content="Cold.")


def test_a_stop_string_and_what_follows_it_is_no_part_of_the_reply(prompts: ChatPrompts) -> None:
    assert read(prompts, "Cold. STOP it", stopped=False, stop_string="STOP").content == "Cold."
    cut = read(prompts, f"I look.\n{GOOD}", stopped=False, stop_string="Köln")
    assert cut.calls  # the engine said so, but the call is whole
    assert read(prompts, "<think>\nhm STOP", stopped=False, stop_string="STOP").reasoning == "hm"


def echoed(message: dict[str, Any], *, reserialized: bool) -> dict[str, Any]:
    """A message as a client sends it back: through JSON, and its arguments perhaps read and written anew."""
    back: dict[str, Any] = json.loads(json.dumps(message))
    for one in back.get("tool_calls", []) if reserialized else []:
        arguments = json.loads(one["function"]["arguments"])
        one["function"]["arguments"] = json.dumps(arguments, separators=(",", ":"), sort_keys=True)
        one["id"] = "other"
    return back


def assert_echo_matches(reply: Parsed) -> None:
    message = chat_message(reply, [f"call_{n}" for n in range(len(reply.calls))])
    recorded = Message.snapshot(message, "the reply")
    assert not recorded.repaired
    for reserialized in (False, True):
        echo = Message.snapshot(echoed(message, reserialized=reserialized), "its echo")
        assert echo.canonical == recorded.canonical


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
bodies = st.one_of(
    st.text(max_size=40),
    st.builds(lambda name, given: json.dumps({"name": name, "arguments": given}), st.text(min_size=1), values),
    st.builds(lambda given: json.dumps({"name": "look", "arguments": {"city": given}}, ensure_ascii=False), values),
)
pieces = st.one_of(st.text(max_size=20), bodies.map(call), st.sampled_from(["<think>", "</think>", "<tool_call>"]))


@given(written=st.lists(pieces, max_size=5), stopped=st.booleans(), thinking=st.sampled_from([None, False]))
@settings(deadline=None, max_examples=200)
def test_the_echo_of_any_text_is_the_message_that_was_recorded(
    tiny: ChatPrompts, written: list[str], stopped: bool, thinking: bool | None
) -> None:
    assert_echo_matches(
        read(tiny, "".join(written).encode(errors="replace").decode(), stopped=stopped, thinking=thinking)
    )


@given(ids=st.lists(st.integers(0, 4095) | st.integers(4087, 4095), max_size=60))
@settings(deadline=None, max_examples=200)
def test_the_echo_of_any_ids_is_the_message_that_was_recorded(tiny: ChatPrompts, ids: list[int]) -> None:
    reply = parsed(tiny, np.array(ids, np.int32))
    assert_echo_matches(reply)
    assert reply.reasoning_tokens <= len(ids)


@given(arguments=st.dictionaries(st.text(max_size=5), values, max_size=3))
@settings(deadline=None)
def test_arguments_are_json_of_the_same_value_or_none_at_all(arguments: dict[str, Any]) -> None:
    text = arguments_text(arguments)
    if text is not None:
        assert json.loads(text) == arguments
        text.encode()


def test_a_folders_own_template_reads_calls_in_the_form_that_it_asks_for() -> None:
    whole = ChatPrompts(TINY, renderer="default")
    reply = read(whole, f"<think>\nhm\n</think>\n\nI look.\n{GOOD}")
    assert (reply.content, reply.reasoning, len(reply.calls)) == ("I look.", "hm", 1)
    assert read(whole, f"I look.\n{GOOD[:-5]}").content == f"I look.\n{GOOD[:-5]}"

"""How people read a message: its calls in every form that APIs and frameworks write them in."""

from typing import Any

import pytest

from rolltape.records.messages import Message, content_text
from rolltape.records.wording import call_text, message_line, message_parts
from rolltape.tape.index.search import searched_text

PATCH = "*** Begin Patch"
FORMS = {
    "a function": {"id": "c", "type": "function", "function": {"name": "apply", "arguments": PATCH}},
    "a custom tool": {"id": "c", "type": "custom", "custom": {"name": "apply", "input": PATCH}},
    "flat": {"id": "c", "name": "apply", "arguments": PATCH},
    "flat, with an input": {"type": "tool_use", "id": "c", "name": "apply", "input": PATCH},
}


@pytest.mark.parametrize("call", FORMS.values(), ids=FORMS)
def test_a_call_reads_the_same_in_each_of_its_forms(call: dict[str, Any]) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert call_text(call) == message_line(message) == f"apply({PATCH})"
    assert list(message_parts(message)) == [("calls", f"apply({PATCH})")]
    assert searched_text(Message.snapshot(message, "a reply")).split() == ["apply", *PATCH.split()]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": 5}, {"type": "text", "text": "a"}], "5a"),
        ([{"type": "text", "text": None}, None, "a", 1], "a1"),
        ({"text": "a"}, ""),
        (None, ""),
    ],
)
def test_any_content_has_a_text(content: Any, text: str) -> None:
    assert content_text(content) == text
    assert message_line({"role": "assistant", "content": "so", "reasoning": content}).endswith('"so"')


def test_a_call_without_arguments_is_not_found_by_the_word_null() -> None:
    message = {"role": "assistant", "content": "so", "tool_calls": [{"name": "look"}, "odd", 7]}
    assert searched_text(Message.snapshot(message, "a reply")).split() == ["so", "look", "odd", "7"]

"""Messages compare by what they mean to the model, whatever the model or a client wrote."""

import enum
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltape.errors import NotJsonError
from rolltape.records.messages import Message, Root


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return Message.snapshot(left, "left").canonical == Message.snapshot(right, "right").canonical


def calls(**call: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    "arguments", ['{"x": NaN}', '{"x": 1e999}', "[" * 200_000, '{"a":' * 600 + "1" + "}" * 600, "{"]
)
def test_degenerate_arguments_are_compared_as_the_text_that_they_are(arguments: str) -> None:
    call = calls(function={"name": "f", "arguments": arguments})
    assert same(call, calls(id="other", function={"name": "f", "arguments": arguments}))
    assert not same(call, calls(function={"name": "f", "arguments": "{}"}))


def test_calls_of_every_shape_are_told_apart() -> None:
    one = calls(type="custom", custom={"name": "patch", "input": "A"})
    assert same(one, calls(id="x", type="custom", custom={"name": "patch", "input": "A"}))
    assert not same(one, calls(type="custom", custom={"name": "patch", "input": "B"}))
    assert not same(calls(name="patch", input="A"), calls(name="patch", input="B"))
    assert same(calls(function={"name": "f"}), calls(function={"name": "f", "arguments": "{}"}))
    assert same(
        calls(function={"name": "f", "arguments": {"b": 1, "a": 2.0}}), calls(name="f", arguments='{"a":2,"b":1}')
    )


def test_cache_marks_and_ids_do_not_count_at_any_depth() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    part = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "ok", **mark}], **mark}
    plain = {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "ok"}]}
    assert same({"role": "user", "content": [part]}, {"role": "user", "content": [plain]})
    tool = {"name": "run", "description": "runs"}
    assert Root.snapshot([tool | mark], None, "t").digest == Root.snapshot([tool], None, "t").digest


class Shouted(str):
    pass


class Level(enum.IntEnum):
    HIGH = 3


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
odd = st.sampled_from(
    [2**63 - 1, 2**63, -(2**63), 10**30, Shouted("a"), Level.HIGH, (1, "b"), 1e16, -0.0, "\x00\x7f/ é"]
)
values = st.recursive(
    scalars | odd, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner), max_leaves=20
)


@given(st.dictionaries(st.text(), values))
def test_a_message_is_stored_as_the_bytes_that_json_writes(fields: dict[str, Any]) -> None:
    message = {**fields, "role": "user"}
    spelled = json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode()
    assert Message.snapshot(message, "message").raw == spelled


def test_text_that_is_no_unicode_is_repaired_at_any_depth() -> None:
    message = Message.snapshot({"role": "user", "content": [{"text": "a\ud800b"}]}, "message")
    assert message.repaired
    assert message.to_dict() == {"role": "user", "content": [{"text": "a\ufffdb"}]}


@pytest.mark.parametrize("value", [b"a", {1, 2}, object(), 1j])
def test_what_json_has_no_word_for_is_refused(value: object) -> None:
    with pytest.raises(NotJsonError, match="message cannot be JSON"):
        Message.snapshot({"role": "user", "content": "u", "meta": [{"a": value}]}, "message")


def test_what_json_would_change_is_refused() -> None:
    with pytest.raises(NotJsonError, match="message has the key 5, a int"):
        Message.snapshot({"role": "user", "content": "u", "meta": {5: "a"}}, "message")
    with pytest.raises(NotJsonError, match="nested more than"):
        Message.snapshot({"role": "user", "content": "u", "meta": nested(600)}, "message")
    with pytest.raises(NotJsonError, match="Out of range float"):
        Message.snapshot({"role": "user", "content": "u", "score": float("nan")}, "message")
    assert Message.snapshot({"role": "user", "content": "u", "meta": nested(150)}, "message").canonical

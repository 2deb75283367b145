"""Messages compare by what they mean to the model, whatever the model or a client wrote."""

from typing import Any

import pytest

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


def test_what_json_would_change_is_refused() -> None:
    with pytest.raises(NotJsonError, match="message has the key 5, a int"):
        Message.snapshot({"role": "user", "content": "u", "meta": {5: "a"}}, "message")
    with pytest.raises(NotJsonError, match="nested more than"):
        Message.snapshot({"role": "user", "content": "u", "meta": nested(600)}, "message")
    with pytest.raises(NotJsonError, match="Out of range float"):
        Message.snapshot({"role": "user", "content": "u", "score": float("nan")}, "message")
    assert Message.snapshot({"role": "user", "content": "u", "meta": nested(150)}, "message").canonical

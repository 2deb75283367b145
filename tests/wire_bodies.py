"""Replies and bodies as hypothesis makes them up: what any model may say, and what any client may send."""

import copy
import json
import re
from typing import Any

import hypothesis.strategies as st
import pytest

from rolltape.errors import BadRequest
from rolltape.gateway.request import ChatRequest
from rolltape.gateway.wire.protocol import Dialect

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_ARGUMENTS = st.dictionaries(st.text(max_size=5), _JSON, max_size=3).map(json.dumps) | st.text(max_size=20)
_PATH = re.compile(r"^[a-z_]+([A-Z][a-z]+)*(\[\d+\]|\.[a-z_]+([A-Z][a-z]+)*)*\b|^the body")


@st.composite
def reply_messages(draw: st.DrawFn) -> dict[str, Any]:
    """An assistant's message: text, reasoning and calls, each of which may be absent or odd."""
    names = st.text("abc_", min_size=1, max_size=6)
    calls = [
        {"id": f"call_{index}", "type": "function", "function": {"name": draw(names), "arguments": draw(_ARGUMENTS)}}
        for index in range(draw(st.integers(0, 3)))
    ]
    message: dict[str, Any] = {"role": "assistant", "content": draw(st.none() | st.text())}
    if reasoning := draw(st.text()):
        message["reasoning_content"] = reasoning
    return message | ({"tool_calls": calls} if calls else {})


@st.composite
def broken(draw: st.DrawFn, body: dict[str, Any]) -> bytes:
    """A body with some of its values replaced by any others; at times cut off, or with bytes changed."""
    body = copy.deepcopy(body)
    for _ in range(draw(st.integers(1, 3))):
        holder, key = draw(st.sampled_from(list(_places(body))))
        holder[key] = draw(_JSON)
    raw = json.dumps(body).encode()
    if draw(st.integers(0, 4)) == 0:
        at = draw(st.integers(0, len(raw)))
        raw = raw[:at] + draw(st.binary(max_size=4)) + raw[at + draw(st.integers(0, 3)) :]
    return raw


def _places(value: Any) -> Any:
    for key in value.keys() if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def read_or_refused(wire: Dialect, raw: bytes) -> ChatRequest | None:
    """What is read; None if it is refused, and then the refusal names the place."""
    try:
        return wire.read(raw)
    except BadRequest as error:
        said = str(error)
    assert _PATH.match(said), said
    return None


def refusal(wire: Dialect, **body: Any) -> str:
    """The message with which a body is refused."""
    with pytest.raises(BadRequest) as caught:
        wire.read(json.dumps(body).encode())
    return str(caught.value)

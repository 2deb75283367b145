"""Bodies at the border: what is no JSON, no Unicode or too deep is repaired or refused, and never gets further."""

import json

import pytest

from rolltape.errors import BadRequest
from rolltape.gateway.wire.fields import Fields, event, read_body


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{", b'{"a": NaN}', b'{"a": 1e999}', b'{"a": 9' + b"9" * 5000 + b"}", b'{"a":' * 151, b"[" * 100_000],
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest, match=r"^the body is"):
        read_body(body)


def test_nesting_is_limited() -> None:
    nested = b'{"a":' * 150 + b"1" + b"}" * 150
    assert read_body(nested)[0].unread() == ["a"]
    with pytest.raises(BadRequest, match="more than 150 levels"):
        read_body(b'{"a":' + nested + b"}")


@pytest.mark.parametrize("body", [b'{"a": "x\\ud800"}', b'{"a": "x\xff"}'])
def test_text_that_is_no_unicode_is_replaced_and_said(body: bytes) -> None:
    fields, repaired = read_body(body)
    assert (fields.text("a"), repaired) == ("x\ufffd", True)


def test_numbers_are_taken_within_their_bounds() -> None:
    fields = Fields({"a": 5.0, "b": True, "c": 10**400, "d": 0.5}, "at")
    assert fields.maybe_whole("a", least=1) == 5
    for name, said in {"b": "at.b is True", "c": "at.c is 1000", "d": "at.d is 0.5"}.items():
        with pytest.raises(BadRequest, match=f"^{said}.*; give a "):
            fields.maybe_whole(name, least=1)


def test_fields_that_nobody_reads_are_named_so_that_a_header_can_say_them() -> None:
    body = Fields({f"ö\n{index}": index for index in range(1000)} | {"known": 1, "null": None}, "")
    body.skip("known")
    body.ignore_unread()
    said = body.ignored_params
    assert said[0] == "\\xf6\\n0: not known here; ignored"
    assert said[-1] == "984 more fields: ignored"
    assert len(said) == 17


def test_an_event_is_one_line_to_readers_that_split_at_unicode_line_breaks() -> None:
    data = json.dumps("a\u2028b\u2029c\x85d", ensure_ascii=False).encode()
    sent = event(data, "x").decode()
    assert sent.splitlines() == ["event: x", 'data: "a\\u2028b\\u2029c\\u0085d"', ""]
    assert json.loads(sent.splitlines()[1].removeprefix("data: ")) == json.loads(data)

"""Encode and decode JSON and records strictly; NaN and infinity are kept as {"$float": "nan"}, apart from text."""

import contextlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar, cast

import msgspec

from rolltape.errors import DamagedTapeError, NotJsonError

Json = dict[str, Any] | list[Any] | str | int | float | bool | None

_NON_FINITE = "$float"
_DEEPEST = 200  # levels; the code that reads a record may itself be deep in calls
_CONTAINERS = (dict, list, tuple)
_SHALLOW = 20  # levels
_LARGEST = 2**63 - 1
_PART = 2**16  # characters
_decode_plain = msgspec.json.Decoder().decode
_encode_plain = msgspec.json.Encoder().encode
_encode_plain_sorted = msgspec.json.Encoder(order="sorted").encode
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_encode_sorted = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=True).encode


def encode_json(value: object, where: str) -> tuple[bytes, bool]:
    """Strict JSON of `value`, key order kept, and whether its text had to be repaired to be valid Unicode."""
    try:
        text = _encode(value)
    except RecursionError:
        raise _too_deep(where) from None
    except (TypeError, ValueError) as error:
        raise NotJsonError(f"{where} cannot be JSON: {error or type(error).__name__}") from None
    if text.count("{") + text.count("[") > _DEEPEST and is_deep(value, _DEEPEST):
        raise _too_deep(where)
    try:
        return text.encode(), False
    except UnicodeEncodeError:
        # A lone surrogate has no UTF-8: it becomes a replacement character. In parts, so that other threads can run.
        parts = (text[start : start + _PART] for start in range(0, len(text), _PART))
        return b"".join(valid_text(part).encode() for part in parts), True


def valid_text(text: str) -> str:
    """The text with lone surrogates replaced: they have no UTF-8, and cannot be encoded outside of Python."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def encode_with_text_keys(value: object, where: str) -> tuple[bytes, bool]:
    """As `encode_json`, but keys that are no text are refused: JSON would change them on the way."""
    if _is_plain(value, _SHALLOW):
        try:
            return _encode_plain(value), False
        except UnicodeEncodeError:
            pass
    encoded = encode_json(value, where)
    _check_keys(value, where)
    return encoded


def decode_json(raw: bytes) -> Any:
    """The value that `encode_json` wrote; a fresh object on every call."""
    try:
        return _decode_plain(raw)  # several times as fast as json, and equal where both read it
    except msgspec.DecodeError:
        return json.loads(raw)


def parse_strict(text: str) -> Any:
    """The value of a JSON text; ValueError also for NaN, infinity and numbers that a double cannot hold."""

    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is not a JSON number")

    def finite(digits: str) -> float:
        number = float(digits)
        return number if math.isfinite(number) else refuse(digits)

    return json.loads(text, parse_constant=refuse, parse_float=finite)


def encode_numbers(value: object, where: str) -> bytes:
    """Strict JSON with non-finite floats as {"$float": "nan"} and scalars of numpy and torch as numbers."""
    with contextlib.suppress(NotJsonError):
        raw = encode_json(value, where)[0]  # most values have none of these, and this costs a tenth
        if _NON_FINITE.encode() not in raw:
            return raw
    try:
        finite = _finite(value, where)
    except RecursionError:
        raise _too_deep(where) from None
    return encode_json(finite, where)[0]


def decode_numbers(raw: bytes) -> Any:
    """The inverse of `encode_numbers`."""
    return json.loads(raw, object_hook=non_finite) if _NON_FINITE.encode() in raw else decode_json(raw)


def non_finite(value: dict[str, Any]) -> Any:
    """The number that an object of `encode_numbers` spells; any other object as it is."""
    return float(cast("str", value[_NON_FINITE])) if value.keys() == {_NON_FINITE} else value


class OpenRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A record that is stored as a JSON object; `unknown` holds the keys that this version does not know."""

    unknown: dict[str, Any] = {}


T = TypeVar("T", bound=OpenRecord)


@cache
def _known_fields(kind: type[OpenRecord]) -> frozenset[str]:
    return frozenset(kind.__struct_fields__) - {"unknown"}


def encode_record(record: OpenRecord, where: str) -> bytes:
    """The record as a JSON object, its unknown fields back in their places."""
    fields = msgspec.to_builtins(record)
    unknown = fields.pop("unknown", {})
    return encode_numbers({**fields, **unknown}, where)


def decode_record(raw: bytes, kind: type[T], where: str) -> T:
    """The record that `encode_record` wrote, by this version or a newer minor one."""
    try:
        fields = decode_numbers(raw)
        if fields.keys() <= _known_fields(kind):
            return msgspec.convert(fields, kind)
        known = {key: fields.pop(key) for key in list(fields) if key in _known_fields(kind)}
        return msgspec.convert({**known, "unknown": fields}, kind)
    except (ValueError, AttributeError, TypeError, msgspec.ValidationError) as error:
        raise DamagedTapeError(f"{where}: not a {kind.__name__}: {error}") from None


def canonical_json(value: object) -> bytes:
    """One spelling for equal JSON values: keys sorted, no spaces, `5000.0` as `5000`."""
    if _is_plain(value, _SHALLOW):
        with contextlib.suppress(UnicodeEncodeError):
            return _encode_plain_sorted(value)
    return _encode_sorted(_plain_numbers(value)).encode("utf-8", "surrogatepass")


def as_float(value: object, where: str) -> float:
    """A real number as a float: ints, floats, bools and the scalars of numpy and torch; never text."""
    plain = plain_scalar(value)
    if not isinstance(plain, int | float):
        raise NotJsonError(f"{where} is {shown(value)}, a {type(value).__name__}; give a number")
    try:
        return float(plain)
    except OverflowError:
        raise NotJsonError(f"{where} is {shown(value)}, more than a float holds; give a smaller number") from None


def shown(value: object) -> str:
    """A value as an error message names it: its repr, cut short."""
    try:
        text = repr(value[:201] if isinstance(value, str) else value)
    except (ValueError, RecursionError):
        # Python spells no integer of more than some thousand digits, and no value that is nested as deep.
        return f"a whole number of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}…"


def plain_scalar(value: object) -> object:
    """The Python number of a scalar of numpy or torch; anything else as it is."""
    item = getattr(value, "item", None)
    if not callable(item):
        return value
    try:
        return item()
    except (TypeError, ValueError, RuntimeError):
        return value


def is_deep(value: object, levels: int) -> bool:
    """Whether a value is nested more than so many levels deep."""
    level = [value]
    for _ in range(levels):
        inner = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, _CONTAINERS))
        level = [item for items in inner for item in items if isinstance(item, _CONTAINERS)]
        if not level:
            return False
    return True


def _is_plain(value: object, levels: int) -> bool:
    """Whether msgspec, ten times as fast, writes the same bytes as json: exact types, no floats, nothing deep."""
    if type(value) is dict:
        for key in value:
            if type(key) is not str:
                return False
        inner: Iterable[object] = value.values()
    elif type(value) is list:
        inner = value
    else:
        inner = (value,)
    for item in inner:
        kind = type(item)
        if kind is str or item is None or kind is bool:
            continue
        if kind is dict or kind is list:
            if not levels or not _is_plain(item, levels - 1):
                return False
        elif kind is not int or not -_LARGEST <= cast("int", item) <= _LARGEST:
            return False
    return True


def _check_keys(value: object, where: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise NotJsonError(f"{where} has the key {key!r}, a {type(key).__name__}; JSON has only text keys")
            if isinstance(item, _CONTAINERS):
                _check_keys(item, where)
    elif isinstance(value, list | tuple):
        for item in value:
            if isinstance(item, _CONTAINERS):
                _check_keys(item, where)


def _too_deep(where: str) -> NotJsonError:
    return NotJsonError(f"{where} cannot be JSON: it is nested more than {_DEEPEST} levels deep; flatten it")


def _finite(value: object, where: str) -> object:
    value = plain_scalar(value)
    if isinstance(value, float) and not math.isfinite(value):
        return {_NON_FINITE: repr(value)}
    if isinstance(value, Mapping):
        if _NON_FINITE in value:
            raise NotJsonError(f"{where} uses the reserved key {_NON_FINITE!r}; rename it")
        return {key: _finite(item, where) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return [_finite(item, where) for item in value]
    return value


def _plain_numbers(value: object) -> object:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, dict):
        return {key: _plain_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_numbers(item) for item in value]
    return value

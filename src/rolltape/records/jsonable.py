"""JSON at the border: strict, snapshotted at once, with NaN and infinity kept apart from text."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from rolltape.errors import NotJsonError

Json = dict[str, Any] | list[Any] | str | int | float | bool | None

_NON_FINITE = "$float"
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_encode_sorted = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=True).encode


def encode_json(value: object, where: str) -> tuple[bytes, bool]:
    """Strict JSON of `value`, key order kept, and whether its text had to be repaired to be valid Unicode."""
    try:
        text = _encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise NotJsonError(f"{where} cannot be JSON: {error or type(error).__name__}") from None
    try:
        return text.encode(), False
    except UnicodeEncodeError:
        # A lone surrogate has no UTF-8; each becomes one replacement character.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode(), True


def decode_json(raw: bytes) -> Any:
    """The value that `encode_json` wrote; a fresh object on every call."""
    return json.loads(raw)


def encode_numbers(value: object, where: str) -> bytes:
    """Strict JSON with non-finite floats as {"$float": "nan"} and scalars of numpy and torch as numbers."""
    return encode_json(_finite(value, where), where)[0]


def decode_numbers(raw: bytes) -> Any:
    """The inverse of `encode_numbers`."""
    return json.loads(raw, object_hook=_non_finite) if _NON_FINITE.encode() in raw else json.loads(raw)


def canonical_json(value: object) -> bytes:
    """One spelling for equal JSON values: keys sorted, no spaces, `5000.0` as `5000`."""
    return _encode_sorted(_plain_numbers(value)).encode("utf-8", "surrogatepass")


def as_float(value: object, where: str) -> float:
    """A real number as a float: ints, floats, bools and the scalars of numpy and torch; never text."""
    plain = _item(value)
    if isinstance(plain, int | float):
        return float(plain)
    raise NotJsonError(f"{where} is {value!r}, a {type(value).__name__}; give a number")


def _item(value: object) -> object:
    # Scalars of numpy and torch know their Python number; arrays of more than one element refuse.
    item = getattr(value, "item", None)
    if not callable(item):
        return value
    try:
        return item()
    except (TypeError, ValueError, RuntimeError):
        return value


def _finite(value: object, where: str) -> object:
    value = _item(value)
    if isinstance(value, float) and not math.isfinite(value):
        return {_NON_FINITE: repr(value)}
    if isinstance(value, Mapping):
        if _NON_FINITE in value:
            raise NotJsonError(f"{where} uses the reserved key {_NON_FINITE!r}; rename it")
        return {key: _finite(item, where) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return [_finite(item, where) for item in value]
    return value


def _non_finite(value: dict[str, Any]) -> Any:
    return float(cast("str", value[_NON_FINITE])) if value.keys() == {_NON_FINITE} else value


def _plain_numbers(value: object) -> object:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, dict):
        return {key: _plain_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_numbers(item) for item in value]
    return value

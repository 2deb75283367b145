"""What a caller may hand over with a turn, and single values checked and copied."""

import enum
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict, TypeVar

from rolltape.errors import RecordError
from rolltape.records.jsonable import decode_numbers, encode_numbers, plain_scalar, shown
from rolltape.records.turn import Delivery, LogprobKind, Turn, TurnFlag

E = TypeVar("E", bound=enum.StrEnum)

_PLAIN = frozenset({float, bool, type(None)})
_LARGEST = 2**63 - 1


class TurnFields(TypedDict, total=False):
    """What `record_turn` takes. `finish` is needed, and a prompt: whole, or `after` with what is new."""

    after: Turn | str | None
    prompt_messages: Iterable[object] | None
    new_messages: Iterable[object] | None
    prompt_ids: object
    new_prompt_ids: object
    sampled_ids: object
    logprobs: object
    segments: Iterable[Mapping[str, Any]] | None
    reply: object
    weight_version: object
    tools: object
    template_options: Mapping[str, Any] | None
    sampling: Mapping[str, Any] | None
    sampling_asked: Mapping[str, Any] | None
    logprob_kind: LogprobKind | str | None
    model: str | None
    renderer: str | None
    fingerprint: str | None
    message_starts: object
    side_arrays: Mapping[str, Any] | None
    reward: object
    delivery: Delivery | str
    auxiliary: str | None
    flags: Iterable[TurnFlag | str] | None
    token_faithful: bool
    error: str | None
    started_at: float | None
    ended_at: float | None
    extra: Mapping[str, Any] | None


def as_member(kind: type[E], value: str, where: str) -> E:
    """A member of a closed list, by itself or by its value."""
    if type(value) is kind:
        return value
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(member.value for member in kind)
        raise RecordError(f"{where}: {shown(value)} is no {kind.__name__}; known are {known}") from None


def as_text(value: object, where: str) -> str | None:
    """A text or None; what is not valid Unicode in it is replaced."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise RecordError(f"{where} is {shown(value)}, a {type(value).__name__}; give a text")
    return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def is_unicode(text: str) -> bool:
    """Whether a text has no lone surrogate, which nothing outside of Python can spell."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def as_settings(value: Mapping[str, Any] | None, where: str) -> dict[str, Any]:
    """A private copy of settings, plain numbers for the scalars of numpy and torch."""
    if value is None:
        return {}
    if type(value) is dict and all(
        type(key) is str and key.isascii() and key[:1] != "$" and _is_plain(item) for key, item in value.items()
    ):
        return value.copy()
    if not isinstance(value, Mapping):
        raise RecordError(f"{where} is a {type(value).__name__}; give a mapping")
    settings: dict[str, Any] = decode_numbers(encode_numbers(value, where))
    return settings


def _is_plain(item: object) -> bool:
    return type(item) in _PLAIN or (type(item) is int and -_LARGEST <= item <= _LARGEST)


def as_items(value: object, where: str, of: str) -> list[Any]:
    """The items of any iterable but a text or a mapping, an iterator's too; `where` says what they are."""
    if type(value) is list:
        return value.copy()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise RecordError(f"{where} are {shown(value)}, a {type(value).__name__}; give a list of {of}")
    return list(value)


def as_count(value: object, where: str) -> int:
    """A whole number that is not negative, numpy's included."""
    number = plain_scalar(value)
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 2**63:
        raise RecordError(f"{where} is {shown(value)}; give a whole number from 0 up")
    return number


def as_version(value: object, where: str) -> str:
    """A weight version: a text, or a whole number as its text."""
    value = plain_scalar(value)
    if isinstance(value, bool) or not isinstance(value, str | int) or (isinstance(value, int) and abs(value) >= 2**63):
        raise RecordError(f"{where} is {shown(value)}; give a string")
    return value if isinstance(value, str) else str(value)


def as_snapshot(value: object, where: str) -> Any:
    """A private copy of any JSON value, plain numbers for the scalars of numpy and torch."""
    return None if value is None else decode_numbers(encode_numbers(value, where))

"""What a caller may hand over with a turn, and single values checked and copied."""

import enum
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, TypeVar

from rolltape.errors import RecordError
from rolltape.records.jsonable import decode_numbers, encode_numbers
from rolltape.records.turn import Delivery, LogprobKind, Turn, TurnFlag

E = TypeVar("E", bound=enum.StrEnum)

_PLAIN = frozenset({int, float, bool})


class TurnFields(TypedDict, total=False):
    """What `record_turn` takes. `finish` is needed, and a prompt: whole, or `after` with what is new."""

    after: Turn | str | None
    prompt_messages: Sequence[object] | None
    new_messages: Sequence[object] | None
    prompt_ids: object
    new_prompt_ids: object
    sampled_ids: object
    logprobs: object
    segments: Sequence[Mapping[str, Any]] | None
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
    flags: Sequence[TurnFlag | str]
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
        raise RecordError(f"{where}: {value!r} is no {kind.__name__}; known are {known}") from None


def as_text(value: object, where: str) -> str | None:
    """A text or None; what is not valid Unicode in it is replaced."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise RecordError(f"{where} is {value!r}, a {type(value).__name__}; give a text")
    return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def as_settings(value: Mapping[str, Any] | None, where: str) -> dict[str, Any]:
    """A private copy of settings, plain numbers for the scalars of numpy and torch."""
    if not value:
        return {}
    if type(value) is dict and all(
        type(key) is str and key.isascii() and key[:1] != "$" and (type(item) in _PLAIN or item is None)
        for key, item in value.items()
    ):
        return value.copy()
    if not isinstance(value, Mapping):
        raise RecordError(f"{where} is a {type(value).__name__}; give a mapping")
    settings: dict[str, Any] = decode_numbers(encode_numbers(value, where))
    return settings


def as_snapshot(value: object, where: str) -> Any:
    """A private copy of any JSON value, plain numbers for the scalars of numpy and torch."""
    return None if value is None else decode_numbers(encode_numbers(value, where))

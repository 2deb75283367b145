"""The border: what an environment hands over → what the tape can keep of it, and what not."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rolltape.errors import RecordError
from rolltape.records.jsonable import as_float, plain_scalar, shown
from rolltape.records.rollout import StopReason
from rolltape.records.turn import Turn
from rolltape.tape.recording.fields import as_count, as_member, as_snapshot

Fields = dict[str, Any]


def checked(given: Mapping[str, object], where: str) -> tuple[Fields, dict[str, str]]:
    """The fields that are of the kind asked for, absent ones left out, and by name why others are not.

    Objects are not copied yet: whatever takes the fields encodes them at once.
    """
    fields: Fields = {}
    unrecorded: dict[str, str] = {}
    for name, value in given.items():
        if value is None:
            continue
        check: Callable[[Any, str], object] = _CHECKS.get(name, _as_object)
        try:
            fields[name] = check(value, f"{where}: {name}")
        except RecordError as error:
            unrecorded[name] = str(error)
        except Exception as error:  # noqa: BLE001 - what an environment hands over may raise anything when looked at
            unrecorded[name] = f"{where}: {name} cannot be read: {type(error).__name__}"
    return fields, unrecorded


def salvaged(fields: Mapping[str, Any], where: str) -> tuple[Fields, dict[str, str]]:
    """Copies of fields of which some cannot be JSON: those that can be, objects less the members that cannot."""
    good: Fields = {}
    unrecorded: dict[str, str] = {}
    for name, value in fields.items():
        try:
            good[name] = _copied(value, f"{where}: {name}")
        except RecordError as error:
            if isinstance(value, Mapping):
                good[name], members = salvaged_members(value, f"{where}: {name}")
                unrecorded |= {f"{name}.{key}": why for key, why in members.items()}
            else:
                unrecorded[name] = str(error)
    return good, unrecorded


def salvaged_members(value: Mapping[Any, Any], where: str) -> tuple[Fields, dict[str, str]]:
    """What can be JSON of an object's members, and by name why the others cannot."""
    good: Fields = {}
    unrecorded: dict[str, str] = {}
    for key, item in list(value.items()):
        try:
            good |= _copied({key: item}, f"{where}: {shown(key)}")
        except RecordError as error:
            unrecorded[str(key)] = str(error)
    return good, unrecorded


@contextlib.contextmanager
def naming(where: str) -> Iterator[None]:
    """Whatever an environment's own objects raise while they are read is an error of the record."""
    try:
        yield
    except RecordError:
        raise
    except Exception as error:
        raise RecordError(f"{where} cannot be read: {type(error).__name__}") from error


def _copied(value: object, where: str) -> Any:
    with naming(where):
        return as_snapshot(value, where)


def _as_object(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RecordError(f"{where} is {shown(value)}, a {type(value).__name__}; give an object")
    return value


def _as_prompt(value: object, where: str) -> object:
    if isinstance(value, Mapping):
        return value
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise RecordError(f"{where} is {shown(value)}, a {type(value).__name__}; give a list of messages, or an object")
    for index, message in enumerate(value):
        if not isinstance(message, Mapping):
            raise RecordError(f"{where}: message {index} is {shown(message)}, a {type(message).__name__}; give objects")
    return list(value)


def _as_flag(value: object, where: str) -> bool:
    plain = plain_scalar(value)
    if not isinstance(plain, bool):
        raise RecordError(f"{where} is {shown(value)}, a {type(value).__name__}; give True or False")
    return plain


def _as_stop_reason(value: Any, where: str) -> str:
    return as_member(StopReason, value, where).value


def _as_turns(value: object, where: str) -> list[str]:
    turns: list[str] = []
    for turn in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
        if not isinstance(turn, str | Turn):
            raise RecordError(f"{where}: {shown(turn)} is a {type(turn).__name__}; give a Turn, or its id")
        turns.append(turn if isinstance(turn, str) else turn.id)
    return turns


_CHECKS: dict[str, Callable[[Any, str], object]] = {
    "done": _as_flag,
    "prompt": _as_prompt,
    "prompt_tokens": as_count,
    "reward": as_float,
    "sampled_tokens": as_count,
    "stop_reason": _as_stop_reason,
    "turns": _as_turns,
}

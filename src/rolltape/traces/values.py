"""Checks what an environment passes for a trace, and finds which messages of a prompt are new.

Fields that can be stored are kept. For the others, the reason is recorded.
"""

import contextlib
import marshal
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from rolltape.errors import RecordError
from rolltape.records.jsonable import as_float, encode_numbers, plain_scalar, shown
from rolltape.records.rollout import StopReason
from rolltape.records.trace import OBJECTS, Fields
from rolltape.records.turn import Turn
from rolltape.tape.recording.fields import as_count, as_member, as_snapshot


def check_fields(given: Mapping[str, object], where: str) -> tuple[Fields, dict[str, str]]:
    """Return the fields of the right type, and by name why each other field is not. None means not given.

    Objects are not copied: the caller must encode them at once.
    """
    fields: Fields = {}
    unrecorded: dict[str, str] = {}
    for name, value in given.items():
        if value is None:
            continue
        try:
            fields[name] = _CHECKS[name](value, f"{where}: {name}")
        except RecordError as error:
            unrecorded[name] = str(error)
        except Exception as error:  # noqa: BLE001 - an environment's objects may raise anything when looked at
            unrecorded[name] = f"{where}: {name} cannot be read: {type(error).__name__}"
    return fields, unrecorded


def check_names(objects: Mapping[str, object]) -> None:
    """Raise TypeError for a keyword argument that is not one of a trace's objects."""
    unknown = [name for name in objects if name not in OBJECTS]
    if unknown:
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}; the objects of a trace are {', '.join(OBJECTS)}")


def salvage_fields(fields: Mapping[str, Any], where: str) -> tuple[Fields, dict[str, str]]:
    """Copy what can be JSON of the fields, objects by member, and return why the rest cannot."""
    good: Fields = {}
    unrecorded: dict[str, str] = {}
    for name, value in fields.items():
        try:
            good[name] = _copied(value, f"{where}: {name}")
        except RecordError as error:
            if isinstance(value, Mapping):
                good[name] = {}
                for key, item in list(value.items()):
                    try:
                        good[name] |= _copied({key: item}, f"{where}: {name}: {shown(key)}")
                    except RecordError as member_error:
                        unrecorded[f"{name}.{key}"] = str(member_error)
            else:
                unrecorded[name] = str(error)
    return good, unrecorded


@contextlib.contextmanager
def reading_errors(where: str) -> Iterator[None]:
    """Raise RecordError for any error that an environment's objects raise while they are read."""
    try:
        yield
    except RecordError:
        raise
    except Exception as error:
        raise RecordError(f"{where} cannot be read: {type(error).__name__}") from error


def _copied(value: object, where: str) -> Any:
    with reading_errors(where):
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


def _as_turns(value: object, where: str) -> list[str]:
    turns: list[str] = []
    for turn in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
        if not isinstance(turn, str | Turn):
            raise RecordError(f"{where}: {shown(turn)} is a {type(turn).__name__}; give a Turn, or its id")
        turns.append(turn if isinstance(turn, str) else turn.id)
    return turns


_CHECKS: dict[str, Callable[[Any, str], object]] = {
    "turns": _as_turns,
    "prompt": _as_prompt,
    "policy_response": _as_object,
    "reward": as_float,
    "done": _as_flag,
    "stop_reason": lambda value, where: as_member(StopReason, value, where).value,
    **dict.fromkeys(OBJECTS, _as_object),
    "prompt_tokens": as_count,
    "sampled_tokens": as_count,
}


class PlacedPrompt(NamedTuple):
    """A prompt split into the beginning of an earlier step's conversation and the messages that follow it."""

    messages_from: int | None  # None: the prompt continues no step
    kept_messages: int
    new: list[Any]
    ends: list[bytes]  # the hash of the conversation after each message


class Conversations:
    """The conversations of a rollout's steps. Several may grow in parallel, as in a game with several seats."""

    def __init__(self) -> None:
        self._step_of: dict[bytes, int] = {}  # by the hash of a beginning: the first step that held it

    def place(self, prompt: Sequence[Any], where: str) -> PlacedPrompt:
        """Find the longest beginning of a prompt that an earlier step has."""
        ends: list[bytes] = []
        for message in prompt:
            ends.append(_hash_after(ends, message, where))
        # With a conversation all its beginnings are known, so the first unknown one ends the search.
        kept = next((count for count, end in enumerate(ends) if end not in self._step_of), len(ends))
        step = self._step_of[ends[kept - 1]] if kept else None
        return PlacedPrompt(step, kept, list(prompt[kept:]), ends)

    def add(self, step: int, placed: PlacedPrompt, response: object, where: str) -> None:
        """Remember the conversation of a step: its prompt, and its response unless that is None."""
        ends = placed.ends if response is None else [*placed.ends, _hash_after(placed.ends, response, where)]
        for end in ends[placed.kept_messages :]:
            self._step_of.setdefault(end, step)

    def forget(self) -> None:
        """Forget all conversations: messages that later prompts would refer to may not be on the tape."""
        self._step_of.clear()


def _hash_after(ends: Sequence[bytes], message: object, where: str) -> bytes:
    """The hash of a conversation that ends in `message`."""
    try:
        # A tenth of the cost of JSON. Version 2: the same value gives the same bytes, however often it is referred to.
        data = marshal.dumps(message, 2)  # type: ignore[arg-type]
    except ValueError:
        data = b"json" + encode_numbers(message, where)
    return blake2b((ends[-1] if ends else b"") + data, digest_size=16).digest()

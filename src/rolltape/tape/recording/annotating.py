"""A caller's tags and notes → checked events."""

import secrets
from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

from rolltape.errors import NoSuchRollout, RecordError
from rolltape.records.rollout import MOST_NOTE_CHARACTERS, MOST_TAG_CHARACTERS, EventKind, Rollout, TokenRange
from rolltape.tape.journal.entries import NewEvent
from rolltape.tape.recording.fields import as_count, as_items, as_text
from rolltape.tape.run import Run

_NOTE_DIGITS = 12


class AnnotationOptions(TypedDict, total=False):
    """Where a tag or a note is placed, if not on a whole rollout, and who adds it. `Tape.add_tags` describes them."""

    turn: str | None
    tokens: Sequence[int] | None
    by: str | None
    try_index: int | None


def retag_event(
    rollout_id: str,
    added: Sequence[str] = (),
    removed: Sequence[str] = (),
    **options: Unpack[AnnotationOptions],
) -> NewEvent:
    """An event that adds tags to a rollout, a turn or some of its tokens, or removes some."""
    where = _where(rollout_id, options.get("turn"))
    data = {"added": [_tag(one, where) for one in added], "removed": [_tag(one, where) for one in removed]}
    if not data["added"] and not data["removed"]:
        raise RecordError(f"{where}: no tag; give at least one")
    return _event(EventKind.RETAG, rollout_id, data, **options)


def note_event(rollout_id: str, text: str, **options: Unpack[AnnotationOptions]) -> NewEvent:
    """An event that adds a note. Its id is new."""
    where = _where(rollout_id, options.get("turn"))
    data = {"note": secrets.token_hex(_NOTE_DIGITS // 2), "text": _text(text, where)}
    return _event(EventKind.NOTE, rollout_id, data, **options)


def change_note_event(run: Run, rollout_id: str, note_id: str, text: str | None, by: str | None) -> NewEvent:
    """An event that changes the text of a note or, with None, takes it back. Raises NoSuchRollout."""
    found = run.find(rollout_id)
    for try_index in reversed(found.tries):
        note = next((one for one in run.annotations(found.id, try_index).notes if one.id == note_id), None)
        if note is not None:
            data = {"note": note.id, "text": None if text is None else _text(text, f"note {note.id}")}
            return _event(EventKind.NOTE, found.id, data, note.turn, note.tokens, by, try_index)
    raise NoSuchRollout(
        f"rollout {found.id} has no note {note_id!r}; `rolltape note RUN ROLLOUT` lists those that it has"
    )


def _event(
    kind: EventKind,
    rollout_id: str,
    data: dict[str, Any],
    turn: str | None = None,
    tokens: Sequence[int] | None = None,
    by: str | None = None,
    try_index: int | None = None,
) -> NewEvent:
    where = _where(rollout_id, turn)
    span = None if tokens is None else as_token_range(tokens, where)
    if span is not None and turn is None:
        raise RecordError(f"{where}: tokens {span} without a turn; give the turn that they belong to")
    place = {} if span is None else {"tokens": list(span)}
    return NewEvent(kind, rollout_id, data | place, by, try_index, turn)


def check_place(rollout: Rollout, turn_id: str | None, tokens: TokenRange | None) -> None:
    """Refuse a turn that a rollout does not have, and tokens that the turn does not have. Raises NoSuchRollout."""
    if turn_id is None:
        return
    turn = next((one for one in rollout.turns if one.id == turn_id), None)
    if turn is None:
        raise NoSuchRollout(f"rollout {rollout.id} has no turn {turn_id}; it has {len(rollout.turns)} turns")
    if tokens is not None and not tokens[0] < tokens[1] <= len(turn.tokens):
        raise NoSuchRollout(f"turn {turn_id}: tokens {tokens[0]} to {tokens[1]} asked for; it has {len(turn.tokens)}")


def _where(rollout_id: object, turn: object) -> str:
    return f"rollout {rollout_id}" if turn is None else f"turn {turn}"


def _tag(given: object, where: str) -> str:
    name = (as_text(given, f"{where}: a tag") or "").strip()
    if not name or len(name) > MOST_TAG_CHARACTERS or not name.isprintable():
        raise RecordError(
            f"{where}: the tag {name[:40]!r} has {len(name):,} characters; give 1 to {MOST_TAG_CHARACTERS} on one line"
        )
    return name


def _text(given: object, where: str) -> str:
    text = (as_text(given, f"{where}: the text of a note") or "").strip()
    if not text or len(text) > MOST_NOTE_CHARACTERS:
        raise RecordError(f"{where}: a note of {len(text):,} characters; give 1 to {MOST_NOTE_CHARACTERS:,}")
    return text


def as_token_range(tokens: Sequence[int], where: str) -> TokenRange:
    """Tokens of a turn as [start, stop)."""
    tokens = as_items(tokens, f"{where}: tokens", "two numbers")
    if len(tokens) != 2:
        raise RecordError(f"{where}: tokens are {tokens!r}; give where they start and stop, such as (120, 121)")
    start, stop = (as_count(one, f"{where}: tokens") for one in tokens)
    if not start < stop:
        raise RecordError(f"{where}: tokens start at {start} and stop at {stop}; the stop must be larger")
    return start, stop

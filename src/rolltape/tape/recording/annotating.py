"""Tags and notes as a caller gives them → checked events."""

import secrets
from collections.abc import Sequence
from typing import Any

from rolltape.errors import NoSuchRollout, RecordError
from rolltape.records.events import MOST_NOTE_CHARACTERS, MOST_TAG_CHARACTERS, EventKind, Note, TokenRange
from rolltape.records.rollout import Rollout
from rolltape.tape.journal.entries import NewEvent
from rolltape.tape.recording.fields import as_count, as_text
from rolltape.tape.run import Run

_NOTE_DIGITS = 12


def retag_event(
    rollout_id: str,
    *,
    added: Sequence[str] = (),
    removed: Sequence[str] = (),
    turn: str | None = None,
    tokens: Sequence[int] | None = None,
    by: str | None = None,
    try_index: int | None = None,
) -> NewEvent:
    """An event that adds tags to a rollout, a turn or some of its tokens, or takes some away."""
    where = _where(rollout_id, turn)
    data = {
        "added": [_tag(one, where) for one in added],
        "removed": [_tag(one, where) for one in removed],
        **_place(tokens, turn, where),
    }
    if not data["added"] and not data["removed"]:
        raise RecordError(f"{where}: no tag; give at least one")
    return NewEvent(EventKind.RETAG, rollout_id, data, by, try_index, turn)


def note_event(
    rollout_id: str,
    text: str,
    *,
    turn: str | None = None,
    tokens: Sequence[int] | None = None,
    by: str | None = None,
    try_index: int | None = None,
) -> NewEvent:
    """An event that adds a note. Its id is new."""
    where = _where(rollout_id, turn)
    data = {"note": secrets.token_hex(_NOTE_DIGITS // 2), "text": _text(text, where), **_place(tokens, turn, where)}
    return NewEvent(EventKind.NOTE, rollout_id, data, by, try_index, turn)


def change_note_event(run: Run, rollout_id: str, note_id: str, text: str | None, by: str | None) -> NewEvent:
    """An event that gives a note another text, or (None) takes it back. Raises NoSuchRollout."""
    found = run.find(rollout_id)
    for try_index in reversed(found.tries):
        note = next((one for one in run.annotations(found.id, try_index).notes if one.id == note_id), None)
        if note is not None:
            return _changed(found.id, try_index, note, text, by)
    raise NoSuchRollout(
        f"rollout {found.id} has no note {note_id!r}; `rolltape note RUN ROLLOUT` lists those that it has"
    )


def _changed(rollout_id: str, try_index: int, note: Note, text: str | None, by: str | None) -> NewEvent:
    data: dict[str, Any] = {"note": note.id, "text": None if text is None else _text(text, f"note {note.id}")}
    if note.tokens is not None:
        data["tokens"] = list(note.tokens)
    return NewEvent(EventKind.NOTE, rollout_id, data, by, try_index, note.turn)


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


def _place(tokens: Sequence[int] | None, turn: str | None, where: str) -> dict[str, Any]:
    if tokens is None:
        return {}
    if turn is None:
        raise RecordError(f"{where}: tokens {tuple(tokens)} of no turn; give the turn that they are of")
    return {"tokens": list(as_token_range(tokens, where))}


def as_token_range(tokens: Sequence[int], where: str) -> TokenRange:
    """Tokens of a turn as [start, stop); one number more than the last is where they stop."""
    if len(tokens) != 2:
        raise RecordError(f"{where}: tokens are {list(tokens)!r}; give where they start and stop, such as (120, 121)")
    start, stop = (as_count(one, f"{where}: tokens") for one in tokens)
    if not start < stop:
        raise RecordError(f"{where}: tokens start at {start} and stop at {stop}; the stop must be larger")
    return start, stop

"""Write the page's tags and notes as events to the tape, and list those of a whole run for its panel."""

import os
import sqlite3
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from rolltape.errors import NoAnswer, NoSuchRollout, RecordError, TapeError
from rolltape.records.rollout import BOOKMARK, Annotations, TokenRange
from rolltape.tape.stored import Key
from rolltape.view.answers import to_plain
from rolltape.view.served_runs import ServedRun

if TYPE_CHECKING:  # the import of the writer takes as long as the first page
    from rolltape.records.rollout import Rollout
    from rolltape.tape.recording.tape import Tape

_MOST_AUTHOR_CHARACTERS = 80
_MOST_LISTED = 200


class AnnotationRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The page's request to annotate one try of a rollout: tags to add and remove, or one note."""

    by: str | None = None  # None for the author that the server was started with
    turn: str | None = None
    tokens: TokenRange | None = None
    add_tags: list[str] = []
    remove_tags: list[str] = []
    note: str | None = None  # the id of an existing note; None for a new one
    text: str | None = None  # of the note; None to remove it


class RunAnnotator:
    """Writes to one run. Its journal is made with the first tag or note. For threads."""

    def __init__(self, run: ServedRun) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._tape: Tape | None = None

    def write(self, asked: AnnotationRequest, rollout: "Rollout", author: str) -> None:
        """Append the requested events. Raises NoAnswer."""
        if (why := why_read_only(self._run)) is not None:
            raise NoAnswer(why, 409)
        by = (asked.by or "").strip() or author
        if len(by) > _MOST_AUTHOR_CHARACTERS or not by.isprintable():
            raise NoAnswer(f"the author has {len(by):,} characters; give 1 to {_MOST_AUTHOR_CHARACTERS} on one line")
        try:
            with self._lock:
                self._append(asked, rollout, by)
        except NoSuchRollout as error:
            raise NoAnswer(str(error), 404) from None
        except RecordError as error:
            raise NoAnswer(str(error)) from None
        except (TapeError, OSError, sqlite3.Error) as error:
            raise NoAnswer(f"{self._run.location} cannot be written to: {error}", 503) from error

    def _append(self, asked: AnnotationRequest, rollout: "Rollout", by: str) -> None:
        from rolltape.tape.recording.annotating import change_note_event, check_place, note_event, retag_event

        place: dict[str, Any] = {"turn": asked.turn, "tokens": asked.tokens, "try_index": rollout.head.try_index}
        events = []
        if asked.note is not None:
            events.append(change_note_event(self._run.reader, rollout.id, asked.note, asked.text, by))
        elif asked.text is not None:
            events.append(note_event(rollout.id, asked.text, by=by, **place))
        if asked.add_tags or asked.remove_tags:
            events.append(retag_event(rollout.id, added=asked.add_tags, removed=asked.remove_tags, by=by, **place))
        if not events:
            raise RecordError("nothing to write; give text, add_tags or remove_tags")
        check_place(rollout, asked.turn, asked.tokens)
        self._open().append_events(events)

    def _open(self) -> "Tape":
        if self._tape is None:
            from rolltape.tape.recording.tape import open_tape

            self._tape = open_tape(self._run.location)
        return self._tape

    def close(self) -> None:
        with self._lock:
            if self._tape is not None:
                self._tape.close()


def why_read_only(run: ServedRun) -> str | None:
    """Why nothing can be written to a run, or None."""
    if run.path is None:
        return f"{run.location} holds published shards; serve the run's own directory to annotate it"
    for folder in (run.path, run.path / "journals"):
        if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):
            return f"{folder} cannot be written to by this user; serve the run as its owner to annotate it"
    return None


def build_annotations(annotations: Annotations) -> dict[str, Any]:
    """The tags and notes of one rollout for the page."""
    return {"tags": to_plain(annotations.tags), "notes": to_plain(annotations.notes)}


def build_notes(held: dict[Key, Annotations], names: dict[Key, dict[str, Any]]) -> dict[str, Any]:
    """The notes and the tags by people of a whole run, the newest first, and their number."""
    found = [
        {**names[key], "kind": kind, **to_plain(one)}
        for key, annotations in held.items()
        for kind, several in (("tag", annotations.tags), ("note", annotations.notes))
        for one in several
        if one.at_ns is not None and key in names
    ]
    found.sort(key=lambda one: -int(one["at_ns"]))
    return {
        "total": len(found),
        "notes": sum(one["kind"] == "note" for one in found),
        "bookmarks": sum(one["kind"] == "tag" and one["name"] == BOOKMARK for one in found),
        "authors": Counter(str(one.get("by") or "") for one in found),
        "latest": found[:_MOST_LISTED],
    }

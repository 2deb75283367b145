"""Queries that need only the database of the index: status, progress, weight versions, and problems."""

import contextlib
import json
import sqlite3
from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

from rolltape.records.rollout import ANNOTATION_KINDS, UNGRADED, Annotations, EventKind, annotations_of
from rolltape.tape.index.database import read_about, select_events
from rolltape.tape.journal.file import connected
from rolltape.tape.rundir import RunDirectory
from rolltape.tape.stored import Key, Problem

# A rollout's status: as its finish states it. Without a finish, it runs as long as its writer is alive.
STATUS = "coalesce(finish, CASE WHEN place IN (SELECT name FROM sources WHERE alive) THEN 'running' ELSE 'lost' END)"
# As in `outcome_of`: a finished rollout that could not be graded is kept out of training until it has a reward.
_UNGRADED = f"(finish = 'finished' AND substr(reason, 1, {len(UNGRADED)}) = '{UNGRADED}')"
REASON = f"CASE WHEN scored IS NOT NULL AND {_UNGRADED} THEN NULL ELSE reason END"
FILTER = f"coalesce(filter, CASE WHEN scored IS NULL AND {_UNGRADED} THEN reason END)"
ENDED = "(finish IS NOT NULL OR place NOT IN (SELECT name FROM sources WHERE alive))"


class Progress(NamedTuple):
    """How much of a run the index holds."""

    indexed: int  # rollouts
    total: int
    ended: int
    summarized: int
    searchable: int

    @property
    def is_complete(self) -> bool:
        """Whether everything that was found is indexed."""
        return self.indexed >= self.total


def count_behind(connection: sqlite3.Connection) -> int:
    """How many rollouts were found that are not indexed yet."""
    return int(read_about(connection, "behind", 0))


def count_rollouts(run: RunDirectory) -> int:
    """About how many rollouts a run holds on this machine, counted without the index and without reading them."""
    found = 0
    for path in run.journal_paths():
        with contextlib.suppress(sqlite3.Error), contextlib.closing(connected(path)) as connection:
            found += int(connection.execute("SELECT coalesce(max(pk), 0) FROM rollouts").fetchone()[0])
    for manifest in run.shards.glob("*/MANIFEST.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found += int(json.loads(manifest.read_bytes())["rollouts"])
    return found


def announced_versions(connection: sqlite3.Connection) -> list[str]:
    """The weight versions in the order in which they were announced."""
    return [str(one.event.data["version"]) for one in select_events(connection, "kind = 'version'")]


def ordered_versions(seen: Collection[str], announced: Collection[str]) -> tuple[str, ...]:
    """Weight versions, oldest first. The last announcement counts: after a rollback, an old version is the newest."""
    return tuple(reversed(dict.fromkeys(reversed([*dict.fromkeys(seen), *announced]))))


def annotations_at(connection: sqlite3.Connection, key: Key) -> Annotations | None:
    """The tags and notes of a rollout, those of its turns and tokens included, or None if there is no such rollout."""
    row = connection.execute("SELECT head_tags FROM rollouts WHERE id = ? AND try_index = ?", key).fetchone()
    if row is None:
        return None
    marks = ", ".join("?" * len(ANNOTATION_KINDS))
    found = select_events(connection, f"rollout = ? AND try_index = ? AND kind IN ({marks})", *key, *ANNOTATION_KINDS)
    return annotations_of([one.event for one in found], msgspec.json.decode(row[0]))


def annotations_by_hand(
    connection: sqlite3.Connection, kinds: Sequence[str] = (EventKind.NOTE, EventKind.RETAG)
) -> dict[Key, Annotations]:
    """The tags and notes of each rollout that has events of these kinds: notes, or tags added and removed by hand."""
    keys = connection.execute(
        f"SELECT DISTINCT rollout, try_index FROM events WHERE kind IN ({', '.join('?' * len(kinds))})", kinds
    ).fetchall()
    return {key: held for key in keys if (held := annotations_at(connection, key)) is not None}


def note_texts(connection: sqlite3.Connection) -> dict[int, list[str]]:
    """The texts of the notes on each rollout that has some, by its number."""
    held = annotations_by_hand(connection, [EventKind.NOTE])
    texts = {key: [note.text for note in one.notes] for key, one in held.items()}
    question = "SELECT number FROM rollouts WHERE id = ? AND try_index = ?"
    return {connection.execute(question, key).fetchone()[0]: notes for key, notes in texts.items() if notes}


def is_recorded(connection: sqlite3.Connection) -> bool:
    """Whether a live process records. One that has only added tags and notes so far does not count."""
    marks = ", ".join("?" * len(ANNOTATION_KINDS))
    for name, raw in connection.execute("SELECT name, marks FROM sources WHERE alive").fetchall():
        if msgspec.msgpack.decode(raw)["next_rollout"] > 1:
            return True
        (others, all_of_them) = connection.execute(
            f"SELECT sum(kind NOT IN ({marks})), count(*) FROM events WHERE writer = ?",
            (*ANNOTATION_KINDS, name.partition("/")[2]),
        ).fetchone()
        if others or not all_of_them:
            return True
    return False


def source_problems(connection: sqlite3.Connection) -> list[Problem]:
    """What the follower could not read."""
    rows = connection.execute("SELECT problem FROM problems ORDER BY source, problem").fetchall()
    return [msgspec.json.decode(raw, type=Problem) for (raw,) in rows]

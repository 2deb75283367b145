"""New data of a run → rows of its index. Applying it twice, or in another order, gives the same rows."""

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec

from rolltape.records.policy import PRESETS
from rolltape.records.rollout import ANNOTATION_KINDS, Annotations, EventKind, parse_annotation
from rolltape.records.sample import SUMMARY_RULES, RolloutSummary
from rolltape.tape.index.database import pack_summary, read_about, select_events, write_about
from rolltape.tape.index.queries import annotations_at
from rolltape.tape.index.rows import (
    PART,
    SCORE,
    collected_environment,
    part_columns,
    row_columns,
    score_columns,
    text_list,
)
from rolltape.tape.index.sources import FoundRollout, News
from rolltape.tape.stored import (
    FoundHead,
    Key,
    Problem,
    StoredEvent,
    counts_for,
    rank_part,
)

_ODD = (KeyError, TypeError, ValueError, AttributeError, msgspec.MsgspecError)


class Applier:
    """One transaction's worth of changes. All rows that it touches get the same, next revision."""

    def __init__(self, connection: sqlite3.Connection, gone: Iterable[str] = ()) -> None:
        self._connection = connection
        self._gone = frozenset(gone)  # sources that are no longer there
        self.revision = int(read_about(connection, "revision", 0)) + 1
        self._environments = self._collected_environments()
        self._last_ns = 0

    def add_events(self, events: Sequence[StoredEvent]) -> None:
        """Store events that are not read with their rollout's own events."""
        rows = [
            (*one.key, one.about.at_ns, one.about.kind, one.about.rollout, one.about.try_index, one.body)
            for one in events
        ]
        self._connection.executemany(
            f"INSERT OR IGNORE INTO events VALUES (?, ?, ?, ?, ?, ?, ?, {self.revision})", rows
        )
        for one in events:
            self._last_ns = max(self._last_ns, one.about.at_ns)
            if one.about.kind == EventKind.COLLECT and one.about.rollout is None:
                self._name_environment(one)

    def add_rollouts(self, news: News, found: Iterable[FoundHead]) -> None:
        """Insert rollouts, or, if they are known, update their place and their end."""
        with_events = self._with_events()
        for one in found:
            key = one.head.key
            row = self._row(one, news)
            self._last_ns = max(self._last_ns, one.head.started_at_ns)
            known = self._known_part(key)
            if known is not None:
                self._add_part(*known, row, one)
            else:
                number = self._connection.execute(_insert(tuple(row)), row).lastrowid
                self._set_head(number, one)
                if key in with_events:
                    self._apply(select_events(self._connection, "rollout = ? AND try_index = ?", *key))
            if key in news.summaries:
                self._apply([news.summaries[key]])

    def apply(self, news: News) -> None:
        """Apply what is new about rollouts that are in the index already."""
        for key, rollout in news.rollouts.items():
            if key not in news.fresh:
                self._change_part(key, rollout, news.name)
        self._apply(news.apart)

    def apply_summaries(self, news: News) -> None:
        """Apply summaries of rollouts in other sources, after all rollouts were added."""
        self._apply([one for key, one in news.summaries.items() if key not in news.fresh])

    def set_writer(self, place: str, writer: str, alive: bool) -> None:
        """Note whether a writer is alive. Its unfinished rollouts are then running, or lost."""
        row = self._connection.execute("SELECT alive FROM sources WHERE name = ?", (place,)).fetchone()
        if row is not None and bool(row[0]) != alive:
            self._connection.execute("UPDATE sources SET alive = ? WHERE name = ?", (alive, place))
            self._connection.execute(
                "UPDATE rollouts SET revision = ? WHERE writer = ? AND finish IS NULL", (self.revision, writer)
            )

    def set_problems(self, source: str, problems: Sequence[Problem], *, keep: bool = False) -> None:
        """Note what cannot be read in a source. With `keep`, problems noted before stay."""
        if not keep:
            self._connection.execute("DELETE FROM problems WHERE source = ?", (source,))
        rows = [(source, msgspec.json.encode(one).decode()) for one in problems]
        self._connection.executemany("INSERT OR IGNORE INTO problems VALUES (?, ?)", rows)

    def finish(self) -> None:
        """Store the revision."""
        write_about(self._connection, "revision", self.revision)
        last_ns = max(self._last_ns, int(read_about(self._connection, "last_activity_ns", 0)))
        write_about(self._connection, "last_activity_ns", last_ns)

    def _row(self, found: FoundHead, news: News) -> dict[str, Any]:
        head = found.head
        rollout = news.rollouts.get(head.key) or FoundRollout(found.row)
        return row_columns(found, rollout, news.name, self._environments.get(head.source), self.revision)

    def _known_part(self, key: Key) -> tuple[int, dict[str, Any]] | None:
        """The number of a rollout and the part of its owner, or None if the index does not have it yet."""
        row = self._connection.execute(
            f"SELECT number, {', '.join(PART)} FROM rollouts WHERE id = ? AND try_index = ?", key
        ).fetchone()
        return None if row is None else (row[0], dict(zip(PART, row[1:], strict=True)))

    def _add_part(self, number: int, part: dict[str, Any], row: dict[str, Any], found: FoundHead) -> None:
        """Apply a rollout that was found again: moved into a shard, taken over, or recorded twice by mistake."""
        fresh = {name: row[name] for name in PART}
        if part["writer"] == fresh["writer"]:
            if self._is_sealed(part):
                return
            self._set_part(number, {**part, **fresh, "finish": fresh["finish"] or part["finish"]})
        else:
            others = {one["writer"]: one for one in self._parts(number)}
            known_part = others.get(fresh["writer"])
            if known_part is None or not self._is_sealed(known_part):
                others[fresh["writer"]] = fresh
            self._choose(number, [part, *others.values()], found)
        if row["finish"] is not None:
            self._outdate(number, row["changed"])
        if row["scored"] is not None:
            self._set_latest(number, "scored", {name: row[name] for name in ("scored", *SCORE)})

    def _is_sealed(self, part: Mapping[str, Any]) -> bool:
        """Whether a part lies in a shard that is still there."""
        return str(part["place"]).startswith("shard/") and part["place"] not in self._gone

    def _choose(self, number: int, parts: Sequence[dict[str, Any]], found: FoundHead | None = None) -> None:
        """Give the row the part of its owner."""
        by_writer = {part["writer"]: part for part in parts}
        owner, *others = sorted(
            by_writer.values(),
            key=lambda part: rank_part(
                part["epoch"],
                ended=part["finish"] is not None,
                started_ns=part["started_ns"],
                writer=part["writer"],
            ),
        )
        self._set_part(number, owner)
        if owner["finish"] is None:  # it was taken over: its summary and words are incomplete now
            for table in ("summaries", "searchable"):
                self._connection.execute(f"DELETE FROM {table} WHERE rollout = ?", (number,))
        if found is not None and owner["writer"] == found.writer:
            self._set_head(number, found)
        self._connection.execute("DELETE FROM parts WHERE rollout = ?", (number,))
        self._connection.executemany(
            "INSERT INTO parts VALUES (?, ?, ?)",
            [(number, part["writer"], msgspec.msgpack.encode(part)) for part in others],
        )

    def _set_head(self, number: int | None, found: FoundHead) -> None:
        self._connection.execute("INSERT OR REPLACE INTO heads VALUES (?, ?)", (number, found.raw))
        self._connection.executemany(
            "INSERT OR IGNORE INTO foreign_ids VALUES (?, ?)", [(one, number) for one in found.head.foreign_ids]
        )

    def _change_part(self, key: Key, rollout: FoundRollout, place: str) -> None:
        """Update the part of a rollout that lies at a place. The rollout may have ended."""
        known = self._known_part(key)
        if known is None:
            return
        number, part = known
        others = self._parts(number)
        writer = rollout.finish.writer if rollout.finish else None
        if part["place"] == place or (writer == part["writer"] and not str(part["place"]).startswith("shard/")):
            self._set_part(number, part | part_columns(rollout))
        elif any(other["place"] == place for other in others):
            changed = [other | part_columns(rollout) if other["place"] == place else other for other in others]
            self._choose(number, [part, *changed])
        self._apply([one for one in (rollout.finish, rollout.score) if one is not None])

    def _set_part(self, number: int, part: Mapping[str, Any]) -> None:
        changes = ", ".join(f"{name} = :{name}" for name in PART)
        self._connection.execute(
            f"UPDATE rollouts SET {changes}, revision = :revision WHERE number = :number",
            {**part, "revision": self.revision, "number": number},
        )

    def _parts(self, number: int) -> list[dict[str, Any]]:
        rows = self._connection.execute("SELECT part FROM parts WHERE rollout = ?", (number,))
        return [msgspec.msgpack.decode(raw) for (raw,) in rows.fetchall()]

    def _apply(self, events: Sequence[StoredEvent]) -> None:
        """Apply events. An event has no effect if a later one of its kind was applied."""
        annotated: dict[int, Key] = {}
        for stored in events:
            about = stored.about
            if about.rollout is None:
                continue
            found = self._connection.execute(
                "SELECT number, writer, finish FROM rollouts WHERE id = ? AND try_index = ?", about.key
            ).fetchone()
            if found is None:
                continue  # it is applied when the rollout is found
            try:
                if about.kind in ANNOTATION_KINDS:
                    parse_annotation(about.kind, stored.event.data)
                    self._last_ns = max(self._last_ns, about.at_ns)
                    annotated[found[0]] = about.key
                else:
                    self._apply_one(stored, *found)
            except _ODD as error:
                what = f"the {about.kind} of rollout {about.rollout} cannot be read: {error!r}"
                problem = Problem(f"event {stored.sequence} of {stored.writer}", what, "")
                self.set_problems("events", [problem], keep=True)  # it stays wherever the event is moved
        for number, key in annotated.items():
            self._annotate(number, key)

    def _annotate(self, number: int, key: Key) -> None:
        """Compute the tags and notes of a rollout from all events about them: each builds on the earlier ones."""
        held = annotations_at(self._connection, key) or Annotations()
        self._connection.execute(
            "UPDATE rollouts SET tags = ?, inner_tags = ?, notes = ?, revision = ? WHERE number = ?",
            (text_list(held.rollout_tags), text_list(held.inner_tags), len(held.notes), self.revision, number),
        )

    def _apply_one(self, stored: StoredEvent, number: int, writer: str, finish: str | None) -> None:
        about, order = stored.about, stored.order_text
        self._last_ns = max(self._last_ns, about.at_ns)
        match about.kind:
            case EventKind.DELIVERY if finish is not None:
                self._outdate(number, order)
                if stored.writer != writer:  # the summary of the rollout's own writer does not include it
                    self._connection.execute("DELETE FROM summaries WHERE rollout = ?", (number,))
            case _ if about.turn is not None:
                pass
            case EventKind.FINISH if counts_for(stored, writer):
                self._outdate(number, order)
            case EventKind.SCORE:
                self._set_latest(number, "scored", score_columns(stored))
            case EventKind.FILTER:
                reason = stored.event.data.get("reason")
                self._set_latest(number, "filtered_at", {"filtered_at": order, "filter": reason})
            case EventKind.PRUNE:
                self._prune(number, stored)
                self._outdate(number, order)
            case EventKind.SUMMARY:
                self._summarize(number, stored)

    def _set_latest(self, number: int, mark: str, values: dict[str, Any]) -> None:
        changes = ", ".join(f"{name} = :{name}" for name in values)
        self._connection.execute(
            f"UPDATE rollouts SET {changes}, revision = :revision "
            f"WHERE number = :number AND coalesce({mark}, '') < :{mark}",
            {**values, "revision": self.revision, "number": number},
        )

    def _prune(self, number: int, stored: StoredEvent) -> None:
        what = str(stored.event.data.get("pruned") or "")
        ((held,),) = self._connection.execute("SELECT pruned FROM rollouts WHERE number = ?", (number,)).fetchall()
        known = msgspec.json.decode(held)
        if what and what not in known:
            self._connection.execute(
                "UPDATE rollouts SET pruned = ?, revision = ? WHERE number = ?",
                (text_list([*known, what]), self.revision, number),
            )

    def _outdate(self, number: int, order: str) -> None:
        """Discard the summary of a rollout if it does not cover an event that changes it."""
        cursor = self._connection.execute(
            "UPDATE rollouts SET changed = ?, revision = ? WHERE number = ? AND changed < ?",
            (order, self.revision, number, order),
        )
        if cursor.rowcount:
            self._connection.execute("DELETE FROM summaries WHERE rollout = ? AND covers < ?", (number, order))

    def _summarize(self, number: int, stored: StoredEvent) -> None:
        data = stored.event.data
        ((changed,),) = self._connection.execute("SELECT changed FROM rollouts WHERE number = ?", (number,)).fetchall()
        if data.get("rules") != SUMMARY_RULES or not changed or str(data["covers"]) < changed:
            return
        others = (
            "SELECT 1 FROM events WHERE rollout = ? AND try_index = ? AND kind = 'delivery' AND writer != ? LIMIT 1"
        )
        if self._connection.execute(others, (*stored.about.key, stored.writer)).fetchone():
            return  # its writer did not know them
        summary = msgspec.convert({name: data[name] for name in RolloutSummary.__struct_fields__}, RolloutSummary)
        if all(name in summary.policies and summary.policies[name].key == PRESETS[name].key for name in PRESETS):
            store_summary(self._connection, number, summary, str(data["covers"]), (), self.revision)

    def _with_events(self) -> set[Key]:
        """The rollouts that are not in the index yet although it has events about them."""
        rows = self._connection.execute(
            "SELECT DISTINCT e.rollout, e.try_index FROM events e WHERE e.rollout IS NOT NULL AND NOT EXISTS "
            "(SELECT 1 FROM rollouts r WHERE r.id = e.rollout AND r.try_index = e.try_index)"
        )
        return set(rows.fetchall())

    def _collected_environments(self) -> dict[str | None, str]:
        begun = select_events(self._connection, "rollout IS NULL AND kind = 'collect'")
        return dict(named for one in begun if (named := collected_environment(one)))

    def _name_environment(self, stored: StoredEvent) -> None:
        if named := collected_environment(stored):
            source, environment = named
            self._environments[source] = environment
            self._connection.execute(
                "UPDATE rollouts SET environment = ?, revision = ? WHERE environment IS NULL AND source IS ?",
                (environment, self.revision, source),
            )


@cache
def _insert(columns: tuple[str, ...]) -> str:
    return f"INSERT INTO rollouts ({', '.join(columns)}) VALUES ({', '.join(':' + name for name in columns)})"


def store_summary(
    connection: sqlite3.Connection,
    number: int,
    summary: RolloutSummary,
    covers: str,
    problems: Sequence[str],
    revision: int,
) -> None:
    """Store the summary of a rollout. It includes all events up to the one that `covers` names."""
    packed = pack_summary(summary)
    connection.execute(
        "INSERT OR REPLACE INTO summaries VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (number, covers, summary.branches, *packed, text_list(problems)),
    )
    connection.execute("UPDATE rollouts SET revision = ? WHERE number = ?", (revision, number))

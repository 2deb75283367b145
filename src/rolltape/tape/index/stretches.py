"""A journal or a shard read a stretch at a time: what is new in it, and one rollout by where it lies.

Listing a source holds all of its heads and events at once; this holds those that are asked for, so that following a
large run and loading a rollout of it cost what is read.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from rolltape.errors import DamagedTapeError
from rolltape.records.openfields import decode_record
from rolltape.records.rollout import RolloutHead
from rolltape.tape.journal.reading import JournalSource
from rolltape.tape.journal.schema import MAX_TURNS, event_crc, row_crc, turn_pk
from rolltape.tape.shards.reading import ShardSource
from rolltape.tape.stored import StoredEvent, StoredSession, decoded_event

_UNREADABLE = (DamagedTapeError, msgspec.MsgspecError, ValueError, KeyError, TypeError, AttributeError)


class FoundHead(NamedTuple):
    """A rollout's head, and the number of its row."""

    row: int
    head: RolloutHead


class Counts(NamedTuple):
    """What a source counts of a rollout: turns of each session, sampled tokens, weight versions as they appear."""

    turns: tuple[int, ...]
    sampled_tokens: int
    versions: tuple[str, ...]


class JournalStretches(JournalSource):
    """A journal. Rows have dense numbers, but one may be written after one with a higher number."""

    def last_event(self) -> int:
        """The number of the last event that is there now; -1: there is none."""
        ((last,),) = self._connection.execute("SELECT coalesce(max(sequence), -1) FROM events").fetchall()
        return int(last)

    def heads(self, low: int, high: int) -> Iterator[FoundHead]:  # type: ignore[override]
        """The rollouts `[low, high]`."""
        for pk, id_, try_index, raw, crc in self._rows(
            "id, try_index, head, crc", "rollouts", "pk", "rollouts", low, high
        ):
            if row_crc(pk, id_, try_index, raw) != crc:
                self._problem(f"row {pk} of rollouts is damaged", f"rollout {id_} (try {try_index})")
                continue
            with self._noting(f"rollout {id_} (try {try_index})"):
                yield FoundHead(pk, decode_record(raw, RolloutHead, f"rollout {id_}"))

    def sessions(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        """The sessions `[low, high]`: their numbers, and those of their rollouts."""
        for pk, rollout, ordinal, raw, crc in self._rows(
            "rollout, ordinal, head, crc", "sessions", "pk", "sessions", low, high
        ):
            if row_crc(pk, rollout, ordinal, raw) == crc:
                yield pk, rollout

    def said(self, low: int, high: int) -> Iterator[tuple[int, StoredEvent]]:
        """The events `[low, high]` with their numbers."""
        for sequence, body, crc in self._rows("body, crc", "events", "sequence", "events", low, high):
            try:
                if event_crc(sequence, body) != crc:
                    raise DamagedTapeError(f"event {sequence} is damaged")
                yield sequence, decoded_event(self.writer, sequence, body)
            except (DamagedTapeError, msgspec.MsgspecError, TypeError) as error:
                self._problem(str(error), "what it said")

    def sampled_since(self, session: int, sequence: int) -> Iterator[tuple[int, int, bytes]]:
        """The turns of a session from a sequence number on: number, sampled tokens, facts."""
        low, high = turn_pk(session, sequence), turn_pk(session, MAX_TURNS - 1)
        for pk, size, facts in self._rows("length(sampled), facts", "turns", "pk", "turns", low, high):
            yield pk & (MAX_TURNS - 1), size // 4 if isinstance(size, int) else 0, facts

    def head(self, row: int) -> RolloutHead | None:
        """The head in a row; None: it cannot be read."""
        return next((found.head for found in self.heads(row, row)), None)

    def stored(self, row: int, head: RolloutHead, sessions: tuple[int, int]) -> Sequence[StoredSession]:  # type: ignore[override]
        """A rollout's sessions with their turns, which lie between two sessions' numbers."""
        if sessions[1] < sessions[0]:
            return []
        found = [
            (pk, ordinal, raw)
            for pk, rollout, ordinal, raw, crc in self._rows(
                "rollout, ordinal, head, crc", "sessions", "pk", "sessions", *sessions
            )
            if rollout == row and row_crc(pk, rollout, ordinal, raw) == crc
        ]
        name = f"{head.id}.{head.try_index}"
        return [
            StoredSession(raw, ordinal, list(self._turns(pk, f"{name}.{ordinal}", {}))) for pk, ordinal, raw in found
        ]


class ShardStretches(ShardSource):
    """A shard. Its rows are numbered from 0, its events too, in the order of time."""

    def last_event(self) -> int:
        """The number of its last event; -1: there is none."""
        return self._file("events").rows - 1

    def heads(self, low: int, high: int) -> Iterator[FoundHead]:  # type: ignore[override]
        """The rollouts `[low, high]`, as far as they can be read."""
        file = self._file("rollouts")
        for row in range(low, min(high + 1, file.rows)):
            group, index = file.place_of(row)
            try:
                yield FoundHead(row, decode_record(group.value("head", index), RolloutHead, "a rollout"))
            except _UNREADABLE as error:
                self._problem(str(error), f"row {row} of its rollouts")

    def counts(self, row: int) -> tuple[str, Counts]:  # type: ignore[override]
        """The writer of a rollout, and its counts."""
        group, index = self._file("rollouts").place_of(row)
        turns, versions = group.value("turns", index), group.value("versions", index)
        return group.value("writer", index), Counts(tuple(turns), group.value("sampled_tokens", index), tuple(versions))

    def said(self, low: int, high: int) -> Iterator[tuple[int, StoredEvent]]:
        """The events `[low, high]` with their numbers in this shard."""
        file = self._file("events")
        for row in range(low, min(high + 1, file.rows)):
            group, index = file.place_of(row)
            try:
                yield (
                    row,
                    decoded_event(
                        group.value("writer", index), group.value("sequence", index), group.value("body", index)
                    ),
                )
            except _UNREADABLE as error:
                self._problem(str(error), "what it said")

    def head(self, row: int) -> RolloutHead | None:
        """The head in a row; None: it cannot be read."""
        return next((found.head for found in self.heads(row, row)), None)

    def stored(self, row: int, head: RolloutHead, sessions: tuple[int, int]) -> Sequence[StoredSession]:  # type: ignore[override]
        """A rollout's sessions with their turns; `sessions` is for journals."""
        del head, sessions
        group, index = self._file("rollouts").place_of(row)
        names = ("side_start", "side_stop", "turn_start", "turn_stop", "ordinals", "sessions", "rollout")
        try:
            return self._loaded({name: group.value(name, index) for name in names})
        except (*_UNREADABLE, OSError) as error:
            self._problem(f"row {row} of its rollouts cannot be read: {error}", "all turns of that rollout")
            return []


Stretches = JournalStretches | ShardStretches

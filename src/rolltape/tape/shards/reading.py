"""A sealed shard as a reader sees it: listed from one small file, a rollout loaded from the row groups that hold it."""

import contextlib
import json
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rolltape.errors import DamagedTapeError, NewerTapeError
from rolltape.records.jsonable import decode_record
from rolltape.records.messages import Message, Root
from rolltape.records.rollout import EventKind, RolloutHead, Status
from rolltape.records.turn import NO_IDS, SideArray
from rolltape.tape.index.standing import Wanted, gathered, told, unpacked
from rolltape.tape.rundir import SCHEMA, Place
from rolltape.tape.shards.rowgroups import RowFile
from rolltape.tape.shards.writing import MANIFEST
from rolltape.tape.stored import (
    FoundHead,
    HeldRollout,
    Key,
    Problem,
    RolloutCounts,
    StoredEvent,
    StoredSession,
    StoredTurn,
    decoded_event,
    ends_in,
    standings_of,
)

_UNREADABLE = (
    OSError,
    pa.ArrowException,
    msgspec.MsgspecError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    DamagedTapeError,
)


class ShardSource:
    """One shard with its manifest."""

    sealed = True
    alive = False

    def __init__(self, place: Place, shard: str, manifest: dict[str, Any]) -> None:
        self.place = place
        self.shard = shard
        self.manifest = manifest
        self.where = f"shard {shard} at {place.url}"
        self._problems: dict[Problem, None] = {}
        self._files: dict[str, RowFile] = {}

    @property
    def name(self) -> str:
        """What the index calls it."""
        return f"shard/{self.shard}@{self.place.url}"

    def last_event(self) -> int:
        """The number of its last event; -1: there is none."""
        return self._file("events").rows - 1

    def last_rollout(self) -> int:
        """The number of its last rollout, which are counted from 0; -1: there is none."""
        return self._file("rollouts").rows - 1

    def keys(self) -> dict[Key, tuple[int, str]]:
        """The row and the writer of each rollout."""
        file = self._file("rollouts")
        found: dict[Key, tuple[int, str]] = {}
        for row in range(file.rows):
            group, index = file.place_of(row)
            key = (group.value("rollout", index), group.value("try_index", index))
            found[key] = (row, group.value("writer", index))
        return found

    def heads(self, low: int, high: int | None = None) -> Iterator[FoundHead]:
        """The rollouts `[low, high]`, as far as they can be read."""
        file = self._file("rollouts")
        for row in range(low, file.rows if high is None else min(high + 1, file.rows)):
            group, index = file.place_of(row)
            try:
                raw = group.value("head", index)
                head = decode_record(raw, RolloutHead, "a rollout")
                yield FoundHead(row, raw, head, group.value("writer", index))
            except _UNREADABLE as error:
                self._problem(str(error), f"row {row} of its rollouts")

    def counts(self, row: int) -> RolloutCounts:
        """How much there is of the rollout in a row."""
        group, index = self._file("rollouts").place_of(row)
        turns, versions = group.value("turns", index), group.value("versions", index)
        return RolloutCounts(tuple(turns), group.value("sampled_tokens", index), tuple(versions))

    def numbered_events(self, low: int, high: int | None = None) -> Iterator[tuple[int, StoredEvent]]:
        """The events `[low, high]` with their numbers in this shard."""
        file = self._file("events")
        for row in range(low, file.rows if high is None else min(high + 1, file.rows)):
            group, index = file.place_of(row)
            try:
                writer, sequence = group.value("writer", index), group.value("sequence", index)
                yield row, decoded_event(writer, sequence, group.value("body", index))
            except _UNREADABLE as error:
                self._problem(str(error), "what it said")

    def stored(self, row: int, head: RolloutHead) -> list[StoredSession]:
        """The sessions of the rollout in a row, with their turns."""
        group, index = self._file("rollouts").place_of(row)
        names = ("side_start", "side_stop", "turn_start", "turn_stop", "ordinals", "sessions", "rollout")
        try:
            return self._loaded({name: group.value(name, index) for name in names})
        except (*_UNREADABLE, OSError) as error:
            self._problem(f"rollout {head.id} cannot be read: {error}", f"all turns of rollout {head.id}")
            return []

    def messages(self, row: int) -> Iterator[Message]:
        """The messages of the rollout in a row as its turns came to hold them; no tokens are read."""
        group, index = self._file("rollouts").place_of(row)
        contents, turns = _Contents(self._file("contents")), self._file("turns")
        for number in range(group.value("turn_start", index), group.value("turn_stop", index)):
            own, at = turns.place_of(number)
            reply = own.value("reply", at)
            for one in (*own.value("messages", at), *(() if reply is None else (reply,))):
                with contextlib.suppress(*_UNREADABLE):
                    yield contents.message(one)

    def _file(self, table: str) -> RowFile:
        if table not in self._files:
            self._files[table] = RowFile(self.place, self.shard, f"{table}.parquet")
        return self._files[table]

    @cached_property
    def _rows(self) -> dict[Key, dict[str, Any]]:
        try:
            rows = list(self._file("rollouts").each())
        except _UNREADABLE as error:
            self._problem(f"its rollouts cannot be read: {error}", f"{self.manifest.get('rollouts')} rollouts")
            return {}
        return {(row["rollout"], row["try_index"]): row for row in rows}

    def listing(self) -> Sequence[HeldRollout]:
        held = []
        for key, row in self._rows.items():
            try:
                head = decode_record(row["head"], RolloutHead, f"rollout {row['rollout']}")
            except DamagedTapeError as error:
                self._problem(str(error), f"rollout {row['rollout']}")
                continue
            standing = row.get("standing")
            status, rewarded = self._ends.get(key, (None, False)) if standing is None else told(standing)
            held.append(
                HeldRollout(
                    head=head,
                    raw_head=row["head"],
                    writer=row["writer"],
                    status=status,
                    rewarded=rewarded,
                    turns=tuple(row["turns"]),
                    sampled_tokens=row["sampled_tokens"],
                    versions=tuple(row["versions"]),
                )
            )
        return held

    @cached_property
    def _ends(self) -> dict[Key, tuple[Status | None, bool]]:
        """What events say, for a shard that was written without standings."""
        finishes, rewarded = ends_in(stored for stored in self._events if self._is_own(stored))
        return {key: (Status(data["status"]), key in rewarded) for key, data in finishes.items()}

    def _is_own(self, said: StoredEvent) -> bool:
        return said.about.kind != EventKind.FINISH or self.writers.get(said.about.key) == said.writer

    def standings(self, wanted: Wanted = None) -> npt.NDArray[Any]:
        try:
            return gathered(map(unpacked, self._file("rollouts").binaries("standing")), wanted)
        except _UNREADABLE:  # also a KeyError: it was written without
            return standings_of(self.listing(), Status.LOST, wanted)

    def turns_of(self, key: Key) -> tuple[int, ...]:
        """How many turns each session of a rollout has that is in here."""
        return tuple(self._rows[key]["turns"])

    @cached_property
    def writers(self) -> dict[Key, str]:
        """The rollouts in it, and which writer each came from."""
        return {key: row["writer"] for key, row in self._rows.items()}

    @cached_property
    def epochs(self) -> dict[Key, int]:
        """The rollouts in it, and up to which epoch each is whole."""
        return {key: epoch_in(row["head"]) for key, row in self._rows.items()}

    def holds_turns(self, key: Key) -> bool:
        """Whether turns of that rollout are stored here."""
        row = self._rows.get(key)
        return row is not None and row["turn_stop"] > row["turn_start"]

    def events(self) -> Sequence[StoredEvent]:
        return self._events

    @cached_property
    def _events(self) -> list[StoredEvent]:
        try:
            rows = self._file("events").each()
            return [decoded_event(row["writer"], row["sequence"], row["body"]) for row in rows]
        except _UNREADABLE as error:
            self._problem(f"its events cannot be read: {error}", "what they said, rewards and finishes included")
            return []

    def load(self, key: Key) -> Sequence[StoredSession]:
        row = self._rows[key]
        try:
            return self._loaded(row)
        except _UNREADABLE as error:
            self._problem(f"rollout {key[0]} cannot be read: {error}", f"all turns of rollout {key[0]} (try {key[1]})")
            return []

    def _loaded(self, row: dict[str, Any]) -> list[StoredSession]:
        sides = self._side_arrays(row["side_start"], row["side_stop"])
        contents = _Contents(self._file("contents"))
        turns = self._file("turns")
        sessions: dict[int, list[StoredTurn]] = {ordinal: [] for ordinal in row["ordinals"]}
        for number in range(row["turn_start"], row["turn_stop"]):
            group, index = turns.place_of(number)
            reply, logprobs = group.value("reply", index), group.array("logprobs", index)
            sessions[group.value("session", index)].append(
                StoredTurn(
                    sequence=group.value("sequence", index),
                    parent=group.value("parent", index),
                    keep_tokens=group.value("keep_tokens", index),
                    keep_messages=group.value("keep_messages", index),
                    root=contents.root(group.value("root", index)),
                    messages=tuple(contents.message(one) for one in group.value("messages", index)),
                    reply=None if reply is None else contents.message(reply),
                    new_ids=_or_no_ids(group.array("new_ids", index)),
                    sampled_ids=_or_no_ids(group.array("sampled_ids", index)),
                    logprobs=group.array("logprobs_wide", index) if logprobs is None else logprobs,
                    facts=group.value("facts", index),
                    side=sides.get(number, {}),
                )
            )
        heads = zip(row["sessions"], row["ordinals"], strict=True)
        return [StoredSession(head, ordinal, sessions[ordinal]) for head, ordinal in heads]

    def _side_arrays(self, start: int, stop: int) -> dict[int, dict[str, SideArray]]:
        found: dict[int, dict[str, SideArray]] = {}
        for number in range(start, stop):
            group, index = self._file("sides").place_of(number)
            values = np.frombuffer(group.value("data", index), np.dtype(group.value("dtype", index)))
            shaped = values.reshape(group.value("shape", index))
            side = SideArray(group.value("start", index), shaped, group.array("counts", index))
            found.setdefault(group.value("turn", index), {})[group.value("name", index)] = side
        return found

    def verify(self) -> list[Problem]:
        """Compare every file with the size and checksum in the manifest."""
        problems = []
        for name, about in self.manifest.get("files", {}).items():
            try:
                size, checksum = self.place.checksum("shards", self.shard, name)
            except _UNREADABLE as error:
                problems.append(Problem(self.where, f"{name} cannot be read: {error}", name))
                continue
            if (size, checksum) != (about["bytes"], about["sha256"]):
                what = f"{name} has {size} bytes and checksum {checksum[:12]}…, its manifest says "
                what += f"{about['bytes']} and {about['sha256'][:12]}…"
                problems.append(Problem(self.where, what, "possibly anything in that file"))
        return problems

    def problems(self) -> Sequence[Problem]:
        return list(self._problems)

    def _problem(self, what: str, lost: str) -> None:
        self._problems[Problem(self.where, what, lost)] = None

    def close(self) -> None:
        """Close its files and let go of what was read; asked again, it reads again."""
        for file in self._files.values():
            file.close()
        self._files = {}
        for read in ("_rows", "_events", "_ends", "writers", "epochs"):
            self.__dict__.pop(read, None)


class _Contents:
    """The messages and roots that a rollout's turns refer to, each made once."""

    def __init__(self, file: RowFile) -> None:
        self._file = file
        self._messages: dict[int, Message] = {}
        self._roots: dict[int, Root] = {}

    def message(self, row: int) -> Message:
        if row not in self._messages:
            group, index = self._file.place_of(row)
            message = Message.stored(group.value("raw", index))
            if message.digest != group.value("digest", index):
                raise DamagedTapeError(f"content {row} is damaged")
            self._messages[row] = message
        return self._messages[row]

    def root(self, row: int) -> Root:
        if row not in self._roots:
            group, index = self._file.place_of(row)
            self._roots[row] = Root(group.value("raw", index))
        return self._roots[row]


def epoch_in(head: bytes) -> int:
    """The epoch that a rollout's stored head names, without decoding most heads, which name none."""
    return decode_record(head, RolloutHead, "a rollout").epoch if b'"epoch"' in head else 0


def _or_no_ids(ids: Any) -> Any:
    return NO_IDS if ids is None else ids


def shards_at(
    place: Place, known: Collection[str] = (), listed: list[str] | None = None
) -> tuple[list[ShardSource], list[Problem]]:
    """The complete shards at a place, less those known and those that a newer one replaces; and what is wrong there.

    `listed` are the place's shard ids, if they were just asked for.
    """
    listed = place.shard_ids() if listed is None else listed
    while True:
        fresh = [shard for shard in listed if shard not in known]
        found = {shard: raw for shard in fresh if (raw := place.read("shards", shard, MANIFEST)) is not None}
        again = place.shard_ids() if fresh else listed
        if again == listed:
            break
        listed = again  # one took the place of another meanwhile
    sources: dict[str, ShardSource] = {}
    problems: list[Problem] = []
    for shard, raw in found.items():
        where = f"shard {shard} at {place.url}"
        try:
            manifest = json.loads(raw)
            major = int(str(manifest["schema"]).partition(".")[0])
        except (ValueError, KeyError, TypeError):
            problems.append(Problem(where, f"{MANIFEST} is damaged", "all rollouts of that shard"))
            continue
        if major > int(SCHEMA.partition(".")[0]):
            raise NewerTapeError(f"{where}: written with schema {manifest['schema']}; update rolltape")
        sources[shard] = ShardSource(place, shard, manifest)
    replaced = {shard for source in sources.values() for shard in source.manifest.get("replaces", [])}
    return [source for shard, source in sources.items() if shard not in replaced], problems

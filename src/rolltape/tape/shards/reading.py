"""`ShardSource`: lists a sealed shard from one small file, and loads a rollout from the row groups that hold it."""

import contextlib
import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from rolltape.errors import DamagedTapeError, NewerTapeError
from rolltape.records.jsonable import decode_record
from rolltape.records.messages import Message, Root
from rolltape.records.rollout import EventKind, RolloutCounts, RolloutHead, Status
from rolltape.records.turn import NO_IDS, SideArray
from rolltape.tape.rundir import Place, is_too_new
from rolltape.tape.shards.rowgroups import RowFile
from rolltape.tape.shards.writing import MANIFEST
from rolltape.tape.stored import (
    LARGEST_ROW,
    FoundHead,
    Key,
    Problem,
    StoredEvent,
    StoredSession,
    StoredTurn,
    decoded_event,
    read_errors,
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
        """Its name in the index."""
        return f"shard/{self.shard}@{self.place.url}"

    def last_event(self) -> int:
        """The number of its last event, or -1."""
        return self._file("events").rows - 1

    def last_rollout(self) -> int:
        """The number of its last rollout, counted from 0, or -1."""
        return self._file("rollouts").rows - 1

    def keys(self) -> dict[Key, tuple[int, str]]:
        """The row and the writer of each rollout."""
        rows = self._file("rollouts").each(["rollout", "try_index", "writer"])
        return {(row["rollout"], row["try_index"]): (number, row["writer"]) for number, row in enumerate(rows)}

    def heads(self, low: int = 0, high: int = LARGEST_ROW) -> Iterator[FoundHead]:
        file = self._file("rollouts")
        for row in range(low, min(high + 1, file.rows)):
            group, index = file.place_of(row)
            try:
                raw = group.value("head", index)
                head = decode_record(raw, RolloutHead, "a rollout")
                yield FoundHead(row, raw, head, group.value("writer", index))
            except read_errors() as error:
                self._problem(str(error), f"row {row} of its rollouts")

    def counts(self, row: int) -> RolloutCounts:
        """The counts of the rollout in a row."""
        group, index = self._file("rollouts").place_of(row)
        turns, versions = group.value("turns", index), group.value("versions", index)
        return RolloutCounts(tuple(turns), group.value("sampled_tokens", index), tuple(versions))

    def numbered_events(self, low: int = 0, high: int = LARGEST_ROW) -> Iterator[tuple[int, StoredEvent]]:
        file = self._file("events")
        for row in range(low, min(high + 1, file.rows)):
            group, index = file.place_of(row)
            try:
                writer, sequence = group.value("writer", index), group.value("sequence", index)
                yield row, decoded_event(writer, sequence, group.value("body", index))
            except read_errors() as error:
                self._problem(str(error), "its contents")

    def stored(self, row: int, head: RolloutHead) -> list[StoredSession]:
        group, index = self._file("rollouts").place_of(row)
        names = ("side_start", "side_stop", "turn_start", "turn_stop", "ordinals", "sessions", "rollout")
        try:
            return self._loaded({name: group.value(name, index) for name in names})
        except read_errors() as error:
            lost = f"all turns of rollout {head.id} (try {head.try_index})"
            self._problem(f"rollout {head.id} cannot be read: {error}", lost)
            return []

    def messages(self, row: int) -> Iterator[Message]:
        """The messages of the rollout in a row, in the order of its turns. No tokens are read."""
        group, index = self._file("rollouts").place_of(row)
        contents, turns = _Contents(self._file("contents")), self._file("turns")
        for number in range(group.value("turn_start", index), group.value("turn_stop", index)):
            own, at = turns.place_of(number)
            reply = own.value("reply", at)
            for one in (*own.value("messages", at), *(() if reply is None else (reply,))):
                with contextlib.suppress(*read_errors()):
                    yield contents.message(one)

    def _file(self, table: str) -> RowFile:
        if table not in self._files:
            self._files[table] = RowFile(self.place, self.shard, f"{table}.parquet")
        return self._files[table]

    def statuses(self) -> Iterator[tuple[Key, Status | None]]:
        """The rollouts, and how each ended, or None if it has no finish."""
        file = self._file("rollouts")
        if "status" in file.columns:
            for row in file.each(["rollout", "try_index", "status"]):
                yield (row["rollout"], row["try_index"]), row["status"] and Status(row["status"])
            return
        events = (one for _, one in self.numbered_events())  # of version 0.1.0
        finishes = {(one.about.key, one.writer): one for one in events if one.about.kind == EventKind.FINISH}
        for key, (_, writer) in self.keys().items():
            finish = finishes.get((key, writer))
            yield key, None if finish is None else Status(finish.event.data["status"])

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
        try:
            stated = {name: (int(one["bytes"]), str(one["sha256"])) for name, one in self.manifest["files"].items()}
        except (LookupError, ValueError, TypeError, AttributeError):
            what = f"{MANIFEST} is damaged: it has no size and checksum for each file"
            return [Problem(self.where, what, "possibly anything in that shard")]
        problems = []
        for name, (size, checksum) in stated.items():
            try:
                found_size, found = self.place.checksum("shards", self.shard, name)
            except read_errors() as error:
                problems.append(Problem(self.where, f"{name} cannot be read: {error}", name))
                continue
            if (found_size, found) != (size, checksum):
                what = f"{name} has {found_size} bytes and checksum {found[:12]}…, its manifest says "
                what += f"{size} and {checksum[:12]}…"
                problems.append(Problem(self.where, what, "possibly anything in that file"))
        return problems

    def problems(self) -> Sequence[Problem]:
        return list(self._problems)

    def _problem(self, what: str, lost: str) -> None:
        self._problems[Problem(self.where, what, lost)] = None

    def close(self) -> None:
        """Close its files. A later call opens them again."""
        for file in self._files.values():
            file.close()
        self._files = {}


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


def _or_no_ids(ids: Any) -> Any:
    return NO_IDS if ids is None else ids


def shards_at(
    place: Place, known: Collection[str] = (), listed: list[str] | None = None
) -> tuple[list[ShardSource], list[Problem]]:
    """The complete shards at a place, without known and replaced ones, and the problems there.

    `listed` are the place's shard ids, if they were just read.
    """
    listed = place.shard_ids() if listed is None else listed
    while True:
        fresh = [shard for shard in listed if shard not in known]
        found = {shard: raw for shard in fresh if (raw := place.read("shards", shard, MANIFEST)) is not None}
        again = place.shard_ids() if fresh else listed
        if again == listed:
            break
        listed = again  # a shard was replaced in the meantime
    sources: dict[str, ShardSource] = {}
    problems: list[Problem] = []
    for shard, raw in found.items():
        where = f"shard {shard} at {place.url}"
        try:
            manifest = json.loads(raw)
            too_new = is_too_new(manifest["schema"])
        except (ValueError, KeyError, TypeError):
            problems.append(Problem(where, f"{MANIFEST} is damaged", "all rollouts of that shard"))
            continue
        if too_new:
            raise NewerTapeError(f"{where}: written with schema {manifest['schema']}; update rolltape")
        sources[shard] = ShardSource(place, shard, manifest)
    replaced = {shard for source in sources.values() for shard in source.manifest.get("replaces", [])}
    return [source for shard, source in sources.items() if shard not in replaced], problems

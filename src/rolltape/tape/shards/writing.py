"""Sealed shards: a few Parquet files that hold whole rollouts, coded as in the journal, and a manifest written last.

rollouts.parquet   one row per rollout: identity, sessions, counts, and where its turns lie
turns.parquet      one row per turn, those of a rollout together
contents.parquet   messages, tools and template options, each once; turns refer to them by row
sides.parquet      side arrays; `turn` is a row of turns.parquet
events.parquet     events about these rollouts, and about others by the same writers
MANIFEST.json      schema, counts, and size and SHA-256 of every file
"""

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from hashlib import blake2b
from types import TracebackType
from typing import Any, Self

import numpy as np

from rolltape.errors import TapeWriteError
from rolltape.extras import arrow_errors, number_lists, pa, pq
from rolltape.tape.rundir import SCHEMA, Place
from rolltape.tape.stored import HeldRollout, StoredEvent, StoredSession, StoredTurn

MANIFEST = "MANIFEST.json"

# Ids and logprobs compress best with their bytes split by position.
_SPLIT = [f"{column}.list.element" for column in ("new_ids", "sampled_ids", "logprobs", "logprobs_wide")]  # of turns
_GROUP_BYTES = 2 << 20  # of content in a row group: loading a rollout may read this much more than it needs


@cache
def _schemas() -> dict[str, Any]:
    """The Arrow schema of each table of a shard."""
    ids: Any = pa.list_(pa.int32())
    columns: dict[str, list[tuple[str, Any]]] = {
        "rollouts": [
            ("rollout", pa.string()),
            ("try_index", pa.int64()),
            ("step", pa.int64()),
            ("head", pa.binary()),
            ("sessions", pa.list_(pa.binary())),
            ("ordinals", ids),
            ("turns", ids),
            ("sampled_tokens", pa.int64()),
            ("versions", pa.list_(pa.string())),
            ("writer", pa.string()),
            ("turn_start", pa.int64()),
            ("turn_stop", pa.int64()),
            ("side_start", pa.int64()),
            ("side_stop", pa.int64()),
            ("status", pa.string()),  # as its finish has it; absent: it has none
        ],
        "turns": [
            ("session", pa.int32()),
            ("sequence", pa.int32()),
            ("parent", pa.int32()),
            ("keep_tokens", pa.int64()),
            ("keep_messages", pa.int32()),
            ("root", pa.int64()),
            ("messages", pa.list_(pa.int64())),
            ("reply", pa.int64()),
            ("new_ids", ids),
            ("sampled_ids", ids),
            ("logprobs", pa.list_(pa.float32())),
            ("logprobs_wide", pa.list_(pa.float64())),
            ("facts", pa.binary()),
        ],
        "contents": [("digest", pa.binary(16)), ("raw", pa.large_binary())],
        "sides": [
            ("turn", pa.int64()),
            ("name", pa.string()),
            ("start", pa.int64()),
            ("dtype", pa.string()),
            ("shape", pa.list_(pa.int64())),
            ("data", pa.large_binary()),
            ("counts", ids),
        ],
        "events": [("writer", pa.string()), ("sequence", pa.int64()), ("body", pa.binary())],
    }
    return {table: pa.schema(fields) for table, fields in columns.items()}


class _ShardTable:
    """The rows of one table, gathered into row groups."""

    def __init__(self, place: Place, shard: str, table: str) -> None:
        self.name = f"{table}.parquet"
        self.rows = 0
        self._place, self._shard, self._table = place, shard, table
        self._schema = _schemas()[table]
        self._handle = place.open("wb", "shards", shard, self.name)
        self._writer = pq.ParquetWriter(
            self._handle,
            self._schema,
            compression="zstd",
            compression_level=3,
            use_dictionary=False,
            column_encoding=dict.fromkeys(_SPLIT, "BYTE_STREAM_SPLIT") if table == "turns" else None,
            write_statistics=False,
            write_page_checksum=True,
        )
        self._waiting: list[tuple[Any, ...]] = []
        self._bytes = 0

    def add(self, row: tuple[Any, ...], size: int) -> None:
        self._waiting.append(row)
        self.rows += 1
        self._bytes += size + 64
        if self._bytes >= _GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._waiting:
            columns = [
                _arrow(values, field.type)
                for values, field in zip(zip(*self._waiting, strict=True), self._schema, strict=True)
            ]
            with _naming(self._place, self._shard):
                self._writer.write_table(pa.Table.from_arrays(columns, schema=self._schema))
            self._waiting, self._bytes = [], 0

    def close(self) -> None:
        self.flush()
        self._writer.close()
        self._handle.close()


def _arrow(values: Sequence[Any], kind: Any) -> Any:
    """Rows as an Arrow column."""
    if pa.types.is_list(kind) and any(isinstance(value, np.ndarray) for value in values):
        return number_lists(values, kind)
    return pa.array(values, kind)


@contextlib.contextmanager
def _naming(place: Place, shard: str) -> Iterator[None]:
    """Name the shard in an error if it cannot be written."""
    try:
        yield
    except arrow_errors(OSError) as error:
        raise TapeWriteError(f"shard {shard} at {place.url}: {error}") from error


class ShardWriter:
    """Writes a shard. It exists for readers once `commit` has written its manifest."""

    def __init__(self, place: Place, shard: str) -> None:
        self.place = place
        self.shard = shard
        self.sampled_tokens = 0
        self.content_bytes = 0
        self.latest_ns = 0  # of its events
        self._contents: dict[bytes, int] = {}
        self._tables = {table: _ShardTable(place, shard, table) for table in _schemas()}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self.place.remove_shard(self.shard)

    def add_rollout(self, held: HeldRollout, sessions: Sequence[StoredSession]) -> None:
        """Write one rollout whole."""
        turns, sides = self._tables["turns"], self._tables["sides"]
        turn_start, side_start = turns.rows, sides.rows
        for session in sessions:
            for turn in session.turns:
                self._add_turn(session.ordinal, turn)
        head, counts = held.head, held.counts
        row = (
            *(head.id, head.try_index, head.step, held.found.raw, [session.head for session in sessions]),
            [session.ordinal for session in sessions],
            *(list(counts.turns), counts.sampled_tokens, list(counts.versions), held.writer),
            *(turn_start, turns.rows, side_start, sides.rows),
            held.status,
        )
        self._tables["rollouts"].add(row, len(held.found.raw))
        self.sampled_tokens += counts.sampled_tokens

    def _add_turn(self, ordinal: int, turn: StoredTurn) -> None:
        turns = self._tables["turns"]
        wide = turn.logprobs is not None and turn.logprobs.dtype == np.float64
        row = (
            *(ordinal, turn.sequence, turn.parent, turn.keep_tokens, turn.keep_messages),
            self._content(blake2b(turn.root.raw, digest_size=16).digest(), turn.root.raw),
            [self._content(message.digest, message.raw) for message in turn.messages],
            None if turn.reply is None else self._content(turn.reply.digest, turn.reply.raw),
            *(turn.new_ids, turn.sampled_ids),
            None if wide else turn.logprobs,
            turn.logprobs if wide else None,
            turn.facts,
        )
        size = turn.new_ids.nbytes + turn.sampled_ids.nbytes * 2 + len(turn.facts)
        for name, side in turn.side.items():
            data = side.values.tobytes()
            side_row = (turns.rows, name, side.start, side.values.dtype.str, list(side.values.shape), data, side.counts)
            self._tables["sides"].add(side_row, len(data))
            self.content_bytes += len(data)
        turns.add(row, size)
        self.content_bytes += size

    def _content(self, digest: bytes, raw: bytes) -> int:
        row = self._contents.get(digest)
        if row is None:
            row = self._contents[digest] = self._tables["contents"].rows
            self._tables["contents"].add((digest, raw), len(raw))
            self.content_bytes += len(raw)
        return row

    def add_events(self, events: Iterable[StoredEvent]) -> None:
        """Write events, in the order given, after the rollouts."""
        for stored in events:
            self._tables["events"].add((*stored.key, stored.body), len(stored.body))
            self.latest_ns = max(self.latest_ns, stored.about.at_ns)

    def commit(self, **further: Any) -> dict[str, Any]:
        """Close the files and write the manifest: from here on the shard is part of the run."""
        with _naming(self.place, self.shard):
            files = {}
            for table in self._tables.values():
                table.close()
                self.place.make_safe("shards", self.shard, table.name)
                size, checksum = self.place.checksum("shards", self.shard, table.name)
                files[table.name] = {"bytes": size, "sha256": checksum, "rows": table.rows}
            manifest = {**further, "schema": SCHEMA, "shard": self.shard, "files": files}
            manifest["rollouts"] = self._tables["rollouts"].rows
            manifest["turns"] = self._tables["turns"].rows
            manifest["sampled_tokens"] = self.sampled_tokens
            manifest["latest_ns"] = self.latest_ns
            self.place.write(json.dumps(manifest, indent=1).encode(), "shards", self.shard, MANIFEST)
        return manifest

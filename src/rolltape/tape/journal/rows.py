"""Opens a journal for reading, and reads its rows and turns; `repair.salvage` helps if it is damaged."""

import contextlib
import json
import os
import sqlite3
import struct
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from rolltape.errors import DamagedTapeError, NotJsonError
from rolltape.records.messages import Message, Root
from rolltape.records.turn import SideArray
from rolltape.tape.journal.file import MAX_TURNS, SEQUENCE_BITS, has_log, row_crc, try_to_open, turn_crc
from rolltape.tape.repair.salvage import (
    Hole,
    Opened,
    is_log_older,
    opened_as_copy,
    opened_with_torn_log,
    rows_around,
    unseen_frames,
)
from rolltape.tape.stored import StoredTurn

Contents = dict[int, Message | Root]  # by key: those made so far

_PAUSES_S = [0.001 * 2**step for step in range(8)]  # a quarter of a second in all

_OLDER_LOG = "its log (-wal) is older than the file: both were copied while it was written; copy them again"

TURN_COLUMNS = (
    "parent, keep_tokens, keep_messages, root, messages, reply, sides, dtype, sampled, new_ids, logprobs, facts, crc"
)


def opened_to_read(path: Path, alive: bool) -> Opened:
    """Open a journal. A damaged one is opened in the way that can still read it. The file itself is never changed."""
    is_left = has_log(path) and not alive
    # A log that was copied before its journal would hide newer rows of the journal, so it is left out.
    is_older = is_left and is_log_older(path)
    if is_left and not is_older and not os.access(path.parent, os.W_OK):
        return opened_as_copy(path)
    # If no process writes it and it has no log, read it as it is, without making files beside it.
    mode = "ro" if alive or (is_left and not is_older) else "ro&immutable=1"
    connection, _ = try_to_open(path, mode)
    if connection is None:
        return opened_as_copy(path)
    if is_older:
        return Opened(connection, _OLDER_LOG, None)
    if is_left and not Path(f"{path}-shm").is_file():  # it cannot be made here, and says what SQLite sees of the log
        connection.close()
        return opened_as_copy(path)
    unseen = _lasting_unseen_frames(path) if is_left else 0
    return opened_with_torn_log(path, connection, unseen) if unseen else Opened(connection, None, None)


def _lasting_unseen_frames(path: Path) -> int:
    """How many frames of a log SQLite does not count. It soon counts those of a fence that is being written."""
    for pause_s in _PAUSES_S:
        if not unseen_frames(path):
            return 0
        time.sleep(pause_s)
    return unseen_frames(path)


def readable_rows(
    connection: sqlite3.Connection, columns: str, table: str, key: str, low: int, high: int, most: int
) -> Iterator[tuple[Any, ...] | Hole]:
    """Rows with `low <= key <= high` in order, the key first; a Hole for each range that cannot be read.

    Around damage the search goes no further than the key `most`.
    """
    select = f"SELECT {key}, {columns} FROM {table} WHERE {key} BETWEEN ? AND ? ORDER BY {key}"
    reached = low
    try:
        for row in connection.execute(select, (low, high)):
            # A damaged tree can lead SQLite to rows outside the range, which belong to others.
            if reached <= row[0] <= high:
                yield row
                reached = row[0] + 1
        return
    except sqlite3.DatabaseError as error:
        reason = str(error)
    yield from rows_around(connection, select, reached, max(min(high, most), reached), reason)


class TurnReader:
    """Makes turns from rows. `note` is called for each damaged side array, with what is lost."""

    def __init__(self, connection: sqlite3.Connection, contents: Contents, note: Callable[[str, str], None]) -> None:
        self._connection = connection
        self._contents = contents
        self._note = note
        self._read_ahead: dict[int, tuple[bytes, bytes]] = {}

    def turns(self, rows: Sequence[tuple[Any, ...]]) -> Iterator[StoredTurn | tuple[int, Exception]]:
        """The turn of each row, or its key and why the turn cannot be made. Reads all their contents at once."""
        wanted = {key for row in rows for key in (row[4], row[6], *_keys(row[5]))}
        self._read_contents(sorted(key for key in wanted if isinstance(key, int) and key not in self._contents))
        for row in rows:
            try:
                yield self.turn(row)
            except (DamagedTapeError, ValueError, TypeError, AttributeError, OverflowError, struct.error) as error:
                yield row[0], error

    def turn(self, row: tuple[Any, ...]) -> StoredTurn:
        """The turn of a row, whose first field is its key. Raises DamagedTapeError, or numpy's errors for odd bytes."""
        pk, parent, keep_tokens, keep_messages, root_pk, message_pks, reply_pk, sides, dtype = row[:9]
        sampled, new_ids, logprobs, facts, crc = row[9:]
        root = self._root(root_pk)
        messages = [self._message(one) for one in array("q", message_pks)]
        reply = None if reply_pk is None else self._message(reply_pk)
        digests = [message.digest for message in messages]
        if turn_crc(row[:-1], root.raw_digest, digests, None if reply is None else reply.digest) != crc:
            raise DamagedTapeError("its checksum does not agree")
        return StoredTurn(
            sequence=pk & (MAX_TURNS - 1),
            parent=parent,
            keep_tokens=keep_tokens,
            keep_messages=keep_messages,
            root=root,
            messages=tuple(messages),
            reply=reply,
            new_ids=np.frombuffer(new_ids, np.int32),
            sampled_ids=np.frombuffer(sampled, np.int32),
            logprobs=None if logprobs is None else np.frombuffer(logprobs, np.dtype(dtype)),
            facts=facts,
            side=self._side_arrays(pk, sides) if sides else {},
        )

    def messages(self, keys: bytes) -> Iterator[Message]:
        """The messages with these keys that were not read yet, as far as they can be read."""
        for pk in array("q", keys):
            if pk not in self._contents:
                with contextlib.suppress(DamagedTapeError):
                    yield self._message(pk)

    def _side_arrays(self, pk: int, expected: int) -> dict[str, SideArray]:
        found: dict[str, SideArray] = {}
        turn = f"turn {pk & (MAX_TURNS - 1)} of session {pk >> SEQUENCE_BITS} of this journal"
        try:
            for name, *row in self._connection.execute(
                "SELECT name, start, dtype, shape, data, counts, crc FROM side_arrays WHERE turn = ? ORDER BY rowid",
                (pk,),
            ):
                start, dtype, shape, data, counts, crc = row
                if row_crc(pk, name, start, dtype, shape, data, counts) != crc:
                    self._note(f"side array {name!r} of {turn} is damaged", f"side array {name!r} of {turn}")
                    expected -= 1
                    continue
                values = np.frombuffer(data, np.dtype(dtype)).reshape(json.loads(shape))
                found[name] = SideArray(start, values, None if counts is None else np.frombuffer(counts, np.int32))
        except sqlite3.DatabaseError as error:
            self._note(f"side arrays of {turn} cannot be read: {error}", f"side arrays of {turn}")
            return found
        if len(found) < expected:
            self._note(f"{turn} had {expected} side arrays, {len(found)} are found", f"side arrays of {turn}")
        return found

    def _root(self, pk: int) -> Root:
        known = self._contents.get(pk)
        if not isinstance(known, Root):
            known = self._contents[pk] = Root(self._content(pk)[0])
        return known

    def _message(self, pk: int) -> Message:
        known = self._contents.get(pk)
        if isinstance(known, Message):
            return known
        raw, digest = self._content(pk)
        try:
            message = Message.stored(raw)
        except (ValueError, AttributeError, NotJsonError) as error:
            raise DamagedTapeError(f"message {pk} is damaged: {error}") from None
        if message.digest != digest:
            raise DamagedTapeError(f"message {pk} is damaged")
        self._contents[pk] = message
        return message

    def _read_contents(self, keys: list[int]) -> None:
        select = "SELECT pk, raw, digest FROM contents WHERE pk IN (SELECT value FROM json_each(?))"
        with contextlib.suppress(sqlite3.DatabaseError):  # rows that cannot be read are found one by one later
            for pk, *row in self._connection.execute(select, (json.dumps(keys),)):
                self._read_ahead[pk] = (row[0], row[1])

    def _content(self, pk: int) -> tuple[bytes, bytes]:
        try:
            row = self._read_ahead.pop(pk, None)
            if row is None:
                row = self._connection.execute("SELECT raw, digest FROM contents WHERE pk = ?", (pk,)).fetchone()
        except sqlite3.DatabaseError as error:
            raise DamagedTapeError(f"content {pk} cannot be read: {error}") from None
        if row is None:
            raise DamagedTapeError(f"content {pk} is missing")
        if blake2b(row[0], digest_size=16).digest() != row[1]:
            raise DamagedTapeError(f"content {pk} is damaged")
        return row[0], row[1]


def _keys(packed: object) -> Iterable[int]:
    """The keys of a row's messages; none if the row is damaged, which is noticed when its turn is made."""
    return array("q", packed) if isinstance(packed, bytes) and len(packed) % 8 == 0 else ()

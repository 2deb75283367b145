"""Reading SQLite files that may be damaged: open without changing them, and read around what is unreadable."""

import contextlib
import os
import shutil
import sqlite3
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rolltape.errors import DamagedTapeError
from rolltape.tape.journal.schema import TABLES
from rolltape.tape.repair.torn import has_log, log_of, unseen_frames, with_all_frames

_PROBES_PER_HOLE = 512


class Opened(NamedTuple):
    """A connection that reads, what was wrong with the file on opening, and the copy to remove afterwards."""

    connection: sqlite3.Connection
    damage: str | None
    copy: tempfile.TemporaryDirectory[str] | None


class Hole(NamedTuple):
    """Keys `[low, high]` in which rows could not be read."""

    low: int
    high: int
    error: str


def opened_to_read(path: Path, alive: bool) -> Opened:
    """Open a journal; a damaged one in whatever way still reads something. The file itself is never changed."""
    writable = os.access(path.parent, os.W_OK)
    has_wal = has_log(path)
    if alive or (has_wal and writable):
        connection, error = _tried(f"{path.as_uri()}?mode=ro")
    elif not has_wal:
        # Nobody writes it and nothing lies beside it: read it as it is, without making files beside it.
        connection, error = _tried(f"{path.as_uri()}?mode=ro&immutable=1")
    else:
        connection, error = None, "its directory is read-only"
    if connection is not None:
        unseen = unseen_frames(path) if has_wal and not alive else 0
        return _with_torn_log(path, connection, unseen) if unseen else Opened(connection, None, None)
    if _is_foreign(path):
        raise DamagedTapeError(f"{path}: a SQLite file, but no journal of Rolltape")
    damage = None if error == "its directory is read-only" else error
    copy = tempfile.TemporaryDirectory(prefix="rolltape-")
    try:
        copied = _copied(path, Path(copy.name))
        for mend in (_left_alone, _with_fresh_first_page):
            mend(copied)
            connection, error = _tried(f"{copied.as_uri()}?mode=ro", tolerant=mend is not _left_alone or bool(damage))
            if connection is not None:
                return Opened(connection, damage, copy)
    except OSError as failure:
        error = str(failure)
    copy.cleanup()
    raise DamagedTapeError(f"{path}: {error}; nothing in it can be read")


def _with_torn_log(path: Path, connection: sqlite3.Connection, unseen: int) -> Opened:
    """What a damaged log holds, read from a copy that has taken its pages; if that fails, what SQLite makes of it."""
    damage = f"its log (-wal) is damaged: SQLite would leave out its last {unseen} pages"
    copy = tempfile.TemporaryDirectory(prefix="rolltape-")
    recovered, _ = _tried(f"{with_all_frames(path, Path(copy.name)).as_uri()}?mode=ro&immutable=1", tolerant=True)
    if recovered is None:
        copy.cleanup()
        return Opened(connection, damage, None)
    connection.close()
    return Opened(recovered, damage, copy)


def _tried(uri: str, tolerant: bool = False) -> tuple[sqlite3.Connection | None, str]:
    connection = None
    try:
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA busy_timeout = 10000")
        if tolerant:
            connection.execute("PRAGMA writable_schema = ON")  # reads a file shorter than it says it is
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        for table in ("rollouts", "sessions", "turns", "contents", "side_arrays", "events"):
            connection.execute(f"SELECT * FROM {table} WHERE rowid < 0").fetchone()
    except sqlite3.OperationalError as error:
        # The tables are not found: either no journal of ours, or its first page is damaged.
        failure = str(error)
    except sqlite3.DatabaseError as error:
        failure = str(error)
        if connection is not None and _schema_reads(connection):
            return connection, ""
    else:
        return connection, ""
    if connection is not None:
        connection.close()
    return None, failure


def _schema_reads(connection: sqlite3.Connection) -> bool:
    """Whether at least the list of tables is intact, so that the readable parts of each can be had."""
    with contextlib.suppress(sqlite3.Error):
        names = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        return {"rollouts", "sessions", "turns", "contents", "side_arrays", "events"} <= names
    return False


def _is_foreign(path: Path) -> bool:
    """Whether this is a sound database that has nothing of ours."""
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)) as it,
    ):
        names = {row[0] for row in it.execute("SELECT name FROM sqlite_master")}
        return bool(names) and not names & {"rollouts", "sessions", "turns", "contents"}
    return False


def _copied(path: Path, directory: Path) -> Path:
    target = directory / path.name
    shutil.copyfile(path, target)
    if log_of(path).exists():
        shutil.copyfile(log_of(path), log_of(target))
    return target


def _left_alone(path: Path) -> None:
    del path


def _with_fresh_first_page(path: Path) -> None:
    """Give a copy the first page of a new journal: it holds the list of tables, which is always the same."""
    template = path.with_name("template.sqlite")
    template.unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(template, isolation_level=None)) as making:
        making.executescript("BEGIN;" + TABLES + "COMMIT;")
        making.execute("PRAGMA journal_mode = WAL")
        (page_size,) = making.execute("PRAGMA page_size").fetchone()
    page = bytearray(template.read_bytes()[:page_size])
    pages = max(path.stat().st_size // page_size, 1)
    struct.pack_into(">I", page, 28, pages)
    struct.pack_into(">II", page, 32, 0, 0)  # no free list: what it names may be damaged as well
    struct.pack_into(">I", page, 92, struct.unpack_from(">I", page, 24)[0])
    with path.open("r+b") as handle:
        handle.write(page)
        handle.truncate(pages * page_size)


def readable_rows(
    connection: sqlite3.Connection, columns: str, table: str, key: str, low: int, high: int, most: int
) -> Iterator[tuple[Any, ...] | Hole]:
    """Rows with `low <= key <= high` in order, the key first; a Hole for each stretch that cannot be read.

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
    yield from _around(connection, select, reached, max(min(high, most), reached), reason)


def _around(
    connection: sqlite3.Connection, select: str, low: int, high: int, reason: str
) -> Iterator[tuple[Any, ...] | Hole]:
    """The readable rows of a stretch that begins with an unreadable one, found by halving it from the end."""
    tail, low_of_tail = _tail(connection, select, low, high)
    middle: list[tuple[Any, ...]] = []
    waiting = [(low, low_of_tail - 1)]
    for _ in range(_PROBES_PER_HOLE):
        if not waiting:
            break
        first, last = waiting.pop(0)
        if first >= last:
            continue
        half = (first + last + 1) // 2
        rows, reached = _head(connection, select, half, last)
        middle += rows
        waiting.append((first, half - 1))
        if reached <= last:
            waiting.append((reached, last))
    known = sorted({row[0]: row for row in (*middle, *tail)}.items())
    edge = low
    for key, row in known:
        if key > edge and not _is_empty(connection, select, edge, key - 1):
            yield Hole(edge, key - 1, reason)
        yield row
        edge = key + 1
    if edge <= high and not _is_empty(connection, select, edge, high):
        yield Hole(edge, high, reason)


def _head(connection: sqlite3.Connection, select: str, low: int, high: int) -> tuple[list[tuple[Any, ...]], int]:
    rows: list[tuple[Any, ...]] = []
    reached = low
    try:
        for row in connection.execute(select, (low, high)):
            if reached <= row[0] <= high:
                rows.append(row)
                reached = row[0] + 1
        reached = high + 1
    except sqlite3.DatabaseError:
        pass
    return rows, reached


def _tail(connection: sqlite3.Connection, select: str, low: int, high: int) -> tuple[list[tuple[Any, ...]], int]:
    rows: list[tuple[Any, ...]] = []
    with contextlib.suppress(sqlite3.DatabaseError):
        for row in connection.execute(f"{select} DESC", (low, high)):
            if low <= row[0] <= high:
                rows.append(row)  # noqa: PERF401 - what was read before an error counts
    return rows, min((row[0] for row in rows), default=high + 1)


def _is_empty(connection: sqlite3.Connection, select: str, low: int, high: int) -> bool:
    try:
        return connection.execute(select, (low, high)).fetchone() is None
    except sqlite3.DatabaseError:
        return False

"""Reads damaged SQLite files: makes copies that can be opened, and reads the rows around unreadable pages.

SQLite stops at the first frame of a log (-wal) whose checksum fails. The pages after it are mostly intact, and every
row has its own checksum, so all pages are copied into a copy of the journal.
"""

import contextlib
import shutil
import sqlite3
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rolltape.errors import DamagedTapeError
from rolltape.tape.journal.file import TABLES, connected, log_of, try_to_open
from rolltape.tape.stored import check_shortage

_PROBES_PER_HOLE = 512
_HEADER = 32
_FRAME = np.dtype([("page", ">u4"), ("pages", ">u4"), ("salt", "V8"), ("checksum", "V8")])
_PAGE_SIZES = {1 << bits for bits in range(9, 17)}
_USUAL_PAGE_SIZE = 4096


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


def opened_as_copy(path: Path) -> Opened:
    """Open a copy of a journal that cannot be opened itself, with a fresh first page if it needs one.

    A copy that opens as it is shows that the journal is sound: its folder is read-only, or the disk is full.
    """
    if _is_foreign(path):
        raise DamagedTapeError(f"{path}: a SQLite file, but no journal of Rolltape")
    copy = tempfile.TemporaryDirectory(prefix="rolltape-")
    try:
        copied = _copied(path, Path(copy.name))
        connection, damage = try_to_open(copied, "ro")
        if connection is not None:
            unseen = unseen_frames(copied)
            if not unseen:
                return Opened(connection, None, copy)
            with copy:
                return opened_with_torn_log(copied, connection, unseen)
        for is_first_page_fresh in (False, True):
            if is_first_page_fresh:
                _with_fresh_first_page(copied)
            connection, failure = try_to_open(copied, "ro", tolerant=True)
            if connection is not None:
                return Opened(connection, str(damage), copy)
        raise failure or sqlite3.DatabaseError()
    except (OSError, sqlite3.Error) as error:
        check_shortage(error, path)
        reason = str(error)
    copy.cleanup()
    raise DamagedTapeError(f"{path}: {reason}; nothing in it can be read")


def opened_with_torn_log(path: Path, connection: sqlite3.Connection, unseen: int) -> Opened:
    """Read a damaged log through a copy of the journal that has its pages. If that fails, read what SQLite can."""
    damage = f"its log (-wal) is damaged: SQLite would leave out its last {unseen} pages"
    copy = tempfile.TemporaryDirectory(prefix="rolltape-")
    recovered, _ = try_to_open(_with_all_frames(path, Path(copy.name)), "ro&immutable=1", tolerant=True)
    if recovered is None:
        copy.cleanup()
        return Opened(connection, damage, None)
    connection.close()
    return Opened(recovered, damage, copy)


def _is_foreign(path: Path) -> bool:
    """Whether this is an intact database without any table of a journal."""
    with contextlib.suppress(sqlite3.Error), contextlib.closing(connected(path, "ro&immutable=1")) as it:
        names = {row[0] for row in it.execute("SELECT name FROM sqlite_master")}
        return bool(names) and not names & {"rollouts", "sessions", "turns", "contents"}
    return False


def _copied(path: Path, directory: Path) -> Path:
    target = directory / path.name
    shutil.copyfile(path, target)
    if log_of(path).exists():
        shutil.copyfile(log_of(path), log_of(target))
    return target


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


def rows_around(
    connection: sqlite3.Connection, select: str, low: int, high: int, reason: str
) -> Iterator[tuple[Any, ...] | Hole]:
    """The readable rows of a range that begins with an unreadable one, found by halving it from the end."""
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


class _Log(NamedTuple):
    """The frames that belong to the log as last begun, up to its last commit."""

    data: bytes
    page_size: int
    frames: npt.NDArray[Any]


def unseen_frames(journal: Path) -> int:
    """How many frames of the log, up to its last commit, SQLite does not count. Open the journal before the call."""
    log = _read_log(journal)
    return 0 if log is None else max(len(log.frames) - _counted_by_sqlite(journal), 0)


def is_log_older(journal: Path) -> bool:
    """Whether a log ends with fewer pages than the journal has. Then it was copied earlier, and hides later rows."""
    log = _read_log(journal)
    with contextlib.suppress(OSError):  # it was sealed and removed in the meantime
        return log is not None and int(log.frames[-1]["pages"]) * log.page_size < journal.stat().st_size
    return False


def _with_all_frames(journal: Path, directory: Path) -> Path:
    """A copy of the journal into which every frame was written, in order."""
    copy = directory / journal.name
    shutil.copyfile(journal, copy)
    log = _read_log(journal)
    if log is None:
        return copy
    most = copy.stat().st_size // log.page_size + len(log.frames)
    step = _FRAME.itemsize + log.page_size
    with copy.open("r+b") as handle:
        for index, frame in enumerate(log.frames):
            page = int(frame["page"])
            if 0 < page <= most:  # a damaged number must not make the copy huge
                start = _HEADER + index * step + _FRAME.itemsize
                handle.seek((page - 1) * log.page_size)
                handle.write(log.data[start : start + log.page_size])
    return copy


def _read_log(journal: Path) -> _Log | None:
    try:
        data = log_of(journal).read_bytes()
    except OSError:
        return None
    if len(data) < _HEADER + _FRAME.itemsize:
        return None
    (stored_size,) = struct.unpack_from(">I", data, 8)
    page_size = stored_size if stored_size in _PAGE_SIZES else _USUAL_PAGE_SIZE
    step = _FRAME.itemsize + page_size
    count = (len(data) - _HEADER) // step
    if not count:
        return None
    rows = np.frombuffer(data, np.uint8, count * step, _HEADER).reshape(count, step)
    frames = np.ascontiguousarray(rows[:, : _FRAME.itemsize]).view(_FRAME)[:, 0]
    # The frames of the last round begin the file. Frames of an earlier round follow them.
    own = frames["salt"] == _last_salt(frames)
    commits = np.flatnonzero(own & (frames["pages"] > 0))
    return None if not len(commits) else _Log(data, page_size, frames[: int(commits[-1]) + 1])


def _last_salt(frames: npt.NDArray[Any]) -> Any:
    first, *others = frames["salt"][:3]
    # One of the first three may be the damaged one.
    return first if first in others or len(others) < 2 or others[0] != others[1] else others[0]


def _counted_by_sqlite(journal: Path) -> int:
    try:
        index = Path(f"{journal}-shm").read_bytes()[:48]
    except OSError:
        return 0
    return int(struct.unpack_from("=I", index, 16)[0]) if len(index) == 48 else 0

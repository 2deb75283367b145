"""A write-ahead log that is damaged.

SQLite stops at the first frame whose checksum fails. The pages after it are mostly sound, and every row has a
checksum of its own, so a copy of the journal can take them all.
"""

import shutil
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_HEADER = 32
_FRAME = np.dtype([("page", ">u4"), ("pages", ">u4"), ("salt", "V8"), ("checksum", "V8")])
_PAGE_SIZES = {1 << bits for bits in range(9, 17)}
_USUAL_PAGE_SIZE = 4096


class _Log(NamedTuple):
    """The frames that belong to the log as last begun, up to its last commit."""

    data: bytes
    page_size: int
    frames: npt.NDArray[Any]


def log_of(journal: Path) -> Path:
    """Where a journal's write-ahead log lies."""
    return Path(f"{journal}-wal")


def has_log(journal: Path) -> bool:
    """Whether a journal's log is there. SQLite makes an empty one for whoever just reads: that is none."""
    log = log_of(journal)
    return log.exists() and log.stat().st_size > 0


def unseen_frames(journal: Path) -> int:
    """How many frames of the log, up to its last commit, SQLite does not count; ask once it has opened the journal."""
    log = _read(journal)
    return 0 if log is None else max(len(log.frames) - _counted_by_sqlite(journal), 0)


def with_all_frames(journal: Path, directory: Path) -> Path:
    """A copy of the journal into which every frame was written, in order."""
    copy = directory / journal.name
    shutil.copyfile(journal, copy)
    log = _read(journal)
    if log is None:
        return copy
    most = copy.stat().st_size // log.page_size + len(log.frames)
    step = _FRAME.itemsize + log.page_size
    with copy.open("r+b") as handle:
        for index, frame in enumerate(log.frames):
            page = int(frame["page"])
            if 0 < page <= most:  # a damaged number must not blow the copy up
                start = _HEADER + index * step + _FRAME.itemsize
                handle.seek((page - 1) * log.page_size)
                handle.write(log.data[start : start + log.page_size])
    return copy


def _read(journal: Path) -> _Log | None:
    try:
        data = log_of(journal).read_bytes()
    except OSError:
        return None
    if len(data) < _HEADER + _FRAME.itemsize:
        return None
    (said,) = struct.unpack_from(">I", data, 8)
    page_size = said if said in _PAGE_SIZES else _USUAL_PAGE_SIZE
    step = _FRAME.itemsize + page_size
    count = (len(data) - _HEADER) // step
    if not count:
        return None
    rows = np.frombuffer(data, np.uint8, count * step, _HEADER).reshape(count, step)
    frames = np.ascontiguousarray(rows[:, : _FRAME.itemsize]).view(_FRAME)[:, 0]
    # Frames of an earlier round of the log lie behind those of the last one, which begins the file.
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

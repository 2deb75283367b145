"""Records as JSON lines in a file, each there in full as soon as its rollout has ended."""

import contextlib
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from rolltape.collect.results import Record
from rolltape.errors import RecordError
from rolltape.records.jsonable import encode_numbers


class RecordFile:
    """Appends to a file, as several processes may at once. What cannot be written is counted, and told of once."""

    def __init__(self, path: Path, tell: Callable[[str], None]) -> None:
        """Open it, or make it: an OSError of that travels."""
        self.path = path
        self.lost = 0
        self._tell = tell
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        self._plain = stat.S_ISREG(os.fstat(self._file).st_mode)

    def add(self, record: Record) -> None:
        """Write a line; never raises."""
        try:
            self._append(encode_numbers(record.to_dict(), f"rollout {record.rollout}") + b"\n")
        except (OSError, RecordError) as error:
            self.lost += 1
            if self.lost == 1:
                why = (error.strerror or error) if isinstance(error, OSError) else error
                self._tell(f"{self.path}: a record could not be written ({why}); the run has it, and the rest goes on")

    def close(self) -> None:
        os.close(self._file)

    def _append(self, line: bytes) -> None:
        with self._locked():
            end = os.fstat(self._file).st_size
            if self._plain and end and os.pread(self._file, 1, end - 1) != b"\n":
                line = b"\n" + line  # after what somebody who was killed left of a line
            try:
                rest = memoryview(line)
                while rest:
                    rest = rest[os.write(self._file, rest) :]
            except OSError:
                if self._plain:
                    os.ftruncate(self._file, end)
                raise

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with contextlib.suppress(OSError):  # a file system without locks: then one process writes, one hopes
            fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)

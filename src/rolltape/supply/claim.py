"""The claim to a consumer's name: one process of a machine at a time takes groups in it."""

import fcntl
import os
import re
import threading

from rolltape.errors import SupplyError, TapeWriteError
from rolltape.tape.rundir import RunDirectory

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Claim:
    """A lock on a file in the run's folder, held from the first `take` to the last `release`."""

    def __init__(self, directory: RunDirectory, consumer: str) -> None:
        if not isinstance(consumer, str) or not _NAME.fullmatch(consumer):
            raise SupplyError(f"consumer {consumer!r}: give a name of letters, digits, dots and dashes")
        self._run = directory.name
        self._consumer = consumer
        self._path = directory.path / "consumers" / f"{consumer}.lock"
        self._lock = threading.Lock()
        self._takers = 0
        self._descriptor = -1

    def take(self) -> None:
        """Claim the name; SupplyError if another process has it."""
        with self._lock:
            if not self._takers:
                self._descriptor = self._locked()
            self._takers += 1

    def release(self) -> None:
        """Give it up, if nobody else here has it."""
        with self._lock:
            self._takers -= 1
            if not self._takers:
                os.close(self._descriptor)

    def _locked(self) -> int:
        try:
            self._path.parent.mkdir(exist_ok=True)
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise TapeWriteError(f"{self._path}: cannot be written: {error}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise SupplyError(
                f"run {self._run}: another process takes groups as consumer {self._consumer!r} now; "
                "end it, take another name, or let one process take them and hand them on"
            ) from None
        return descriptor

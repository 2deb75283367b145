"""The claim to a consumer's name: one process of a machine at a time takes groups in it."""

import contextlib
import fcntl
import os
import re
import threading
import time
import weakref

from rolltape.errors import GroupsError, TapeWriteError
from rolltape.tape.rundir import RunDirectory

_MOMENT_S = 0.05
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


_claims: "weakref.WeakSet[Claim]" = weakref.WeakSet()


class Claim:
    """A lock on a file in the run's folder, held from the first `take` to the last `release`.

    A forked child does not inherit it: else it would outlive its holder.
    """

    def __init__(self, directory: RunDirectory, consumer: str) -> None:
        if not isinstance(consumer, str) or not _NAME.fullmatch(consumer):
            raise GroupsError(f"consumer {consumer!r}: give a name of letters, digits, dots and dashes")
        self._run = directory.name
        self._consumer = consumer
        self._path = directory.path / "consumers" / f"{consumer}.lock"
        self._lock = threading.Lock()
        self._takers = 0
        self._descriptor = -1
        self._pid = os.getpid()
        _claims.add(self)

    def check(self) -> None:
        """GroupsError in a forked child, to which the name does not belong."""
        if self._pid != os.getpid():
            raise GroupsError(
                f"run {self._run}: process {self._pid} takes groups as consumer {self._consumer!r}, this is its child "
                f"{os.getpid()}; let one process take them and hand them on, or take another name here"
            )

    def after_fork(self) -> None:
        """In a forked child: let go of the parent's lock, which stays with the parent."""
        self._lock = threading.Lock()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def is_taken(self) -> bool:
        """Whether some process has claimed the name now."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            return not _has_lock(descriptor, fcntl.LOCK_SH)
        finally:
            os.close(descriptor)

    def take(self) -> None:
        """Claim the name; GroupsError if another process has it."""
        with self._lock:
            if not self._takers:
                self._descriptor = self._locked()
            self._takers += 1

    def release(self) -> None:
        """Give it up, if nobody else here has it."""
        with self._lock:
            self._takers -= 1
            if not self._takers and self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def _locked(self) -> int:
        try:
            self._path.parent.mkdir(exist_ok=True)
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise TapeWriteError(f"{self._path}: cannot be written: {error}") from error
        if not _has_lock(descriptor, fcntl.LOCK_EX):
            time.sleep(_MOMENT_S)  # one who asks whether it is taken holds it for a moment
            if not _has_lock(descriptor, fcntl.LOCK_EX):
                holder = os.pread(descriptor, 20, 0).decode(errors="replace")
                os.close(descriptor)
                raise GroupsError(self._refusal(holder))
        with contextlib.suppress(OSError):  # a full disk: the name is claimed all the same
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        return descriptor

    def _refusal(self, holder: str) -> str:
        if holder == str(os.getpid()):
            who, what = "a stream of this process, on another opening of the tape, takes", "close() it"
        else:
            who, what = f"another process ({holder or 'not known'}) takes", "end it"
        return (
            f"run {self._run}: {who} groups as consumer {self._consumer!r} now; {what}, take another name, or let one "
            "process take them and hand them on"
        )


def _has_lock(descriptor: int, kind: int) -> bool:
    """Whether a lock on an open file could be had."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _after_fork() -> None:
    for claim in list(_claims):
        claim.after_fork()


os.register_at_fork(after_in_child=_after_fork)

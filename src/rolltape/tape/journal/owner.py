"""Who owns a journal: a sidecar file that the writing process keeps locked, so that readers can tell if it lives."""

import contextlib
import fcntl
import json
import os
import re
import secrets
import socket
import weakref
from pathlib import Path

from rolltape.errors import TapeWriteError

_open_owners: "weakref.WeakSet[Owner]" = weakref.WeakSet()


def writer_name() -> str:
    """A name for this process as a writer: host, process and a random part."""
    return f"{_host()}-{os.getpid()}-{secrets.token_hex(4)}"


def described(writer: str) -> str:
    """A writer in words: which process it is, and whether that one is stopped."""
    host, pid, _ = ["", "", *writer.rsplit("-", 2)][-3:]
    if not pid.isdecimal():
        return f"writer {writer}"
    return f"process {pid} on {host}" + (" (stopped)" if _is_stopped(host, pid) else "")


def _is_stopped(host: str, pid: str) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state == "T" and host == _host()


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", socket.gethostname()).strip("-") or "host"


class Owner:
    """The lock that says "alive". It goes with the process, however that ends."""

    def __init__(self, journal: Path) -> None:
        self.path = journal.with_suffix(".owner")
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise TapeWriteError(f"{self.path}: cannot be written: {error}") from error
        _open_owners.add(self)

    def note_closing(self, counts: dict[str, int]) -> None:
        """Keep how many rows of each kind the journal has when it is closed in order."""
        with contextlib.suppress(OSError):  # a full disk: it then reads as one whose writer died, which loses nothing
            os.pwrite(self._descriptor, json.dumps({"closed": counts}).encode(), 0)

    def release(self) -> None:
        """Give up the lock. In a forked child this leaves the parent's alone."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def is_alive(journal: Path) -> bool:
    """Whether the process that writes this journal still runs."""
    try:
        descriptor = os.open(journal.with_suffix(".owner"), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def closing_counts(journal: Path) -> dict[str, int] | None:
    """How many rows of each kind the journal had when it was closed in order; None: it was not."""
    try:
        value = json.loads(journal.with_suffix(".owner").read_bytes())
        return {str(kind): int(count) for kind, count in value["closed"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _release_parents_locks() -> None:
    for owner in list(_open_owners):
        owner.release()


# flock belongs to the open file, which a fork shares: a child must not keep a dead parent "alive".
os.register_at_fork(after_in_child=_release_parents_locks)

"""Who owns a journal: a sidecar file that the writing process keeps locked, so that readers can tell if it lives."""

import fcntl
import json
import os
import re
import secrets
import socket
import weakref
from pathlib import Path
from typing import Any

from rolltape.errors import TapeWriteError

_open_owners: "weakref.WeakSet[Owner]" = weakref.WeakSet()


def writer_name() -> str:
    """A name for this process as a writer: host, process and a random part."""
    host = re.sub(r"[^A-Za-z0-9]+", "-", socket.gethostname()).strip("-") or "host"
    return f"{host}-{os.getpid()}-{secrets.token_hex(4)}"


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

    def release(self, closing: dict[str, Any] | None) -> None:
        """Give up the lock; `closing` holds the counts of a journal that was closed in order."""
        if self._descriptor < 0:
            return
        try:
            if closing is not None:
                os.pwrite(self._descriptor, json.dumps({"closed": closing}).encode(), 0)
        except OSError:
            pass  # a full disk: the journal then reads as one whose writer died, which loses nothing
        finally:
            self.forget()

    def forget(self) -> None:
        """Close the file. In a forked child this leaves the parent's lock alone."""
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


def _forget_parents_locks() -> None:
    for owner in list(_open_owners):
        owner.forget()


# flock belongs to the open file, which a fork shares: a child must not keep a dead parent "alive".
os.register_at_fork(after_in_child=_forget_parents_locks)

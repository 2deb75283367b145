"""How the gateways of a run on one machine find each other.

    RUN/gateways/WRITER.json    the Unix socket of a running gateway, and the secret for requests to it

Only the owner can read either. A killed gateway leaves its file behind; its journal shows whether it is alive.
"""

import contextlib
import itertools
import json
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rolltape.errors import GatewayError
from rolltape.gateway.workers import WorkerPlace
from rolltape.tape.journal.file import is_alive
from rolltape.tape.journal.left_open import writer_tag
from rolltape.tape.rundir import RunDirectory, make_private_folder, write_whole

_FOLDER = "gateways"


class Peer(NamedTuple):
    """A gateway of this run."""

    writer: str
    socket: str
    secret: str
    host: str
    group: str | None = None  # of workers behind one port; None for a single gateway
    number: int = 0  # among the workers


class ServedElsewhere(GatewayError):
    """Another process serves the session. The request is forwarded to it, or the client must retry."""

    status = 503
    final = False

    def __init__(self, message: str, peer: Peer | None) -> None:
        super().__init__(message)
        self.peer = peer  # None if it cannot be reached from here


@contextlib.contextmanager
def own_peer(writer: str, place: WorkerPlace | None) -> Iterator[Peer]:
    """This gateway as a peer of others, with a folder for its socket within the block."""
    folder = Path(tempfile.mkdtemp(prefix="rolltape-"))  # a socket's path has at most about 100 characters
    group, number = (None, 0) if place is None else (place.group, place.number)
    try:
        yield Peer(writer, str(folder / "gateway"), secrets.token_urlsafe(24), socket.gethostname(), group, number)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def announced_peer(run: Path, peer: Peer) -> Iterator[None]:
    """Announce this gateway to the run's other gateways within the block. Its socket must accept connections."""
    path = _file(run, peer.writer)
    try:
        make_private_folder(path.parent, parents=False)
        for left in _announced(run):
            if not is_alive(run / "journals" / f"{left.writer}.sqlite"):
                forget_peer(run, left.writer)
        write_whole(path, json.dumps(peer._asdict()).encode())
        yield
    finally:
        path.unlink(missing_ok=True)


def find_peer(run: Path, writer: str) -> Peer | None:
    """The gateway of a run with this writer, or None if there is none, or it is on another machine."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        peer = Peer(**json.loads(_file(run, writer).read_bytes()))
        return peer if peer.host == socket.gethostname() else None
    return None


class Siblings:
    """The other workers behind one port; a single gateway has none."""

    def __init__(self, directory: RunDirectory, own: Peer, place: WorkerPlace | None) -> None:
        self._journals = directory.journals
        self._folder = _file(directory.path, own.writer).parent
        self._own = own
        self._count = 1 if place is None else place.workers
        self._seen_ns = -1
        self._known: dict[int, Peer] = {own.number: own}
        self._turns = itertools.count(own.number)

    def others(self) -> list[Peer]:
        """The other workers that are alive."""
        return [peer for peer in self._peers().values() if peer is not self._own and self._is_alive(peer)]

    def of_tag(self, tag: str) -> Peer | None:
        """The other worker whose keys begin with this tag, or None. It may have died."""
        found = next((peer for peer in self._peers().values() if writer_tag(peer.writer) == tag), None)
        return None if found is self._own else found

    def other_tags(self) -> list[str]:
        """The tags with which the other workers' keys begin. Some of these workers may have died."""
        return [writer_tag(peer.writer) for peer in self._peers().values() if peer is not self._own]

    def check_next(self) -> None:
        """Raise ServedElsewhere if it is another worker's turn to open a session."""
        alive = sorted([self._own, *self.others()], key=lambda peer: peer.number)
        chosen = alive[next(self._turns) % len(alive)]
        if chosen is not self._own:
            raise ServedElsewhere(f"worker {chosen.number} opens this session; ask again", chosen)

    def check_owner(self, digest: str) -> None:
        """Raise ServedElsewhere if another worker serves sessions with this digest."""
        index = int(digest[:12], 16) % self._count
        if index != self._own.number:
            peer = self._peers().get(index)
            alive = peer if peer is not None and self._is_alive(peer) else None
            raise ServedElsewhere(f"worker {index} serves this session; ask again", alive)

    def _is_alive(self, peer: Peer) -> bool:
        return is_alive(self._journals / f"{peer.writer}.sqlite")

    def _peers(self) -> dict[int, Peer]:
        if self._count > 1 and (changed_ns := self._folder.stat().st_mtime_ns) != self._seen_ns:
            self._seen_ns = changed_ns
            group = [peer for peer in _announced(self._folder.parent) if peer.group == self._own.group]
            # If both a killed worker and its successor are there, the living one replaces the other.
            self._known = {peer.number: peer for peer in sorted(group, key=self._is_alive)} | {
                self._own.number: self._own
            }
        return self._known


def _announced(run: Path) -> list[Peer]:
    found = (find_peer(run, path.stem) for path in (run / _FOLDER).glob("[!.]*.json"))
    return [peer for peer in found if peer is not None]


def forget_peer(run: Path, writer: str) -> None:
    """Remove the files of a killed gateway."""
    peer = find_peer(run, writer)
    if peer is not None:
        _file(run, writer).unlink(missing_ok=True)
        folder = Path(peer.socket).parent
        with contextlib.suppress(OSError):
            if folder.name.startswith("rolltape-") and folder.stat(follow_symlinks=False).st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)


def _file(run: Path, writer: str) -> Path:
    return run / _FOLDER / f"{writer}.json"

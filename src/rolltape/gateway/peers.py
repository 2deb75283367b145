"""Where the gateways of a run on this machine reach each other.

    RUN/gateways/WRITER.json    the Unix socket of one that runs, and the secret by which it knows the others

The owner alone can read either. A gateway that was killed leaves its file behind; whether it lives, its journal tells.
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
    group: str | None = None  # of workers behind one port; None: it is alone
    number: int = 0  # which of them it is


class ServedElsewhere(GatewayError):
    """Another process serves the session. The request is forwarded to it, or is to be made again."""

    status = 503
    final = False

    def __init__(self, message: str, peer: Peer | None) -> None:
        super().__init__(message)
        self.peer = peer  # None: it cannot be reached from here


@contextlib.contextmanager
def announced_peer(run: Path, writer: str, place: WorkerPlace | None = None) -> Iterator[Peer]:
    """Let other gateways of a run find this one within the block; its socket is to be made at the path given."""
    folder = Path(tempfile.mkdtemp(prefix="rolltape-"))  # a socket's path has a hundred characters at most
    peer = Peer(
        writer,
        str(folder / "gateway"),
        secrets.token_urlsafe(24),
        socket.gethostname(),
        None if place is None else place.group,
        0 if place is None else place.number,
    )
    path = _file(run, writer)
    try:
        make_private_folder(path.parent, parents=False)
        for left in _announced(run):
            if not is_alive(run / "journals" / f"{left.writer}.sqlite"):
                forget_peer(run, left.writer)
        write_whole(path, json.dumps(peer._asdict()).encode())
        yield peer
    finally:
        path.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def find_peer(run: Path, writer: str) -> Peer | None:
    """How to reach a gateway of a run; None: it is none, or on another machine."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        peer = Peer(**json.loads(_file(run, writer).read_bytes()))
        return peer if peer.host == socket.gethostname() else None
    return None


class Siblings:
    """The workers behind one port, as one of them sees them; a gateway that is alone has none."""

    def __init__(self, directory: RunDirectory, own: Peer, place: WorkerPlace | None) -> None:
        self._journals = directory.journals
        self._folder = _file(directory.path, own.writer).parent
        self._own = own
        self._count = 1 if place is None else place.workers
        self._seen_ns = -1
        self._known: dict[int, Peer] = {own.number: own}
        self._turns = itertools.count(own.number)

    def others(self) -> list[Peer]:
        """Those that are alive, without this one."""
        return [peer for peer in self._peers().values() if peer is not self._own and self._is_alive(peer)]

    def of_tag(self, tag: str) -> Peer | None:
        """Another worker, by what its keys begin with; None: it is this one, or none of them. It may have died."""
        found = next((peer for peer in self._peers().values() if writer_tag(peer.writer) == tag), None)
        return None if found is self._own else found

    def other_tags(self) -> list[str]:
        """What the keys of the other workers begin with. Some of them may have died."""
        return [writer_tag(peer.writer) for peer in self._peers().values() if peer is not self._own]

    def check_next(self) -> None:
        """Raise ServedElsewhere if it is another one's turn to open a session."""
        alive = sorted([self._own, *self.others()], key=lambda peer: peer.number)
        chosen = alive[next(self._turns) % len(alive)]
        if chosen is not self._own:
            raise ServedElsewhere(f"worker {chosen.number} opens this session; ask again", chosen)

    def check_owner(self, digest: str) -> None:
        """Raise ServedElsewhere if sessions of a name with this digest are another one's."""
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
            # Of a worker that was killed and its successor, the one that is alive counts.
            self._known = {peer.number: peer for peer in sorted(group, key=self._is_alive)} | {
                self._own.number: self._own
            }
        return self._known


def _announced(run: Path) -> list[Peer]:
    found = (find_peer(run, path.stem) for path in (run / _FOLDER).glob("[!.]*.json"))
    return [peer for peer in found if peer is not None]


def forget_peer(run: Path, writer: str) -> None:
    """Remove what a gateway that was killed left behind."""
    peer = find_peer(run, writer)
    if peer is not None:
        _file(run, writer).unlink(missing_ok=True)
        folder = Path(peer.socket).parent
        with contextlib.suppress(OSError):
            if folder.name.startswith("rolltape-") and folder.stat(follow_symlinks=False).st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)


def _file(run: Path, writer: str) -> Path:
    return run / _FOLDER / f"{writer}.json"

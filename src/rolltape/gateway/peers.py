"""Where the gateways of a run on this machine reach each other.

    RUN/gateways/WRITER.json    the Unix socket of one that runs, and the secret by which it knows the others

The owner alone can read either. A gateway that was killed leaves its file behind; whether it lives, its journal tells.
"""

import contextlib
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
from rolltape.tape.rundir import make_private_folder, write_whole

_FOLDER = "gateways"


class Peer(NamedTuple):
    """A gateway of this run."""

    writer: str
    socket: str
    secret: str
    host: str


class ServedElsewhere(GatewayError):
    """Another process serves the session. The request is forwarded to it, or is to be made again."""

    status = 503
    final = False

    def __init__(self, message: str, peer: Peer | None) -> None:
        super().__init__(message)
        self.peer = peer  # None: it cannot be reached from here


@contextlib.contextmanager
def announced_peer(run: Path, writer: str) -> Iterator[Peer]:
    """Let other gateways of a run find this one within the block; its socket is to be made at the path given."""
    folder = Path(tempfile.mkdtemp(prefix="rolltape-"))  # a socket's path has a hundred characters at most
    peer = Peer(writer, str(folder / "gateway"), secrets.token_urlsafe(24), socket.gethostname())
    path = _file(run, writer)
    try:
        make_private_folder(path.parent, parents=False)
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


def forget_peer(run: Path, writer: str) -> None:
    """Remove what a gateway that was killed left behind."""
    peer = find_peer(run, writer)
    if peer is not None:
        _file(run, writer).unlink(missing_ok=True)
        folder = Path(peer.socket).parent
        if folder.name.startswith("rolltape-") and folder.stat(follow_symlinks=False).st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)


def _file(run: Path, writer: str) -> Path:
    return run / _FOLDER / f"{writer}.json"

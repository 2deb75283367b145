"""The gateway's admin key: how it is made, where gateways keep it, and how this user's programs find it.

    RUN/admin.header                        the header of admin requests: `curl -H @RUN/admin.header …`
    ~/.cache/rolltape/gateways/…            one file for each running gateway, with the path of its run

The key itself is only in the run, and only its owner can read it.
"""

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from rolltape.errors import TapeError
from rolltape.serving import is_loopback
from rolltape.tape.rundir import locked, make_private_folder, open_private, user_cache, write_whole

HEADER_FILE = "admin.header"

_BEARER = "Authorization: Bearer "


class RunningGateway(NamedTuple):
    """The address of a running gateway, and its run."""

    url: str
    run: Path


def make_admin_key() -> str:
    """Make a random key."""
    return f"rta-{secrets.token_urlsafe(32)}"


def read_admin_key(run: str | os.PathLike[str]) -> str | None:
    """The admin key of the gateways that record in a run, or None if the run has none or it cannot be read.

    Example:

        headers = {"Authorization": f"Bearer {read_admin_key('runs/exp1')}"}
    """
    try:
        line = (Path(run).expanduser() / HEADER_FILE).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return line.removeprefix(_BEARER) if line.startswith(_BEARER) else None


def keep_admin_key(run: Path) -> str:
    """The admin key that is kept in a run for all its gateways; made if there is none."""
    with locked(run):
        key = read_admin_key(run)
        if key is None:
            if (run / HEADER_FILE).exists():
                raise TapeError(
                    f"{run / HEADER_FILE}: no admin key can be read there; remove it to have a new one made"
                )
            key = make_admin_key()
            write_whole(run / HEADER_FILE, f"{_BEARER}{key}\n".encode())
    return key


@contextlib.contextmanager
def announced(gateway: RunningGateway) -> Iterator[None]:
    """Announce a gateway within the block, so that this user's programs find it by its address or its run."""
    try:
        folder = _folder()
        make_private_folder(folder)
        path = folder / secrets.token_hex(8)
        handle = open_private(path, "xb")
    except (OSError, RuntimeError):  # without a home folder, programs must pass the key
        yield
        return
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # ends with the process: a file without a lock was left behind
        handle.write(json.dumps({"url": gateway.url, "run": str(gateway.run.absolute())}).encode())
        handle.flush()
        for left_behind in (one for one in folder.iterdir() if not _is_locked(one)):
            left_behind.unlink(missing_ok=True)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def find_gateway(address: str) -> RunningGateway | None:
    """This user's gateway at a URL, or the one that records in the run at a path, or None."""
    return next(find_gateways(address), None)


def find_gateways(address: str) -> Iterator[RunningGateway]:
    """Yield all such gateways: several collections and `rolltape serve` may record in one run."""
    with contextlib.suppress(OSError, RuntimeError):
        for path in filter(_is_locked, _folder().iterdir()):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                about = json.loads(path.read_bytes())
                gateway = RunningGateway(str(about["url"]), Path(about["run"]))
                if _place(gateway.url) == _place(address) if "://" in address else _is_same(gateway.run, address):
                    yield gateway


def _folder() -> Path:
    return user_cache() / "gateways"


def _is_locked(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _place(url: str) -> str:
    """Host and port of a URL; all names of loopback become one."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    here = host in ("0.0.0.0", "::") or is_loopback(host)
    return f"{'loopback' if here else host}:{parts.port}"


def _is_same(run: Path, other: str) -> bool:
    with contextlib.suppress(OSError):
        return run.samefile(Path(other).expanduser())
    return False

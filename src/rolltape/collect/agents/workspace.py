"""Temporary folders of programs: one workspace per attempt, inside the scratch folder of its collector."""

import asyncio
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rolltape.collect.agents.protocol import AgentOutcome
from rolltape.errors import AgentError
from rolltape.tape.rundir import locked, make_private_folder


class Workspace:
    """The folders of one attempt: a home, a working directory with the task's files, and one for temporary files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.home = root / "home"
        self.work = root / "work"
        self.temporary = root / "tmp"
        for folder in (self.home, self.work, self.temporary):
            folder.mkdir()

    @classmethod
    def make(cls, scratch: Path | None, files: Mapping[str, str]) -> "Workspace":
        """A new workspace with files in its working directory; AgentError for a file that would lie outside of it."""
        if scratch is not None:
            scratch.mkdir(parents=True, exist_ok=True)
        workspace = cls(Path(tempfile.mkdtemp(prefix="rolltape-", dir=scratch)).resolve())
        try:
            for name, text in files.items():
                workspace._put(name, text)
        except (AgentError, OSError):
            remove(workspace.root)
            raise
        return workspace

    def _put(self, name: str, text: str) -> None:
        path = (self.work / name).resolve()
        if not path.is_relative_to(self.work) or path == self.work:
            raise AgentError(f"the task's file {name!r} lies outside the working directory; name one inside")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("utf-8", "replace"))


async def discard(outcome: AgentOutcome) -> None:
    """Remove the temporary folders that a program left, if it left any."""
    if outcome.workspace is not None:
        await asyncio.to_thread(remove, outcome.workspace)


def remove(folder: Path) -> None:
    """Remove a folder and its contents as far as possible, whatever permissions a program has set there."""

    def retry_allowed(function: Callable[[str], object], path: str, _: object) -> None:
        try:
            for one in (Path(path).parent, Path(path)):
                if not one.is_symlink():
                    one.chmod(stat.S_IRWXU)
            function(path)
        except OSError:
            return  # it belongs to another user

    shutil.rmtree(folder, onerror=retry_allowed)


@contextmanager
def scratch_folder(run: Path) -> Iterator[Path]:
    """A folder of one collector inside the run, held by a lock that ends with the process.

    Folders of collectors that were killed are removed.
    """
    parent = run / "scratch"
    with locked(run):
        make_private_folder(parent)
        for folder in parent.iterdir():
            _remove_if_unused(folder)
        path = Path(tempfile.mkdtemp(dir=parent))
        held = os.open(path, os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_EX)
    try:
        yield path
    finally:
        remove(path)
        os.close(held)


def _remove_if_unused(folder: Path) -> None:
    try:
        held = os.open(folder, os.O_RDONLY)
    except OSError:
        return  # another process removes it right now
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove(folder)
    except BlockingIOError:
        return  # its collector is alive
    finally:
        os.close(held)

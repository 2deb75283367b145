"""Temporary folders of programs: one workspace per attempt, inside the scratch folder of its collector."""

import fcntl
import os
import secrets
import stat
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from rolltape.errors import AgentError
from rolltape.tape.rundir import locked, make_private_folder

_LONGEST_PATH = 3500  # bytes; the system allows 4095, and files may be moved below another folder
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class Workspace(NamedTuple):
    """The folders of one attempt: a home, a working directory with the task's files, and one for temporary files."""

    root: Path
    home: Path
    work: Path
    temporary: Path

    @classmethod
    def at(cls, root: Path, work: Path | None = None) -> "Workspace":
        """Make the folders below `root`, which exists, or use a working directory that is already there."""
        workspace = cls(root, root / "home", work or root / "work", root / "tmp")
        for folder in workspace[1:]:
            if folder != work:
                folder.mkdir()
        return workspace

    @classmethod
    def make(cls, scratch: Path | None, files: Mapping[str, str]) -> "Workspace":
        """A new workspace with files in its working directory; raises AgentError for a file outside of it."""
        if scratch is not None:
            scratch.mkdir(parents=True, exist_ok=True)
        workspace = cls.at(Path(tempfile.mkdtemp(prefix="rolltape-", dir=scratch)).resolve())
        try:
            for name, text in files.items():
                workspace._put(name, text)
        except (AgentError, OSError):
            remove(workspace.root)
            raise
        return workspace

    def renewed(self) -> "Workspace":
        """The same working directory with a new home, for a check of the agent's work."""
        self.work.chmod(0o755)  # the agent may have removed rights, and bwrap enters it before it changes its user
        return Workspace.at(Path(tempfile.mkdtemp(prefix="check-", dir=self.root)), self.work)

    def _put(self, name: str, text: str) -> None:
        path = (self.work / name).resolve()
        if not path.is_relative_to(self.work) or path == self.work:
            raise AgentError(f"the task's file {name!r} lies outside the working directory; name one inside")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("utf-8", "replace"))


def walk(folder: Path) -> Iterator[Path]:
    """Yield everything below a folder, folders before their contents. Links are not followed.

    A program may have made anything there: unreadable folders and too long paths are left out.
    """
    folders = [folder]
    while folders:
        try:
            entries = sorted(os.scandir(folders.pop()), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in entries:
            if len(os.fsencode(entry.path)) > _LONGEST_PATH:
                continue
            yield Path(entry.path)
            if entry.is_dir(follow_symlinks=False):
                folders.append(Path(entry.path))


def only_inside(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
    """A tar filter for a program's files: members that lead out of the folder are left out."""
    try:
        return tarfile.data_filter(member, folder)
    except tarfile.FilterError:
        return None


def remove(folder: Path) -> None:
    """Remove a folder and its contents as far as possible, whatever a program has made there.

    Links are removed and not followed. Inner folders are moved to the top before they are emptied, so neither the
    depth of a tree nor the length of its paths is a problem.
    """
    with suppress(OSError):
        top = os.open(folder, _FOLDER)
        try:
            inner = _clear(top, top)
            for name in inner:  # the list grows
                with suppress(OSError):
                    opened = os.open(name, _FOLDER, dir_fd=top)
                    try:
                        inner += _clear(opened, top)
                    finally:
                        os.close(opened)
                    os.rmdir(name, dir_fd=top)
        finally:
            os.close(top)
        folder.rmdir()


def _clear(folder: int, top: int) -> list[str]:
    """Remove the files of a folder, move the folders in it to the top, and return their new names."""
    moved = []
    with suppress(OSError):
        os.fchmod(folder, stat.S_IRWXU)
    for name in os.listdir(folder):
        with suppress(OSError):  # it belongs to another user
            if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=folder)
                continue
            os.chmod(name, stat.S_IRWXU, dir_fd=folder)
            new = f".removed-{secrets.token_hex(8)}"
            os.rename(name, new, src_dir_fd=folder, dst_dir_fd=top)
            moved.append(new)
    return moved


@contextmanager
def scratch_folder(run: Path) -> Iterator[Path]:
    """A folder of one collector inside the run, with a lock that ends with the process.

    Folders of killed collectors are removed.
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

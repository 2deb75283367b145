"""The temporary folders of one run of a program: a home, a working directory with the task's files, room for more."""

import asyncio
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from rolltape.collect.agents.protocol import Outcome
from rolltape.errors import AgentError


class Workspace:
    """Made for one attempt; whoever has scored it removes it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.home = root / "home"
        self.work = root / "work"
        self.temporary = root / "tmp"
        for folder in (self.home, self.work, self.temporary):
            folder.mkdir()

    @classmethod
    def make(cls, scratch: Path | None, files: Mapping[str, str]) -> "Workspace":
        """A fresh one, with files in its working directory; raises AgentError for one that would lie elsewhere."""
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


async def discard(outcome: Outcome) -> None:
    """Remove the temporary folders that a program left, if it left any."""
    if outcome.workspace is not None:
        await asyncio.to_thread(remove, outcome.workspace)


def remove(folder: Path) -> None:
    """Remove a folder and what is in it, as far as that is possible, whatever permissions a program set there."""

    def allowed_now(function: Callable[[str], object], path: str, _: object) -> None:
        try:
            for one in (Path(path).parent, Path(path)):
                if not one.is_symlink():
                    one.chmod(stat.S_IRWXU)
            function(path)
        except OSError:
            return  # what belongs to somebody else stays

    shutil.rmtree(folder, onerror=allowed_now)

"""Where the programs of one collector have their temporary folders, and what becomes of those of one that died."""

import fcntl
import os
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from rolltape.collect.agents.workspace import remove
from rolltape.tape.rundir import locked


class Scratch:
    """A folder in the run for this process alone, held by a lock that ends with the process."""

    path: Path
    _held: int

    def __init__(self, run: Path) -> None:
        self._run = run
        self._all = run / "scratch"

    def __enter__(self) -> Self:
        """Make it, and remove what collectors left that were killed."""
        with locked(self._run):
            self._all.mkdir(exist_ok=True)
            for folder in self._all.iterdir():
                _remove_if_left(folder)
            self.path = Path(tempfile.mkdtemp(dir=self._all))
            self._held = os.open(self.path, os.O_RDONLY)
            fcntl.flock(self._held, fcntl.LOCK_EX)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        remove(self.path)
        os.close(self._held)


def _remove_if_left(folder: Path) -> None:
    try:
        held = os.open(folder, os.O_RDONLY)
    except OSError:
        return  # it is going right now
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove(folder)
    except BlockingIOError:
        return  # its collector is at work
    finally:
        os.close(held)

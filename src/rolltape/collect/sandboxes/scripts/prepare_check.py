"""Prepares a working directory for a check, and becomes the command that checks it.

It runs as a script with nothing but the standard library, in the sandbox and with the rights of the agent: links that
the agent left lead nowhere that it could not go itself. The order is JSON on stdin. The first line that it prints is
JSON for the collector; whatever follows is the command's own output.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

_COMPILED = "__pycache__"
# Python and test runners read these without being asked. An agent that writes one decides what a test run reports.
_UNASKED = frozenset(
    {
        *("conftest.py", "sitecustomize.py", "usercustomize.py", "pytest.ini", ".pytest.ini", "pyproject.toml"),
        *("setup.cfg", "tox.ini", ".coveragerc", "pytest.toml", ".pytest.toml", _COMPILED),
    }
)
# Modules of the standard library, of pytest and of what it needs. A file of the same name in the working directory
# would be loaded instead. `test` is a usual name of a folder, and nothing loads that module.
_SHADOWED = (
    sys.stdlib_module_names
    | {"pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "exceptiongroup", "tomli", "colorama"}
    | {"typing_extensions", "py"}
) - {"test"}


class _Aside:
    """A hidden folder of the working directory, for files that the check must not find."""

    def __init__(self) -> None:
        self._place = Path(Path(tempfile.mkdtemp(prefix=".set-aside-", dir=".")).name)
        self._count = 0

    def take(self, path: Path) -> None:
        self._count += 1
        path.rename(self._place / str(self._count))

    def take_unasked(self, kept: set[str], searched: set[Path], meant: set[Path]) -> list[str]:
        """Take what would be loaded unasked, except for names that are kept, and return what was taken.

        In the folders where Python will have searched for modules, those that shadow others are taken unless `meant`.
        """
        taken: list[str] = []
        folders = [""]
        for folder in folders:  # which grows
            try:
                entries = list(os.scandir(folder or "."))
            except OSError:
                continue  # its path is too long, or it may not be read
            for entry in entries:
                path = Path(folder, entry.name)
                shadows = path.parent in searched and path not in meant and _shadows_module(path)
                if (shadows or _is_unasked(path)) and str(path) not in kept:
                    self.take(path)
                    taken += [] if path.name == _COMPILED else [str(path)]
                elif entry.is_dir(follow_symlinks=False) and path != self._place:
                    folders.append(str(path))
        return sorted(taken)

    def put(self, path: Path, text: str) -> None:
        """Write a file. What is in its place, or in place of a folder above it, is taken."""
        for folder in reversed(path.parents[:-1]):
            if folder.is_symlink() or folder.is_file():
                self.take(folder)
        if path.is_symlink() or path.exists():
            self.take(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _is_unasked(path: Path) -> bool:
    is_plugin = path.name == "entry_points.txt" and path.parent.suffix in (".dist-info", ".egg-info")
    return path.name in _UNASKED or path.suffix == ".pth" or is_plugin


def _shadows_module(path: Path) -> bool:
    """Whether what lies here would be imported instead of a module that a test runner needs."""
    is_module = path.suffix in (".py", ".pyc", ".so") or _is_package(path)
    return is_module and path.name.partition(".")[0] in _SHADOWED


def _is_package(folder: Path) -> bool:
    return any(folder.glob("__init__.*"))


def prepare(order: dict[str, Any]) -> list[str]:
    """Make the working directory ready, and return what was set aside."""
    kept = set(order["keep"])
    # What the task itself has of this kind is put back as it was.
    own = {name: text for name, text in order["shipped"].items() if _is_unasked(Path(name)) and name not in kept}
    files = {str(Path(name)): text for name, text in (own | order["files"]).items()}
    aside = _Aside()
    # pytest has Python search the folder of a test, unless that is a package.
    searched = {Path(), *(one for name in files if not _is_package(one := Path(name).parent))}
    meant = {one for name in (*order["shipped"], *files) for one in (Path(name), *Path(name).parents)}
    taken = aside.take_unasked(kept | files.keys(), searched, meant)
    for name, text in files.items():
        aside.put(Path(name), text)
    return taken


def main() -> None:
    order: dict[str, Any] = json.load(sys.stdin)
    stdin = Path(os.environ["TMPDIR"], "stdin")
    stdin.write_text(order["stdin"])
    os.dup2(os.open(stdin, os.O_RDONLY), 0)
    taken, problem = [], None
    try:
        taken = prepare(order)
    except OSError as error:  # the agent has left something that cannot be moved or written over
        problem = f"the working directory cannot be checked: {error}"
    print(json.dumps({"set_aside": taken}), flush=True)
    if problem is not None:
        sys.exit(problem)
    try:
        os.execvp(order["command"][0], order["command"])
    except OSError as error:
        sys.exit(f"{order['command'][0]}: {error.strerror}")


if __name__ == "__main__":
    main()

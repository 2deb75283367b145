"""Prepares a working directory for a check, and becomes the command that checks it.

It runs as a script with only the standard library, in the sandbox and with the rights of the agent, so links that the
agent left lead only to places that the agent could reach itself. The order is JSON on stdin. The first line of its
output is JSON for the collector; the rest is the command's own output.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

_COMPILED = "__pycache__"
# Python and test runners load these automatically, so an agent could use one to change the result of a test run.
_UNASKED = frozenset(
    {
        *("conftest.py", "sitecustomize.py", "usercustomize.py", "pytest.ini", ".pytest.ini", "pyproject.toml"),
        *("setup.cfg", "tox.ini", ".coveragerc", "pytest.toml", ".pytest.toml", _COMPILED),
    }
)
# Modules of the standard library, of pytest and of its dependencies. A file with the same name in the working directory
# would be loaded instead. `test` is excluded: it is a common name of a folder, and nothing loads that module.
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
        """Move away files that would be loaded automatically, except for `kept` names, and return what was moved.

        In the `searched` folders, modules that shadow others are moved too, unless they are `meant`.
        """
        taken: list[str] = []
        folders = [""]
        for folder in folders:  # the list grows
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
        """Write a file. Anything in its place, or in place of a folder above it, is moved away."""
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
    """Whether this file would be imported instead of a module that a test runner needs."""
    is_module = path.suffix in (".py", ".pyc", ".so") or _is_package(path)
    return is_module and path.name.partition(".")[0] in _SHADOWED


def _is_package(folder: Path) -> bool:
    return any(folder.glob("__init__.*"))


def prepare(order: dict[str, Any]) -> list[str]:
    """Prepare the working directory, and return what was set aside."""
    kept = set(order["keep"])
    # The task's own files of this kind are restored.
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
    except OSError as error:  # the agent has left something that cannot be moved or overwritten
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

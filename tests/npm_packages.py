"""Packages of npm that tests need, installed once under `.cache/`, which is not tracked."""

import fcntl
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

_CACHE = Path(__file__).parents[1] / ".cache"


@contextmanager
def installing() -> Iterator[Path]:
    """The folder that packages are installed in, for one test process at a time."""
    _CACHE.mkdir(exist_ok=True)
    with (_CACHE / "npm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield _CACHE


@cache
def npm_package(name: str, version: str) -> Path:
    """The `node_modules` that holds a package; skips the test where npm cannot bring it."""
    with installing() as folder:
        installed = folder / f"npm-{name.rpartition('/')[2]}-{version}"
        if not installed.is_dir():
            _install(f"{name}@{version}", installed)
    return installed / "node_modules"


def _install(package: str, target: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip(f"npm, which brings {package}, is not installed")
    made = Path(tempfile.mkdtemp(dir=_CACHE))
    command = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(made), package]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        shutil.rmtree(made)
        pytest.skip(f"npm could not install {package}: {done.stderr[-300:]}")
    made.rename(target)

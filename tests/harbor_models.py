"""Harbor's own models of its trajectories, out of its wheel. The rest of Harbor needs a newer Python than ours."""

import fcntl
import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

_VERSION = "0.25.0"
_CACHE = Path(__file__).parents[1] / ".cache"


@cache
def harbor_trajectories() -> Any:
    """The module `harbor.models.trajectories`; skips the test where pip cannot bring it."""
    _CACHE.mkdir(exist_ok=True)
    unpacked = _CACHE / f"harbor-{_VERSION}"
    with (_CACHE / "harbor.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not unpacked.is_dir():
            _download(unpacked)
    sys.path.insert(0, str(unpacked))
    try:
        return import_module("harbor.models.trajectories")
    finally:
        sys.path.remove(str(unpacked))


def _download(target: Path) -> None:
    made = Path(tempfile.mkdtemp(dir=_CACHE))
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--python-version", "3.12", "--dest", str(made)]
    command = [sys.executable, "-m", "pip", "download", *options, f"harbor=={_VERSION}"]
    done = subprocess.run(command, capture_output=True, text=True)
    wheel = next(made.glob("*.whl"), None)
    if wheel is None:
        pytest.skip(f"pip could not download harbor: {done.stderr[-300:]}")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(made / "unpacked")
    (made / "unpacked").rename(target)

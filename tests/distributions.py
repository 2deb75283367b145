"""Build the wheel and the sdist as a release does, and read what is in them."""

import hashlib
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from rolltape import __version__

ROOT = Path(__file__).parents[1]
WHEEL, SDIST = f"rolltape-{__version__}-py3-none-any.whl", f"rolltape-{__version__}.tar.gz"
LARGEST_BYTES = 16_000_000  # the shipped model takes 11.5 million
# What a user or a packager looks for, in both.
NEEDED = (
    "rolltape/py.typed",
    "rolltape/tiny/models/tiny/model.safetensors",
    "rolltape/tiny/models/tiny/tokenizer.json",
    "rolltape/view/page/index.html",
    "rolltape/view/page/THIRD-PARTY.txt",
    "rolltape/demo/learning.jsonl",
    "rolltape/demo/tasks/message.jsonl",
    "LICENSE",
)


def build(folder: Path, *, python: str = sys.executable) -> None:
    """Build both into a folder, dated by the last commit: what is built again from the same commit is the same."""
    committed = subprocess.run(
        ["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    command = [python, "-m", "hatchling", "build", "-d", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "SOURCE_DATE_EPOCH": committed}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def contents(path: Path) -> set[str]:
    """The files in a wheel or an sdist, without the folder that an sdist begins with."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return set(wheel.namelist())
    with tarfile.open(path) as sdist:
        return {member.name.partition("/")[2] for member in sdist if member.isfile()}


def faults(folder: Path) -> list[str]:
    """What is wrong with the files of a release in a folder."""
    found = []
    for name in (WHEEL, SDIST):
        path = folder / name
        names = contents(path)
        found += [f"{name}: {needed} is missing" for needed in NEEDED if not any(one.endswith(needed) for one in names)]
        unwanted = ("tests/", "viewer/", "__pycache__", ".pyc", "runs/", "node_modules")
        found += [f"{name}: has {one}" for one in sorted(names) if any(part in one for part in unwanted)]
        if path.stat().st_size > LARGEST_BYTES:
            found.append(f"{name}: {path.stat().st_size:,} bytes, above {LARGEST_BYTES:,}")
    return found

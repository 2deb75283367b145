"""The built page that ships in the package is what its source builds."""

import gzip
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from viewed import BUILT, VIEWER, installed_viewer

_MOST_BYTES = 700_000  # compressed, all files together


@pytest.fixture
def source(tmp_path: Path) -> Path:
    installed = installed_viewer()
    place = tmp_path / "viewer"
    shutil.copytree(VIEWER, place, ignore=shutil.ignore_patterns("node_modules"))
    (place / "node_modules").symlink_to(installed / "node_modules")
    return place


def _npm(source: Path, script: str, **environment: str) -> None:
    done = subprocess.run(
        ["npm", "run", script], cwd=source, env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_built_page_is_what_its_source_builds(source: Path, tmp_path: Path) -> None:
    _npm(source, "build", PAGE_DIR=str(tmp_path / "page"))
    fresh, shipped = _files(tmp_path / "page"), _files(BUILT)
    assert sorted(fresh) == sorted(shipped)
    differing = [name for name in fresh if fresh[name] != shipped[name]]
    assert differing == [], "run `npm ci && npm run build` in viewer/ and commit what it writes"


def test_the_source_passes_its_type_checker(source: Path) -> None:
    _npm(source, "check")


def test_the_page_weighs_little_compressed() -> None:
    weight = sum(
        len(content if name.endswith(".woff2") else gzip.compress(content)) for name, content in _files(BUILT).items()
    )
    assert weight < _MOST_BYTES


def test_the_page_names_no_other_machine() -> None:
    for name, content in _files(BUILT).items():
        if name.endswith((".html", ".css")):
            assert b"http://" not in content, name
            assert b"https://" not in content, name


def test_the_lock_file_names_no_registry() -> None:
    assert '"resolved"' not in (VIEWER / "package-lock.json").read_text(encoding="utf-8")

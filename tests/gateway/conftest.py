"""A run to record on, and a place for the temporary folders of processes that tests start and kill."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture(scope="package", autouse=True)
def removes_what_killed_processes_leave() -> Iterator[None]:
    """A gateway process that is killed leaves the folder of its socket, whose path has to be short."""
    with tempfile.TemporaryDirectory(prefix="rt-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        yield

"""A run to record on."""

from pathlib import Path

import pytest


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"

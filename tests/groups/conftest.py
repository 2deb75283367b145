"""A run to supply groups from."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import rolltape
from rolltape.tape.recording.tape import Tape


@pytest.fixture
def tape(tmp_path: Path) -> Iterator[Tape]:
    with rolltape.open(tmp_path / "exp", name="exp") as tape:
        yield tape

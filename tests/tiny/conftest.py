"""Checkpoints that the engine's tests share."""

from pathlib import Path

import pytest

from tiny.checkpoints import LIKE_SHIPPED, write_checkpoint


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that is quick to run."""
    return write_checkpoint(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def small_next(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights of the same shape."""
    return write_checkpoint(tmp_path_factory.mktemp("small_next"), seed=1)


@pytest.fixture(scope="session")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights in the shape of the shipped model."""
    return write_checkpoint(tmp_path_factory.mktemp("shaped"), **LIKE_SHIPPED)

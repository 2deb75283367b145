"""Checkpoints that the engine's tests share, and tests that are coroutines."""

import asyncio
import inspect
from pathlib import Path

import pytest

from engine.checkpoints import LIKE_SHIPPED, write_checkpoint


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an `async def` test in a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


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

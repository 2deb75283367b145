"""Tests that are coroutines, and what the tests of engines share."""

import asyncio
import inspect

import pytest
from tokenizers import Tokenizer

from rolltape.capture.engines.embedded.shipped import shipped_model
from scripted_engine import load_tokenizer


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an `async def` test in a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(shipped_model())

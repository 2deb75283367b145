"""Prompts of the shipped model, and of the real Qwen3 tokenizer."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from prompts.conversing import TINY
from qwen3_tokenizer import qwen3_folder
from rolltape.gateway.prompts import ChatPrompts


@pytest.fixture(scope="session")
def tiny() -> ChatPrompts:
    return ChatPrompts(TINY)


@pytest.fixture(scope="session")
def qwen3() -> ChatPrompts:
    return ChatPrompts(qwen3_folder())


@pytest.fixture(scope="session", params=["tiny", "qwen3"])
def prompts(request: pytest.FixtureRequest) -> ChatPrompts:
    loaded: ChatPrompts = request.getfixturevalue(request.param)
    return loaded


@pytest.fixture(scope="session")
def scratch() -> Iterator[Path]:
    """A folder for the tokenizers of renderer families."""
    with TemporaryDirectory() as made:
        yield Path(made)

"""What the tests of engines share."""

import pytest
from tokenizers import Tokenizer

from rolltape.tiny import shipped_model
from scripted_engine import load_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(shipped_model())

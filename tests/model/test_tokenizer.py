"""The shipped tokenizer: any text comes back, digits stand alone, the marks are those of Qwen3."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

FOLDER = Path(__file__).parents[2] / "src/rolltape/tiny/models/tiny"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@settings(max_examples=300, deadline=None)
@given(text=st.text())
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_text_is_not_normalized(tokenizer: Tokenizer) -> None:
    apart, composed = "e\u0301", "\u00e9"
    assert tokenizer.encode(apart).ids != tokenizer.encode(composed).ids


def test_every_byte_and_every_printable_character_has_an_id(tokenizer: Tokenizer) -> None:
    printable = [chr(code) for code in range(32, 127)]
    assert all(len(tokenizer.encode(character).ids) == 1 for character in printable)
    assert all(len(tokenizer.encode(chr(code)).ids) <= 2 for code in range(256))


def test_digits_stand_alone(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("4096*7").tokens == ["4", "0", "9", "6", "*", "7"]


def test_marks_are_single_ids_at_the_end_of_the_vocabulary(tokenizer: Tokenizer) -> None:
    size = tokenizer.get_vocab_size()
    ids = [tokenizer.token_to_id(mark) for mark in (*SPECIAL, *ADDED)]
    assert ids == list(range(size - len(ids), size))
    assert tokenizer.encode("a<think>b").tokens == ["a", "<think>", "b"]


def test_only_the_chat_marks_are_special_as_in_qwen3(tokenizer: Tokenizer) -> None:
    everything = tokenizer.encode("".join((*SPECIAL, *ADDED))).ids
    assert tokenizer.decode(everything, skip_special_tokens=True) == "".join(ADDED)

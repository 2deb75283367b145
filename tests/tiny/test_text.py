"""The text of a growing reply, and the stop strings in it."""

from pathlib import Path

import numpy as np
import pytest

from rolltape.errors import CheckpointError
from rolltape.tiny.text import GrowingText, StopStrings, TokenTexts
from tiny.checkpoints import SPECIAL, tokenizer

HARD = "größer 日本語 🎉🏽 e\u0301 \u200d naïve <think>x</think>"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> TokenTexts:
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer(400).save(str(file))
    return TokenTexts(file)


def test_text_is_what_the_tokenizer_decodes(texts: TokenTexts) -> None:
    library = tokenizer(400)
    rng = np.random.default_rng(0)
    for _ in range(200):
        ids = rng.integers(0, library.get_vocab_size(), 30).tolist()
        assert texts.decode(ids) == library.decode(ids, skip_special_tokens=False)
        assert texts.decode(ids, skip_special=True) == library.decode(ids, skip_special_tokens=True)


def test_growing_text_gives_whole_characters_and_adds_up(texts: TokenTexts) -> None:
    ids = texts.encode(HARD)
    assert len(ids) > len(HARD.encode()) // 2  # most characters are split over tokens
    growing = GrowingText(texts, skip_special=False)
    parts = [growing.add(token) for token in ids]
    assert "".join(parts) + growing.end() == HARD
    assert not any("\ufffd" in part for part in parts)


def test_a_reply_that_ends_inside_a_character_ends_in_a_replacement(texts: TokenTexts) -> None:
    growing = GrowingText(texts, skip_special=False)
    ids = texts.encode("日")[:1]
    assert growing.add(ids[0]) + growing.end() == "\ufffd" == texts.decode(ids)


def test_special_tokens_are_left_out_on_request(texts: TokenTexts) -> None:
    ids = texts.encode("a<|im_end|>b")
    assert texts.decode(ids, skip_special=True) == "ab"
    assert SPECIAL[2] in texts.decode(ids)


@pytest.mark.parametrize(
    ("stops", "text", "kept"),
    [
        (("日本",), "größer 日本語", "größer "),
        (("r 日",), "größer 日本語", "größe"),
        (("🎉",), "so 🎉 it", "so "),
        (("three", "two thr"), "one two three", "one "),
        (("one two", "one"), "one two", ""),
        (("<|im_end|>",), "a<|im_end|>b", "a"),
        ((">b",), "a<|im_end|>b", "a<|im_end|"),
        (("aab",), "aaab", "a"),
    ],
)
def test_stop_strings_are_found_across_token_boundaries(
    texts: TokenTexts, stops: tuple[str, ...], text: str, kept: str
) -> None:
    ids = texts.encode(text)
    watch = StopStrings(texts, stops)
    for count, token in enumerate(ids, 1):
        match = watch.add(token)
        if match is not None:
            assert texts.decode(ids[:count], until=match.at) == kept
            assert texts.decode(ids[:count]).startswith(kept + match.string)
            return
    pytest.fail("not found")


def test_no_stop_string_is_found_where_there_is_none(texts: TokenTexts) -> None:
    watch = StopStrings(texts, ("xyz", "日本人"))
    assert all(watch.add(token) is None for token in texts.encode("日本語 xy z 日本"))


def test_every_way_to_split_a_text_finds_the_same_stop(texts: TokenTexts) -> None:
    """Single bytes, which is how a model may well spell it."""
    byte_ids = {texts.token_bytes(token): token for token in range(400) if len(texts.token_bytes(token)) == 1}
    data = "größer 日本 now".encode()
    watch = StopStrings(texts, ("日本",))
    matches = [watch.add(byte_ids[bytes([byte])]) for byte in data]
    found = [(place, match) for place, match in enumerate(matches) if match is not None]
    assert found[0][0] == data.index("日本".encode()) + len("日本".encode()) - 1
    assert found[0][1].at == data.index("日本".encode())


def test_a_tokenizer_that_is_not_byte_level_is_refused(tmp_path: Path) -> None:
    made = tokenizer(300)
    made.decoder = None
    made.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="byte-level"):
        TokenTexts(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="not a tokenizer"):
        TokenTexts(tmp_path / "tokenizer.json")

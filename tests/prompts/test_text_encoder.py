"""Texts are encoded exactly as the tokenizer does it, and a text that was encoded before is not encoded again."""

import json
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from prompts.conversing import ASKED, HEARD, LOOK, SYSTEM, TINY, TOLD, called
from rolltape.gateway.prompts import ChatPrompts
from rolltape.gateway.prompts.tokenizer import FolderTokenizer, TextEncoder, pattern_of

WORDS = [
    "Read",
    " the",
    "  file",
    "ﬁ",
    "é",
    "e\u0301",
    "\n",
    "\n\n",
    " ",
    "▁",
    "1234",
    "'s",
    "<|",
    "|>",
    "<",
    "日本",
    "👍🏽",
]
TEXTS = st.lists(st.sampled_from(WORDS) | st.text(max_size=3) | st.integers(0, 200), max_size=12)


def shipped() -> Tokenizer:
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


def with_tokens_that_begin_alike() -> Tokenizer:
    tokenizer = shipped()
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<|a", "<|a|>", "<|a|>b", "|>", "Read")])
    return tokenizer


def with_tokens_of_normalized_text() -> Tokenizer:
    tokenizer = shipped()
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.add_tokens([AddedToken("fi", normalized=True), AddedToken("é", normalized=True)])
    return tokenizer


def with_tokens_that_take_spaces() -> Tokenizer:
    tokenizer = shipped()
    tokenizer.add_tokens([AddedToken("|>", normalized=False, lstrip=True, rstrip=True)])
    return tokenizer


def with_tokens_that_are_whole_words() -> Tokenizer:
    tokenizer = shipped()
    tokenizer.add_tokens([AddedToken("Read", normalized=False, single_word=True)])
    return tokenizer


def with_a_mark_at_the_first_piece() -> Tokenizer:
    tokenizer = shipped()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(replacement="x", prepend_scheme="first"), pre_tokenizers.ByteLevel(False)]
    )
    return tokenizer


def with_a_mark_at_each_piece() -> Tokenizer:
    tokenizer = shipped()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(replacement="x", prepend_scheme="always"), pre_tokenizers.ByteLevel(False)]
    )
    return tokenizer


VOCABULARIES = [
    shipped,
    with_tokens_that_begin_alike,
    with_tokens_of_normalized_text,
    with_tokens_that_take_spaces,
    with_tokens_that_are_whole_words,
    with_a_mark_at_the_first_piece,
    with_a_mark_at_each_piece,
]


@cache
def made(vocabulary: Callable[[], Tokenizer]) -> tuple[Tokenizer, TextEncoder]:
    tokenizer = vocabulary()
    return tokenizer, TextEncoder(tokenizer)


@cache
def of_folder(folder: Path) -> tuple[Tokenizer, TextEncoder]:
    return made(lambda: Tokenizer.from_file(str(folder / "tokenizer.json")))


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def assert_encodes_alike(tokenizer: Tokenizer, encoder: TextEncoder, parts: list[str | int]) -> None:
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    text = "".join(part if isinstance(part, str) else added[part % len(added)] for part in parts)
    expected = encoded(tokenizer, text)
    assert encoder.encode(text) == expected
    assert encoder.encode(text) == expected, "when it is remembered"


@pytest.mark.parametrize("vocabulary", VOCABULARIES, ids=lambda vocabulary: vocabulary.__name__)
@example(parts=["Reader aRead Read", 0, "Read  |>  the ﬁ fi  fi\u0301  e\u0301", 1, " <|a|> <|a|>b <|a", 2, " a"])
@given(parts=TEXTS)
def test_the_ids_of_a_text_are_those_of_the_tokenizer(
    vocabulary: Callable[[], Tokenizer], parts: list[str | int]
) -> None:
    assert_encodes_alike(*made(vocabulary), parts)


@given(parts=TEXTS)
def test_the_ids_of_a_text_are_those_of_the_real_qwen3_tokenizer(parts: list[str | int]) -> None:
    from qwen3_tokenizer import qwen3_folder

    assert_encodes_alike(*of_folder(qwen3_folder()), parts)


@given(words=st.lists(st.text("ab|<", min_size=1, max_size=4), min_size=1), text=st.text("ab|<", max_size=12))
def test_the_pattern_of_words_finds_the_longest_at_each_place(words: list[str], text: str) -> None:
    longest_first = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    assert re.findall(pattern_of(words), text) == re.findall(longest_first, text)


class Watched:
    """A tokenizer that notes which texts it was asked to encode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.asked += texts
        return self._tokenizer.encode_batch_fast(texts, **options)


def watched_prompts(**options: Any) -> tuple[ChatPrompts, Watched]:
    prompts = ChatPrompts(TINY, **options)
    encoder = prompts._tokenizer._encoder
    watched: Any = Watched(encoder._tokenizer)
    encoder._tokenizer = watched
    return prompts, watched


HISTORY = [SYSTEM, ASKED, called({"city": "Köln"}, content="I look.", thinking="hm"), HEARD]


@pytest.mark.parametrize("special_text", ["pass", "plain"])
@pytest.mark.parametrize("renderer", ["qwen3", "default"])
def test_a_history_that_was_rendered_before_is_not_tokenized_again(renderer: str, special_text: str) -> None:
    prompts, watched = watched_prompts(renderer=renderer, special_text=special_text)
    first = prompts.render(HISTORY, [LOOK], None).ids.tolist()
    assert watched.asked
    watched.asked.clear()
    assert prompts.render(HISTORY, [LOOK], None).ids.tolist() == first
    assert watched.asked == []


@pytest.mark.parametrize("renderer", ["qwen3", "default"])
def test_of_a_longer_history_only_the_new_messages_are_tokenized(renderer: str) -> None:
    prompts, watched = watched_prompts(renderer=renderer)
    prompts.render(HISTORY, [LOOK], None)
    watched.asked.clear()
    prompts.render([*HISTORY, TOLD, {"role": "user", "content": "And tomorrow?"}], [LOOK], None)
    assert "".join(watched.asked).count("And tomorrow?") == 1
    assert not any(text in "".join(watched.asked) for text in ("Be brief.", "How is it", "city", "cold\n"))


def test_another_session_with_the_same_system_prompt_and_tools_tokenizes_its_question_alone() -> None:
    prompts, watched = watched_prompts(renderer="qwen3")
    prompts.render([SYSTEM, ASKED], [LOOK], None)
    watched.asked.clear()
    prompts.render([SYSTEM, {"role": "user", "content": "Where am I?"}], [LOOK], None)
    assert watched.asked == ["user\nWhere am I?"]


def test_a_caller_may_change_the_list_that_it_was_given() -> None:
    encoder = TextEncoder(shipped())
    for _ in range(3):
        ids = encoder.encode("Read the file")
        assert ids == encoded(shipped(), "Read the file")
        ids += [0]


def test_the_text_that_was_unused_for_the_longest_time_is_forgotten_when_there_is_no_room() -> None:
    watched: Any = Watched(shipped())
    texts = [f"{number} " + "words " * 50 for number in range(3)]
    encoder = TextEncoder(watched, max_bytes=2_000)
    for text in texts[:2]:
        encoder.encode(text)
    encoder.encode(texts[0])
    encoder.encode(texts[2])
    watched.asked.clear()
    for text in (texts[0], texts[2], texts[1]):
        encoder.encode(text)
    assert watched.asked == [texts[1]]
    assert encoder._recent._bytes <= 2_000


def test_a_text_larger_than_all_room_displaces_no_other() -> None:
    watched: Any = Watched(shipped())
    encoder = TextEncoder(watched, max_bytes=2_500)
    for text in ("Read", "words " * 10_000, "Read"):
        assert encoder.encode(text) == encoded(shipped(), text)
    assert watched.asked.count("Read") == 1


def test_threads_share_an_encoder_that_forgets_all_the_time() -> None:
    tokenizer = shipped()
    encoder = TextEncoder(tokenizer, max_bytes=2_000)
    texts = [f"{number} <|im_start|>user\nfile {number % 7}<|im_end|>" for number in range(50)] * 8
    with ThreadPoolExecutor(8) as pool:
        given = list(pool.map(encoder.encode, texts))
    assert given == [encoded(tokenizer, text) for text in texts]
    assert 0 < encoder._recent._bytes == sum(entry.size for entry in encoder._recent._entries.values()) <= 2_000


def test_lengths_in_a_tokenizer_file_neither_cut_nor_pad_a_text(tmp_path: Path) -> None:
    source = json.loads((TINY / "tokenizer.json").read_bytes())
    source["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    pad = {"direction": "Right", "pad_to_multiple_of": 64, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    source["padding"] = {"strategy": "BatchLongest", **pad}
    (tmp_path / "tokenizer.json").write_text(json.dumps(source))
    shutil.copy(TINY / "tokenizer_config.json", tmp_path)
    text = "Read every file of the project."
    assert FolderTokenizer(tmp_path).encode(text) == encoded(shipped(), text)

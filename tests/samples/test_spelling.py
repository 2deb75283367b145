"""Ids as text: by the tokenizer of their session, characters whole however many tokens they are made of."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rolltape.records.rollout import Session, SessionHead
from rolltape.samples.spelling import Spellings, spell_at, spelled, speller, token_texts, vocabulary_at

TINY = Path(__file__).parents[2] / "src" / "rolltape" / "tiny" / "models" / "tiny"


def byte_fallback(path: Path) -> Path:
    """A vocabulary of words with a space before them and of single bytes, as SentencePiece makes it."""
    words = ["<unk>", "▁so", "▁", "e", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.save(str(path))
    return path


def test_a_character_of_several_tokens_stands_with_the_last() -> None:
    spell = speller(TINY / "tokenizer.json")
    ids = Tokenizer.from_file(str(TINY / "tokenizer.json")).encode("a東🌧b", add_special_tokens=False).ids
    texts = token_texts(ids, spell)
    assert len(texts) == len(ids) > 4
    assert "".join(texts).replace("⋯", "") == "a東🌧b"
    assert [text for text in texts if text != "⋯"] == ["a", "東", "🌧", "b"]


def test_byte_tokens_and_leading_spaces_of_sentencepiece_come_out(tmp_path: Path) -> None:
    spell = speller(byte_fallback(tmp_path / "tokenizer.json"))
    of_byte = {byte: 4 + byte for byte in range(256)}
    ids = [1, 1, *(of_byte[byte] for byte in "é".encode()), 3, 2]
    assert token_texts(ids, spell) == [" so", " so", "⋯", "é", "e", " "]


def test_bytes_that_are_no_character_are_replaced(tmp_path: Path) -> None:
    spell = speller(byte_fallback(tmp_path / "tokenizer.json"))
    first = 4 + "é".encode()[0]
    assert token_texts([3, first], spell) == ["e", "\ufffd"]
    assert "".join(token_texts([first, 3], spell)).replace("⋯", "") == "\ufffde"


def test_ids_that_the_tokenizer_lacks_are_numbers(tmp_path: Path) -> None:
    spell = speller(byte_fallback(tmp_path / "tokenizer.json"))
    assert token_texts([9_999, -1], spell) == ["#9999", "#-1"]
    assert token_texts([7, 8], None) == ["7", "8"]


def test_offsets_and_bytes_agree_with_each_id() -> None:
    spell = speller(TINY / "tokenizer.json")
    ids = np.array([5, 900, 5, 77], np.int32)
    offsets, raw = spelled(ids, spell)
    cut = [raw[start:stop].tobytes() for start, stop in pairwise(offsets.tolist())]
    assert cut == [spell(one) for one in ids.tolist()]


@pytest.mark.parametrize("where", ["run", "elsewhere", "nowhere"])
def test_a_tokenizer_is_looked_for_in_the_run_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for name in ("elsewhere", "run") if where == "run" else ("elsewhere",) if where == "elsewhere" else ():
        vocabulary = {f"in-{name}": 0, "?": 1}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.save(str(tmp_path / name / "tok.json"))
    head = SessionHead(id="s", ordinal=0, tokenizer="tok.json")
    spell = Spellings().of(Session(head, [], str(tmp_path / "run")))
    assert (spell and spell(0)) == (None if where == "nowhere" else f"in-{where}".encode())


def test_a_file_that_is_no_tokenizer_spells_nothing(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    assert spell_at([str(tmp_path)]) is None
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        speller(tmp_path / "tokenizer.json")


def test_a_damaged_tokenizer_in_one_place_is_passed_over_for_a_sound_one(tmp_path: Path) -> None:
    damaged, sound = tmp_path / "damaged.json", tmp_path / "sound.json"
    damaged.write_text("{")
    Tokenizer(models.WordLevel({"hello": 0, "?": 1}, unk_token="?")).save(str(sound))
    spell = spell_at([str(damaged), str(sound)])
    assert spell is not None
    assert spell(0) == b"hello"
    assert vocabulary_at([str(damaged), str(sound)]) == 2

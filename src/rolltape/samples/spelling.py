"""The text of token ids, by the tokenizer that a session names or one that is given; a sample as one readable line."""

import codecs
import contextlib
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from rolltape.records.rollout import Session
from rolltape.records.sample import Sample
from rolltape.records.turn import Ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer

T = TypeVar("T")
Spell = Callable[[int], bytes]  # an id → its bytes, which need not be whole characters

PART = "⋯"  # shown for a token that ends inside a character; the last token of the character shows it
_TOKENIZERS_HELD = 8
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACED = "\ufffd"
# How byte-level vocabularies write a byte: printable ones as their Latin-1 character, the others from U+0100 on.
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
BYTE_LETTERS = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + at): byte for at, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))
}
_VISIBLE = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"})


class Spellings:
    """Chooses the tokenizer that spells a session's ids: a given one, else the one that the session names."""

    def __init__(self, given: Spell | None = None) -> None:
        self.given = given

    def of(self, session: Session) -> Spell | None:
        """The function that spells an id of this session, or None if there is no tokenizer."""
        return self.given or spell_at(session.tokenizers)


def spell_at(places: Iterable[str]) -> Spell | None:
    """The function that spells ids by the first readable tokenizer at these files or folders, or None."""
    return _first_readable(places, speller)


def vocabulary_at(places: Iterable[str]) -> int | None:
    """One more than the largest id of the first readable tokenizer at these places, or None."""
    return _first_readable(places, lambda file: _vocabulary(file, file.stat().st_mtime_ns))


def _first_readable(places: Iterable[str], read: Callable[[Path], T]) -> T | None:
    for place in places:
        file = tokenizer_in(Path(place))
        if file is not None:
            with contextlib.suppress(ValueError):
                return read(file)
    return None


def tokenizer_in(path: Path) -> Path | None:
    """The tokenizer.json that a path names, as a file or by its folder, or None if it does not exist."""
    file = path / "tokenizer.json" if path.is_dir() else path
    return file if file.is_file() else None


def speller(file: Path) -> Spell:
    """The function that spells ids by a tokenizer.json. Raises ValueError if the file is no tokenizer."""
    return _speller(file, file.stat().st_mtime_ns)


@lru_cache(maxsize=_TOKENIZERS_HELD)
def _vocabulary(file: Path, changed_ns: int) -> int:
    return 1 + max(_load(file).get_vocab(with_added_tokens=True).values(), default=-1)


def _load(file: Path) -> "Tokenizer":
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception for whatever is wrong with the file
        raise ValueError(f"{file} is not a tokenizer: {error}") from None


@lru_cache(maxsize=_TOKENIZERS_HELD)
def _speller(file: Path, changed_ns: int) -> Spell:
    return spell_by(_load(file))


def spell_by(tokenizer: "Tokenizer") -> Spell:
    """The function that spells ids by a tokenizer."""

    @cache
    def spell(token: int) -> bytes:
        piece = tokenizer.id_to_token(token) if token >= 0 else None
        if piece is None:
            return f"#{token}".encode()
        text: str = tokenizer.decode([token], skip_special_tokens=False)
        if piece.startswith("▁") and "▁" not in text and not text.startswith(" "):
            text = f" {text}"  # decoders remove the space of the first token
        return _bytes_of(piece, text) if _REPLACED in text else text.encode("utf-8", "replace")

    return spell


def _bytes_of(piece: str, text: str) -> bytes:
    """The bytes of a token that is part of a character, as byte-level vocabularies and byte fallbacks write them."""
    fallback = _BYTE_TOKEN.fullmatch(piece)
    if fallback is not None:
        return bytes([int(fallback[1], 16)])
    is_spelled = all(letter in BYTE_LETTERS for letter in piece)
    return bytes(BYTE_LETTERS[letter] for letter in piece) if is_spelled else text.encode()


def token_texts(ids: Sequence[int], spell: Callable[[int], str | bytes] | None) -> list[str]:
    """A text for each id, or the id itself without `spell`. Bytes are joined: a character of several tokens is shown
    at the last of them, and the others are `PART`.
    """
    if spell is None:
        return [str(token) for token in ids]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = []
    for token in ids:
        given = spell(token)
        texts.append(given if isinstance(given, str) else decoder.decode(given) or (PART if given else ""))
    if texts and decoder.decode(b"", final=True):
        texts[-1] = _REPLACED if texts[-1] == PART else texts[-1] + _REPLACED
    return texts


def spelled(ids: Ids, spell: Spell | None) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """Where the text of each id begins, and all texts joined as bytes. Without `spell`, the texts are the ids."""
    distinct, place = np.unique(ids, return_inverse=True)
    texts = [str(one).encode() if spell is None else spell(one) for one in distinct.tolist()]
    offsets = np.zeros(len(ids) + 1, np.int32)
    np.cumsum(np.array([len(text) for text in texts] or [0], np.int32)[place], out=offsets[1:])
    joined = b"".join([texts[one] for one in place.tolist()])
    return offsets, np.frombuffer(joined, np.uint8)


def show(sample: Sample, text: Callable[[int], str | bytes] | None = None) -> str:
    """A sample in one line, with spaces visible: «trained», ‹sampled but not trained here›, and the rest plain.

    Example:

        print(rolltape.show(sample))  # 1 2 «10» ‹11› «12»

    `text` gives an id's text, or its bytes; without it the ids themselves are shown.
    """
    return " ".join(marked_tokens(sample, text))


def marked_tokens(sample: Sample, text: Callable[[int], str | bytes] | None = None) -> list[str]:
    """Each token of a sample as `show` writes it."""
    texts = token_texts(sample.ids.tolist(), text)
    marks = zip(texts, sample.trained_mask.tolist(), sample.sampled_mask.tolist(), strict=True)
    return [_marked(one.translate(_VISIBLE), trained, sampled) for one, trained, sampled in marks]


def _marked(text: str, trained: bool, sampled: bool) -> str:
    return f"«{text}»" if trained else f"‹{text}›" if sampled else text

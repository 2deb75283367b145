"""The text of token ids, where the run says which tokenizer made them and it is a file here."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rolltape.records.rollout import Session
from rolltape.records.tokens import Ids
from rolltape.view.table import Array

Spell = Callable[[int], bytes]  # an id → its bytes, which need not be whole characters

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACED = "\ufffd"


class Spellings:
    """The tokenizers of one run, each loaded once."""

    def __init__(self, run: str) -> None:
        self._run = Path(run)
        self._known: dict[str | None, Spell | None] = {}

    def of(self, session: Session) -> Spell | None:
        """What spells an id of this session; None: there is no tokenizer at hand."""
        name = session.head.tokenizer
        if name not in self._known:
            self._known[name] = None if name is None else self._loaded(name)
        return self._known[name]

    def _loaded(self, name: str) -> Spell | None:
        for path in (self._run / name, Path(name)):
            file = path / "tokenizer.json" if path.is_dir() else path
            if file.is_file():
                return _speller(file)
        return None


def _speller(file: Path) -> Spell | None:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # noqa: BLE001 - the library raises plain Exception for whatever is wrong with the file
        return None

    @cache
    def spell(token: int) -> bytes:
        piece = tokenizer.id_to_token(token)
        if piece is None:
            return f"#{token}".encode()
        text: str = tokenizer.decode([token], skip_special_tokens=False)
        return _bytes_of(piece, text) if _REPLACED in text else text.encode("utf-8", "replace")

    return spell


def _bytes_of(piece: str, text: str) -> bytes:
    """The bytes of a token that is part of a character, as byte-level vocabularies and byte fallbacks write them."""
    fallback = _BYTE_TOKEN.fullmatch(piece)
    if fallback is not None:
        return bytes([int(fallback[1], 16)])
    known = _byte_letters()
    return bytes(known[letter] for letter in piece) if all(letter in known for letter in piece) else text.encode()


@cache
def _byte_letters() -> dict[str, int]:
    """The letters that byte-level vocabularies write bytes with: printable ones as they are, others from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return letters | {chr(256 + number): byte for number, byte in enumerate(others)}


def spelled(ids: Ids, spell: Spell | None) -> tuple[Array, Array]:
    """The texts of ids one after the other, and where each begins; the ids themselves where nothing spells them."""
    distinct, place = np.unique(ids, return_inverse=True)
    texts: Any = [str(one).encode() if spell is None else spell(one) for one in distinct.tolist()]
    offsets = np.zeros(len(ids) + 1, np.int32)
    np.cumsum(np.array([len(text) for text in texts] or [0], np.int32)[place], out=offsets[1:])
    joined = b"".join([texts[one] for one in place.tolist()])
    return offsets, np.frombuffer(joined, np.uint8)

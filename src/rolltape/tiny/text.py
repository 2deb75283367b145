"""The growing text of token ids, decoded by bytes, since a token may end inside a character."""

import codecs
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from rolltape.errors import CheckpointError


class TokenTexts:
    """The bytes of every id of a byte-level tokenizer, such as Qwen3's."""

    def __init__(self, file: Path) -> None:
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # noqa: BLE001 - the library raises plain Exception for whatever is wrong with the file
            raise CheckpointError(f"{file}: not a tokenizer: {error}") from None
        decoder = self._tokenizer.decoder
        if decoder is None or type(decoder).__name__ != "ByteLevel":
            raise CheckpointError(f"{file}: the decoder is {type(decoder).__name__}; a byte-level one is needed")
        self._special = {token for token, added in self._tokenizer.get_added_tokens_decoder().items() if added.special}
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str) -> list[int]:
        """The ids of a text; spelled-out special tokens are encoded as such."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes of an id; empty if the model has the id but the tokenizer does not."""
        known = self._bytes.get(token)
        if known is None:
            written = self._tokenizer.id_to_token(token)
            known = self._bytes[token] = b"" if written is None else _to_bytes(written)
        return known

    def is_special(self, token: int) -> bool:
        return token in self._special

    def decode(self, ids: list[int], *, skip_special: bool = False, until: int | None = None) -> str:
        """The text of ids, with invalid UTF-8 replaced; `until` cuts after this number of bytes of all ids."""
        parts, at = [], 0
        for token in ids:
            data = self.token_bytes(token)
            if not (skip_special and token in self._special):
                parts.append(data if until is None else data[: max(until - at, 0)])
            at += len(data)
        return b"".join(parts).decode("utf-8", errors="replace")

    def text_of(self, ids: list[int], **options: Any) -> str:
        """The name of `decode` in 0.1; removed in 0.3."""
        warnings.warn("TokenTexts.text_of is now TokenTexts.decode", DeprecationWarning, stacklevel=2)
        return self.decode(ids, **options)


class StopMatch(NamedTuple):
    """A stop string that was found, and the byte of the reply at which it begins."""

    string: str
    at: int


class StopStrings:
    """Finds stop strings in a growing reply. The earliest match counts; of several there, the longest."""

    def __init__(self, texts: TokenTexts, strings: tuple[str, ...]) -> None:
        self._texts = texts
        self._strings = [(string, string.encode("utf-8", errors="surrogatepass")) for string in strings]
        self._reach = max(len(data) for _, data in self._strings) - 1
        self._tail = b""
        self._seen = 0  # bytes before the tail

    def add(self, token: int) -> StopMatch | None:
        """Add the next id, special or not. Return the match that it completes, if any."""
        tail = self._tail + self._texts.token_bytes(token)
        found = [(at, -len(data), string) for string, data in self._strings if (at := tail.find(data)) >= 0]
        if found:
            at, _, string = min(found)
            return StopMatch(string, self._seen + at)
        keep = max(len(tail) - self._reach, 0)
        self._seen += keep
        self._tail = tail[keep:]
        return None


class GrowingText:
    """The text of ids as they come; a character is returned with its last byte."""

    def __init__(self, texts: TokenTexts, *, skip_special: bool) -> None:
        self._texts = texts
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> str:
        """Add an id, and return the characters that it completes."""
        if self._skip_special and self._texts.is_special(token):
            return ""
        return self._decoder.decode(self._texts.token_bytes(token))

    def end(self) -> str:
        """The rest: a replacement character if the reply ends inside a character."""
        return self._decoder.decode(b"", final=True)


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes are written as themselves, others as characters from 256 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_of_char()


def _to_bytes(token: str) -> bytes:
    # An added token may have characters outside the alphabet, such as a space; then it is its own text.
    if all(char in _BYTES for char in token):
        return bytes(_BYTES[char] for char in token)
    return token.encode()

"""Encode texts to ids with a tokenizer, and remember the ids of recent texts.

An agent sends its whole history with every request, and sessions share system prompts and tools. So most texts that are
rendered into prompts have been encoded before.
"""

import json
import re
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from os.path import commonprefix
from threading import Lock
from typing import NamedTuple

from tokenizers import Tokenizer

MAX_BYTES = 64 * 2**20  # about eight million tokens with their texts
_ENTRY_BYTES = 250  # what a remembered text costs beside its characters and ids, measured
# These treat a piece of text alike wherever it stands. Metaspace does so too, unless it marks only the first piece.
_PRE_TOKENIZERS = frozenset(
    {"Sequence", "ByteLevel", "Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit"}
)


class TextEncoder:
    """Gives exactly the ids that its tokenizer gives, nothing added around them. Threads share it.

    A text is split at the added tokens spelled out in it, as the tokenizer itself does, and each piece is remembered.
    So a conversation that a chat template joined into one text is encoded only where it is new.
    """

    def __init__(self, tokenizer: Tokenizer, max_bytes: int = MAX_BYTES) -> None:
        self._tokenizer = tokenizer
        self._added = _splitting_tokens(tokenizer)
        self._at_added = re.compile(f"({pattern_of(self._added)})") if self._added else None
        self._recent = _RecentTexts(max_bytes)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, in a list that the caller may change."""
        if (known := self._recent.get(text)) is not None:
            return known
        pieces = [text] if self._at_added is None else self._at_added.split(text)
        if len(pieces) == 1:
            return self._encode_new(text)
        ids: list[int] = []
        for piece, added in zip(pieces[::2], [*pieces[1::2], None], strict=True):
            if piece:
                ids += self._recent.get(piece) or self._encode_new(piece)
            if added is not None:
                ids.append(self._added[added])
        return ids

    def _encode_new(self, piece: str) -> list[int]:
        # The batch form lets other threads run meanwhile, and gives no offsets, which halves the time.
        ids: list[int] = self._tokenizer.encode_batch_fast([piece], add_special_tokens=False)[0].ids
        self._recent.put(piece, ids)
        return ids


class _Entry(NamedTuple):
    ids: "array[int]"
    size: int


class _RecentTexts:
    """Ids by text, up to a number of bytes; the text that was not asked for the longest time goes first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._lock = Lock()

    def get(self, text: str) -> list[int] | None:
        with self._lock:
            entry = self._entries.get(text)
            if entry is None:
                return None
            self._entries.move_to_end(text)
        return entry.ids.tolist()

    def put(self, text: str, ids: list[int]) -> None:
        compact = array("i", ids)
        entry = _Entry(compact, sys.getsizeof(text) + compact.itemsize * len(compact) + _ENTRY_BYTES)
        if entry.size > self._max_bytes:
            return
        with self._lock:
            if text in self._entries:  # another thread encoded it meanwhile
                return
            self._entries[text] = entry
            self._bytes += entry.size
            while self._bytes > self._max_bytes:
                self._bytes -= self._entries.popitem(last=False)[1].size


def pattern_of(words: Iterable[str]) -> str:
    """A regular expression for the longest of these words that begins at a place.

    It branches letter by letter. Some vocabularies add 800 tokens that begin alike, and trying one after the other
    takes longer than tokenizing.
    """
    rest = set(words)
    by_letter: dict[str, list[str]] = {}
    for word in sorted(rest - {""}):
        by_letter.setdefault(word[0], []).append(word)
    branches = []
    for alike in by_letter.values():
        start = commonprefix(alike)  # noqa: RUF071 - these are no paths
        branches.append(re.escape(start) + pattern_of(word[len(start) :] for word in alike))
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)})" + ("?" if "" in rest else "")


def _splitting_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """The added tokens, with their ids, at which the tokenizer splits a text before all else.

    There are none where the ids of a piece may depend on what is around it.
    """
    if not _treats_pieces_alike(tokenizer):
        return {}
    # The tokenizer looks for the other added tokens later, in each piece, once it is normalized.
    first = {id_: token for id_, token in tokenizer.get_added_tokens_decoder().items() if not token.normalized}
    if any(token.lstrip or token.rstrip or token.single_word for token in first.values()):
        return {}
    return {token.content: id_ for id_, token in first.items() if token.content}


def _treats_pieces_alike(tokenizer: Tokenizer) -> bool:
    if tokenizer.pre_tokenizer is None:
        return True
    steps = [json.loads(tokenizer.pre_tokenizer.__getstate__())]
    while steps:
        step = steps.pop()
        steps += step.get("pretokenizers", [])
        is_metaspace = step["type"] == "Metaspace" and step["prepend_scheme"] != "first"
        if not is_metaspace and step["type"] not in _PRE_TOKENIZERS:
            return False
    return True

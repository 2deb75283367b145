"""A model folder's tokenizer, with the part of transformers' interface that renderers need.

It caches the ids of recent texts. An agent sends its whole history with every request, and sessions share system
prompts and tools, so most texts of a prompt have been encoded before.
"""

import enum
import json
import re
import secrets
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from os.path import commonprefix
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from tokenizers import Tokenizer, decoders

from rolltape.errors import CheckpointError
from rolltape.gateway.prompts.chat_template import ChatTemplate
from rolltape.samples.spelling import BYTE_LETTERS, spell_by

MAX_BYTES = 64 * 2**20  # about eight million tokens with their texts
_ENTRY_BYTES = 250  # measured cost of a cached text beside its characters and ids
# These split a piece of text in the same way everywhere. So does Metaspace, unless it marks only the first piece.
_PRE_TOKENIZERS = frozenset(
    {"Sequence", "ByteLevel", "Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit"}
)


class SpecialText(enum.StrEnum):
    """How to encode a special token that is spelled out in user or tool text."""

    PASS = "pass"  # as that token, like the model's own template
    PLAIN = "plain"  # as ordinary text


class FolderTokenizer:
    """Encodes and decodes by a folder's `tokenizer.json`. Threads may share it."""

    def __init__(self, folder: Path, special_text: SpecialText = SpecialText.PASS) -> None:
        file = folder / "tokenizer.json"
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: there is no such folder; give one with the tokenizer.json of the model")
        if not file.is_file():
            raise CheckpointError(
                f"{folder}: no tokenizer.json; have transformers write one: "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        self.source = file.read_bytes()
        self._tokenizer = _loaded(self.source, file)
        self._encoder = TextEncoder(self._tokenizer)
        self.spell = spell_by(self._tokenizer)
        config = read_json(folder / "tokenizer_config.json")
        tokens = _named_tokens(config)
        self.name_or_path = str(folder)
        self.vocabulary = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.eos_token_id = self._id_or_none(tokens.get("eos_token"))
        self.unk_token_id = self._id_or_none(tokens.get("unk_token"))
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.all_special_tokens = [token.content for token in added if token.special]
        # Includes tokens such as <tool_call>, which the vocabulary does not mark as special, but which act alike.
        spelled = pattern_of(token.content for token in added)
        self._spelled = re.compile(spelled) if spelled else None
        template = ChatTemplate.source_in(folder, config)
        self.template = None if template is None else ChatTemplate(template, tokens, where=str(folder))
        # Random, so that no text can forge them; letters and digits, so that JSON and templates do not change them.
        secret = secrets.token_hex(8)
        self._open, self._close = f"q{secret}b", f"q{secret}e"
        self._marked = re.compile(f"{self._open}(.*?){self._close}", re.DOTALL)
        is_plain = special_text is SpecialText.PLAIN
        self._plain = TextEncoder(_without_added(self.source, file)) if is_plain else None
        self._bytes: dict[int, bytes] = {}

    def guard(self, text: str) -> tuple[str, int]:
        """Prepare a user's or tool's text for `encode`. Also return how many special tokens are spelled out in it."""
        if self._spelled is None:
            return text, 0
        if self._plain is None:
            return text, len(self._spelled.findall(text))
        return self._spelled.subn(rf"{self._open}\g<0>{self._close}", text)

    def encode(self, text: str, **_: object) -> list[int]:
        """The ids of a text, without added special tokens."""
        if self._plain is None or self._open not in text:
            return self._encoder.encode(text)
        parts = self._marked.split(text)
        if self._spelled is None or not any(self._spelled.search(around) for around in parts[::2]):
            return self._plain.encode("".join(parts))
        ids: list[int] = []
        for index, part in enumerate(parts):
            ids += (self._plain if index % 2 else self._encoder).encode(part)
        return ids

    def encode_whole(self, text: str, add_special_tokens: bool) -> list[int]:
        """The ids of a text that is a complete prompt."""
        if not add_special_tokens:
            return self._encoder.encode(text)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=True).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False, **_: object) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    @property
    def is_byte_level(self) -> bool:
        """Whether the text of ids is the concatenation of their bytes, so that each can be decoded alone."""
        return isinstance(self._tokenizer.decoder, decoders.ByteLevel)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one id in a byte-level vocabulary; empty for an id outside it."""
        found = self._bytes.get(token)
        if found is None:
            written = (self._tokenizer.id_to_token(token) if token >= 0 else None) or ""
            is_spelled = all(letter in BYTE_LETTERS for letter in written)
            found = bytes(BYTE_LETTERS[letter] for letter in written) if is_spelled else written.encode()
            self._bytes[token] = found
        return found

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self._id_or_none(token)

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """The ids of a conversation by the folder's own template."""
        if self.template is None:
            raise CheckpointError(f"{self.name_or_path}: no chat template, so a renderer must be named")
        for name in ("tokenize", "return_dict"):
            options.pop(name, None)
        return self.encode(self.template.render(messages, **options))

    def _id_or_none(self, token: str | None) -> int | None:
        found: int | None = None if token is None else self._tokenizer.token_to_id(token)
        return found


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object in a model folder; empty if there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{file}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: {type(value).__name__} where an object belongs")
    return value


def _loaded(source: bytes, file: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_buffer(source)
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception for whatever is wrong with the file
        raise CheckpointError(f"{file}: not a tokenizer: {error}") from None
    # Some files contain the lengths of the last training batch, which transformers ignores too.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _without_added(source: bytes, file: Path) -> Tokenizer:
    """The same vocabulary without its added tokens, so that their spelling is encoded as ordinary text."""
    bare = json.loads(source) | {"added_tokens": [], "post_processor": None}
    return _loaded(json.dumps(bare).encode(), file)


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and the like, by name."""
    named = {name: value for name, value in config.items() if name.endswith("_token")}
    named = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: value for name, value in named.items() if isinstance(value, str)}


class TextEncoder:
    """Encodes exactly as its tokenizer does, without added special tokens. Threads may share it.

    A text is split at the added tokens spelled out in it, as the tokenizer itself does, and each piece is cached.
    So of a conversation that a chat template joined into one text, only new pieces are encoded.
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
        # The batch form lets other threads run, and computes no offsets, which halves the time.
        ids: list[int] = self._tokenizer.encode_batch_fast([piece], add_special_tokens=False)[0].ids
        self._recent.put(piece, ids)
        return ids


class _EncodedText(NamedTuple):
    ids: "array[int]"
    size: int


class _RecentTexts:
    """A cache of ids by text, up to a number of bytes; the least recently used text is dropped first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[str, _EncodedText] = OrderedDict()
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
        entry = _EncodedText(compact, sys.getsizeof(text) + compact.itemsize * len(compact) + _ENTRY_BYTES)
        if entry.size > self._max_bytes:
            return
        with self._lock:
            if text in self._entries:  # another thread has encoded it
                return
            self._entries[text] = entry
            self._bytes += entry.size
            while self._bytes > self._max_bytes:
                self._bytes -= self._entries.popitem(last=False)[1].size


def pattern_of(words: Iterable[str]) -> str:
    """A regular expression for the longest of these words that begins at a place.

    It branches letter by letter. Some vocabularies add 800 tokens with the same beginning, and trying them one by
    one takes longer than tokenizing.
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
    """The added tokens, with their ids, at which the tokenizer splits a text first of all.

    Empty if the ids of a piece may depend on the text around it.
    """
    if not _treats_pieces_alike(tokenizer):
        return {}
    # The tokenizer looks for the other added tokens later, in each normalized piece.
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

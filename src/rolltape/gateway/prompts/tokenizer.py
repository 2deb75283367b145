"""A model folder's tokenizer and chat template, with the interface of transformers that renderers need."""

import enum
import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer, decoders

from rolltape.errors import CheckpointError, PromptError
from rolltape.gateway.prompts.text_encoder import TextEncoder, pattern_of
from rolltape.samples.spelling import spell_by

# How byte-level vocabularies write a byte: printable ones as their Latin-1 letter, the others from U+0100 on.
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_BYTE_LETTERS = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + at): byte for at, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))
}


class SpecialText(enum.StrEnum):
    """What becomes of a special token that is spelled out in user or tool text."""

    PASS = "pass"  # it is that token, as the model's own template has it
    PLAIN = "plain"  # it is ordinary text


class FolderTokenizer:
    """Encodes and decodes by a folder's `tokenizer.json`. What it gives never changes: threads share it."""

    def __init__(self, folder: Path, special_text: SpecialText = SpecialText.PASS) -> None:
        file = folder / "tokenizer.json"
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
        # Tokens such as <tool_call>, which the vocabulary does not call special, have as much power over the model.
        spelled = pattern_of(token.content for token in added)
        self._spelled = re.compile(spelled) if spelled else None
        template = ChatTemplate.source_in(folder, config)
        self.template = None if template is None else ChatTemplate(template, tokens, where=str(folder))
        # Random, so that no text can forge them; letters and digits, so that JSON and templates leave them alone.
        secret = secrets.token_hex(8)
        self._open, self._close = f"q{secret}b", f"q{secret}e"
        self._marked = re.compile(f"{self._open}(.*?){self._close}", re.DOTALL)
        is_plain = special_text is SpecialText.PLAIN
        self._plain = TextEncoder(_without_added(self.source, file)) if is_plain else None
        self._bytes: dict[int, bytes] = {}

    def guard(self, text: str) -> tuple[str, int]:
        """A user's or tool's text as `encode` shall get it, and how many special tokens are spelled out in it."""
        if self._spelled is None:
            return text, 0
        if self._plain is None:
            return text, len(self._spelled.findall(text))
        return self._spelled.subn(rf"{self._open}\g<0>{self._close}", text)

    def encode(self, text: str, **_: object) -> list[int]:
        """The ids of a text, nothing added around it."""
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
        """The ids of a text that is a prompt by itself."""
        if not add_special_tokens:
            return self._encoder.encode(text)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=True).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False, **_: object) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    @property
    def is_byte_level(self) -> bool:
        """Whether the text of ids is their bytes put together, so that each can be decoded by itself."""
        return isinstance(self._tokenizer.decoder, decoders.ByteLevel)

    def token_bytes(self, token: int) -> bytes:
        """What one id adds to a text, in a byte-level vocabulary; nothing for an id outside it."""
        found = self._bytes.get(token)
        if found is None:
            written = (self._tokenizer.id_to_token(token) if token >= 0 else None) or ""
            letters = [_BYTE_LETTERS.get(letter) for letter in written]
            plain = [byte for byte in letters if byte is not None]
            found = bytes(plain) if len(plain) == len(letters) else written.encode()
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
    """A JSON object of a model folder; empty where there is no such file."""
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
        raise CheckpointError(f"{file}: no tokenizer: {error}") from None
    # Some files carry the lengths of the last training batch, which transformers ignores too.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _without_added(source: bytes, file: Path) -> Tokenizer:
    """The same vocabulary without its added tokens: what is spelled like one is encoded as any text."""
    bare = json.loads(source) | {"added_tokens": [], "post_processor": None}
    return _loaded(json.dumps(bare).encode(), file)


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and their like, by name."""
    named = {name: value for name, value in config.items() if name.endswith("_token")}
    named = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: value for name, value in named.items() if isinstance(value, str)}


class ChatTemplate:
    """A Jinja chat template and the special tokens that it may name, applied as transformers does."""

    def __init__(self, source: str, tokens: Mapping[str, str], *, where: str) -> None:
        self.source = source
        self._tokens = dict(tokens)
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise CheckpointError(f"{where}: its chat template is no Jinja template: {error}") from None

    @staticmethod
    def source_in(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
        """The template of a folder: in a file of its own, or in the tokenizer's configuration."""
        file = folder / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        given = tokenizer_config.get("chat_template")
        if isinstance(given, list):
            given = {item.get("name"): item.get("template") for item in given if isinstance(item, dict)}.get("default")
        return given if isinstance(given, str) else None

    def render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """The text of a conversation; raises PromptError where the template refuses it."""
        try:
            return self._template.render(messages=messages, **({"tools": None} | self._tokens | options))
        except Exception as error:  # a template is a program, and fails in every way that programs do
            raise PromptError(f"the chat template refuses the messages: {error}") from error


class _GenerationTag(Extension):
    """`{% generation %}` marks what the model said; for a prompt it is no more than its contents."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_refuse, strftime_now=time.strftime)
    return environment


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)

"""The chat template of a model folder, applied as transformers does."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rolltape.errors import CheckpointError, PromptError


class ChatTemplate:
    """A Jinja chat template and the special tokens that it may use."""

    def __init__(self, source: str, tokens: Mapping[str, str], *, where: str) -> None:
        self.source = source
        self._tokens = dict(tokens)
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise CheckpointError(f"{where}: its chat template is not a Jinja template: {error}") from None

    @staticmethod
    def source_in(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
        """The template of a folder: a file of its own, or a field of the tokenizer's configuration."""
        file = folder / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        given = tokenizer_config.get("chat_template")
        if isinstance(given, list):
            given = {item.get("name"): item.get("template") for item in given if isinstance(item, dict)}.get("default")
        return given if isinstance(given, str) else None

    def render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """The text of a conversation; raises PromptError if the template refuses it."""
        try:
            return self._template.render(messages=messages, **({"tools": None} | self._tokens | options))
        except Exception as error:  # a template is a program, and may raise any error
            raise PromptError(f"the chat template refuses the messages: {error}") from error


class _GenerationTag(Extension):
    """`{% generation %}` marks the model's own text; only its contents are rendered."""

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

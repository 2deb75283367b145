"""The interface to the untyped `renderers` package: one renderer per model family, and the quirks of each."""

import enum
from collections.abc import Sequence
from typing import Any, Protocol, cast

import msgspec

from rolltape.errors import CheckpointError
from rolltape.gateway.prompts.tokenizer import FolderTokenizer

Chat = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None

THINK_START, THINK_END = "<think>", "</think>"
DEFAULT = "default"  # the folder's own chat template, which never bridges

# These read only the generation prompt at the end of a held prompt, so its last ids are enough. Known from their code,
# and tested; the others get the whole prompt.
READS_PROMPT_END = frozenset(
    {
        "deepseek-r1",
        "deepseek-v3",
        "kimi-k2",
        "llama-3",
        "minimax-m2",
        "nemotron-3",
        "nemotron-3-ultra",
        "prime-qwen3",
        "qwen3",
        "qwen3.5",
        "qwen3.6",
        "qwen3.8",
    }
)
# These render a reply and what follows it in the same way, whatever comes before the messages that it answers. Tested.
RENDERS_IN_PARTS = frozenset(
    {
        "glm-4.5",
        "glm-5",
        "glm-5.1",
        "kimi-k2.5",
        "minimax-m2",
        "nemotron-3",
        "nemotron-3-ultra",
        "nemotron-3.5",
        "qwen3",
        "qwen3.5",
        "qwen3.6",
    }
)
# gpt-oss: its encoding comes from a package that downloads its vocabulary, so it is tried only if named.
_ONLY_BY_NAME = frozenset({DEFAULT, "gpt-oss"})


class CallInThinking(enum.Enum):
    """The meaning of a call's mark while thinking is open."""

    DRAFT = "draft"  # the call ends the thinking, unless a mark after it does; then the call was part of the thinking
    ENDS_THINKING = "ends_thinking"
    PART_OF_THINKING = "part_of_thinking"


class ReplyMarks(msgspec.Struct, frozen=True, kw_only=True):
    """The marks that separate the thinking, the text and the calls of a family's replies.

    A mark is one token. A `spelled` mark may be spelled by any tokens. So may the marks of thinking if the vocabulary
    has no tokens for them.
    """

    calls: tuple[str, ...] = ()  # any of them begins the calls
    in_thinking: CallInThinking = CallInThinking.DRAFT
    spelled_calls: tuple[str, ...] = ()
    spelled_in_thinking: tuple[str, ...] = ()  # these end thinking
    json_call: bool = False  # a whole reply that begins with `{` may be a call; there is no thinking then
    think_start: str = THINK_START
    think_end: str = THINK_END


_DRAFT, _ENDS, _PART = CallInThinking.DRAFT, CallInThinking.ENDS_THINKING, CallInThinking.PART_OF_THINKING
_QWEN = ReplyMarks(calls=("<tool_call>",), in_thinking=_DRAFT)
_GLM = ReplyMarks(calls=("<tool_call>",), in_thinking=_ENDS)
_LAGUNA = ReplyMarks(calls=("<tool_call>",), in_thinking=_PART)
_DEEPSEEK = ReplyMarks(calls=("<｜tool▁calls▁begin｜>",), in_thinking=_PART)
_KIMI_SECTION = "<|tool_calls_section_begin|>"
_DSML_SECTIONS = ("<｜DSML｜tool_calls>", "<｜DSML｜toolcalls>", "<｜DSML｜tool>")
# Families whose replies can be split while they are sampled, by the marks that their parsers in `renderers` look for.
# Tested. The others (channels, as in gpt-oss, and templates of unknown form) are parsed when a reply has ended.
REPLY_MARKS = {
    **dict.fromkeys(("qwen3", "qwen3-vl", "prime-qwen3", "qwen3.5", "qwen3.6", "qwen3.8"), _QWEN),
    **dict.fromkeys(("nemotron-3", "nemotron-3-ultra", "nemotron-3.5"), _QWEN),
    **dict.fromkeys(("glm-4.5", "glm-5", "glm-5.1", "glm-5.3"), _GLM),
    **dict.fromkeys(("laguna-m.1", "laguna-s-2.1", "laguna-xs-2.1", "laguna-xs.2"), _LAGUNA),
    **dict.fromkeys(("deepseek-r1", "deepseek-v3"), _DEEPSEEK),
    "deepseek-v4": ReplyMarks(
        spelled_calls=(*_DSML_SECTIONS, "<｜DSML｜invoke"), spelled_in_thinking=_DSML_SECTIONS, in_thinking=_ENDS
    ),
    "hy3": ReplyMarks(
        calls=("<tool_calls:opensource>", "<tool_call:opensource>"),
        in_thinking=_PART,
        think_start="<think:opensource>",
        think_end="</think:opensource>",
    ),
    "kimi-k2": ReplyMarks(calls=(_KIMI_SECTION,), in_thinking=_DRAFT),
    "kimi-k2.5": ReplyMarks(
        calls=(_KIMI_SECTION,), spelled_calls=(_KIMI_SECTION, "<|tool_call_section_begin|>"), in_thinking=_DRAFT
    ),
    "llama-3": ReplyMarks(json_call=True),
    "minimax-m2": ReplyMarks(calls=("<minimax:tool_call>",), in_thinking=_DRAFT),
}


class Tokens(Protocol):
    """A renderer's result: ids, and for each the index of its message, or -1."""

    token_ids: list[int]
    message_indices: list[int]


class Call(Protocol):
    """A tool call in a reply, well-formed or not."""

    name: Any
    arguments: Any
    token_span: tuple[int, int] | None
    status: str
    id: str | None


class Response(Protocol):
    """A parsed reply."""

    content: str
    reasoning_content: str | None
    reasoning_complete: bool | None
    tool_calls: list[Call]


class Renderer(Protocol):
    """The part of a renderer's interface that is used here."""

    config: Any
    effective_thinking_retention: str

    def render(self, messages: Chat, *, tools: Tools, add_generation_prompt: bool) -> Tokens: ...

    def render_ids(self, messages: Chat, *, tools: Tools, add_generation_prompt: bool) -> list[int]: ...

    def bridge_to_next_turn(
        self, prompt_ids: list[int], completion_ids: list[int], new_messages: Chat, /, *, tools: Tools
    ) -> Tokens | None: ...

    def parse_response(self, token_ids: list[int], *, tools: Tools, prompt_ids: list[int]) -> Response: ...

    def get_stop_token_ids(self) -> list[int]: ...


def version() -> str:
    """The version of the `renderers` package."""
    return str(_package().__version__)


def guessable() -> Sequence[str]:
    """The families to try on a folder whose family is not named."""
    return tuple(name for name in _configs() if name not in _ONLY_BY_NAME)


def make(name: str, tokenizer: FolderTokenizer, **options: Any) -> Renderer:
    """The renderer of a family; raises CheckpointError if there is none or the tokenizer lacks its tokens."""
    known = _configs()
    if name not in known:
        raise CheckpointError(f"no renderer is called {name!r}; known are {', '.join(sorted(known))}")
    try:
        return cast("Renderer", _package().create_renderer(tokenizer, known[name](**options)))
    except Exception as error:  # noqa: BLE001 - each renderer has its own way to say that a token is missing
        raise CheckpointError(f"renderer {name} does not fit {tokenizer.name_or_path}: {error}") from None


def try_render(renderer: Renderer, chat: Chat, tools: Tools, *, opens_reply: bool = True) -> list[int] | None:
    """The ids of a conversation, or None if the renderer refuses it."""
    try:
        return list(renderer.render_ids(chat, tools=tools, add_generation_prompt=opens_reply))
    except Exception:  # noqa: BLE001 - renderers and templates refuse with errors of many kinds
        return None


def thinking_option(name: str, tokenizer: FolderTokenizer) -> str | None:
    """The template option that turns thinking on and off, or None if the family has none."""
    if name == DEFAULT:
        source = "" if tokenizer.template is None else tokenizer.template.source
        return next((option for option in ("enable_thinking", "thinking") if option in source), None)
    fields = _configs()[name].template_field_names()
    return next((option for option in ("enable_thinking", "thinking") if option in fields), None)


def template_options(renderer: Renderer) -> dict[str, Any]:
    """The options with which the model's own template renders as this renderer does."""
    config = renderer.config
    given = {field: getattr(config, field) for field in type(config).template_field_names()}
    return {field: value for field, value in given.items() if value is not None}


def _package() -> Any:
    # Imported when first needed: the import takes a second, most of it for a client that is not used here.
    import renderers  # type: ignore[import-untyped]

    return renderers


def _configs() -> dict[str, Any]:
    _package()
    from renderers import configs

    skipped = {"auto", "custom"}
    return {name: config for name, config in configs._CONFIG_BY_NAME.items() if name not in skipped}

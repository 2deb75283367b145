"""A request in one form for every API, its limits, and which requests are auxiliary."""

import random
import re
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Annotated, Any

import msgspec

from rolltape.errors import BadRequest, PromptTooLong
from rolltape.records.messages import content_text

# What is done with a smaller body takes about a millisecond; with a larger one it is kept off the event loop.
INLINE_BYTES = 64 * 1024

_encode = msgspec.json.Encoder(order="deterministic").encode

_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sampling parameters; None: not given, so that the next in line decides (agent, session, gateway)."""

    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: _Share | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    min_p: _Share | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    stop: tuple[Annotated[str, msgspec.Meta(min_length=1)], ...] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(ge=0)] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The parameters that are given."""
        given: dict[str, Any] = msgspec.to_builtins(self)
        return given

    def over(self, other: "SamplingParams") -> "SamplingParams":
        """These parameters, and the other's where these are None."""
        given = {name: getattr(self, name) for name in self.__struct_fields__ if getattr(self, name) is not None}
        return msgspec.structs.replace(other, **given)


STRICT = "tools: strict"
# Of an assistant's message: what it leaves out of the reply that its id names. Fields, and places of calls.
REFERENCES = "references"


class ToolChoice(msgspec.Struct, frozen=True):
    """Whether the model may call tools: `auto`, `none`, or `required`, and then perhaps one by its name."""

    mode: str = "auto"
    name: str | None = None  # None: any


class OutputSchema(msgspec.Struct, frozen=True):
    """The JSON schema that the text of a reply is to follow."""

    field: str  # the request's, as its client calls it
    schema: dict[str, Any]


class Effort(msgspec.Struct, frozen=True):
    """How much the model is to think."""

    field: str  # the request's, as its client calls it
    word: str  # as Chat Completions has it in `reasoning_effort`


class GivenPrompt(msgspec.Struct, frozen=True):
    """A prompt that comes as it is, and is not rendered from messages: a text, or ids."""

    text: str | None = None
    ids: list[int] | None = None
    add_special_tokens: bool = True  # to a text, those that the tokenizer adds (a BOS token, for some models)


class TokenDetails(msgspec.Struct, frozen=True):
    """What a client wants to be told of the tokens of prompt and reply."""

    ids: bool = False
    texts: bool = False  # of the tokens of a prompt
    logprobs: bool = False  # of the sampled tokens
    top_logprobs: int = 0  # beside each: so many of the most likely tokens
    tokens_as_ids: bool = False  # beside a logprob the token is written `token_id:N`, not as its text


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Messages and tools are in chat form (OpenAI's), whatever form they came in.

    A message is `{"role", "content"}` with content a text, a list of text parts, or None, and by role
    `tool_calls` and `reasoning_content` (assistant) or `tool_call_id` (tool). What has no place there (a
    thinking block's signature, say) is kept under a key of its own, so that nothing that came is lost.
    """

    api: str  # the dialect's name
    client: str = ""  # as its User-Agent names it
    model: str
    messages: list[dict[str, Any]]
    after_reply: str | None = None  # the messages follow this reply of the session; None: they are the conversation
    in_thread: bool = False  # it goes on with the tools that `after_reply` had
    has_references: bool = False  # some messages have REFERENCES
    instructed: bool = False  # the first message is for this reply alone
    prompt: GivenPrompt | None = None  # instead of messages, of which there are none then
    opens_reply: bool = True  # the prompt ends with what begins a reply; false only where its ids alone are asked for
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    sampling: SamplingParams = SamplingParams()
    stop_ids: tuple[int, ...] = ()  # that end a reply, beside those of the model
    n: int = 1  # replies, each a turn of its own
    token_details: TokenDetails = TokenDetails()
    stream: bool = False
    include_usage: bool = True  # in a streamed reply
    thinking: bool | None = None  # None: not given, so the gateway's setting holds
    effort: Effort | None = None  # None: not given
    custom_tools: frozenset[str] = frozenset()  # tools whose calls go back as free text, not as arguments
    client_tools: frozenset[str] = frozenset()  # OpenAI's, which the client runs: their calls are items of their own
    namespaces: frozenset[str] = frozenset()  # of tools named `namespace__tool`, whose calls go back in two words
    # Fields that are understood but not applied, each with what is done instead; a header and the turn list them.
    ignored_params: tuple[str, ...] = ()
    media: tuple[str, ...] = ()  # paths of images and the like, of which the model sees a placeholder
    metadata: dict[str, Any] | None = None  # the client's own, recorded with the turn
    deferred_tools: list[dict[str, Any]] = []  # that the model may call, and is told of within the conversation
    output_schema: OutputSchema | None = None
    strict_tools: frozenset[str] = frozenset()  # tools whose arguments are to follow their schema
    # A digest of each message, or of the given prompt, by which it is known again; (): not yet made.
    message_keys: tuple[bytes, ...] = ()
    body_bytes: int = 0  # of the request as it came
    raw: dict[str, Any] | None = None  # a Chat Completions body as it came, for a hosted endpoint; None: not kept
    repaired: bool = False  # text that was not valid Unicode was replaced

    @property
    def all_tools(self) -> list[dict[str, Any]] | None:
        """All tools that the model may call."""
        return [*(self.tools or ()), *self.deferred_tools] or None

    @property
    def digest(self) -> bytes:
        """Under which a request is known again, when it comes with its fields in another order or wants no stream."""
        # Codex (0.166) shuffles fields each time; Claude Code (2.1) asks without a stream once one has broken.
        as_told = {
            "client": "",
            "body_bytes": 0,
            "raw": None,
            "ignored_params": (),
            "stream": False,
            "include_usage": True,
        }
        rest = msgspec.structs.replace(self, messages=[], prompt=None, message_keys=(), **as_told)
        return blake2b(b"".join((*self.message_keys, _encode(rest))), digest_size=16).digest()

    def for_choice(self, choice: int) -> "ChatRequest":
        """The request for one of its replies: under the same seed all would be the same."""
        seed = self.sampling.seed
        if seed is None or not choice:
            return self
        return msgspec.structs.replace(self, sampling=msgspec.structs.replace(self.sampling, seed=seed + choice))

    def with_tools(self, allows: Callable[[str], bool]) -> tuple["ChatRequest", tuple[str, ...]]:
        """The request with the tools that the model may call, and why others are not among them."""
        names = [tool["function"]["name"] for tool in self.all_tools or ()]
        denied = [name for name in names if not allows(name)]
        if not denied and self.tools != []:
            return self, ()
        tools, deferred = (
            [tool for tool in given if tool["function"]["name"] not in denied]
            for given in (self.tools or (), self.deferred_tools)
        )
        offered = msgspec.structs.replace(self, tools=tools or None, deferred_tools=deferred)
        return offered, tuple(f"tools: {name} is denied in this session" for name in denied)

    @property
    def demands(self) -> tuple[str, ...]:
        """The fields that demand something of the reply: a forced call, a JSON schema, strict tools."""
        is_strict = bool(self.strict_tools and self.all_tools and self.tool_choice.mode != "none")
        demands = {
            "tool_choice": self.tool_choice.mode == "required",
            "" if self.output_schema is None else self.output_schema.field: self.output_schema is not None,
            STRICT: is_strict,
        }
        return tuple(field for field, is_demanded in demands.items() if is_demanded)


# Of what, within the same sentence: other titles, asked for in a chat, are a task like any other.
_TITLED = r"(?:session|conversation|thread|chat)"
_TITLE = re.compile(
    rf"\btitle\b[^.]{{0,100}}\b(?:this|the|a)\b[^.]{{0,20}}\b{_TITLED}\b|\b{_TITLED} title\b", re.IGNORECASE
)
_MEMORY = re.compile(
    r"\bmemory (?:extraction|consolidation|dream)\b|\b(?:extract|consolidate)\b[^.]{0,40}\bmemor(?:y|ies)\b",
    re.IGNORECASE,
)
_OPENING = 300  # characters of a system prompt, which say whose it is
_INSTRUCTIONS = 8000  # characters: a title takes fewer words than a task
_PROBES = frozenset({"quota", "test", "Hi", "count", "."})


def auxiliary_reason(request: ChatRequest, task_instructions: str | None) -> str | None:
    """What a side request is for, as its turn says; None: it is part of the task.

    Claude Code (2.1.197) and opencode (1.18.33) ask without tools for a title of the session. Claude Code also asks
    for a single token, to see its quota or whether a key or a model is any good. A request for no token at all warms
    Anthropic's cache. qwen-code (0.15.10) has another agent, with tools and the conversation so far, keep what is worth
    remembering; a session that begins with such instructions (`task_instructions`) has that as its task.
    """
    if request.sampling.max_tokens == 0:
        return "probe"
    instructions = instructions_of(request)
    is_aside = task_instructions is not None and instructions != task_instructions
    if is_aside and _MEMORY.search(instructions[:_OPENING]):
        return "memory extraction"
    if request.tools or any(message["role"] == "assistant" for message in request.messages):
        return None
    if request.sampling.max_tokens == 1 and len(request.messages) == 1 and _text(request, "user").strip() in _PROBES:
        return "probe"
    if len(instructions) < _INSTRUCTIONS and _TITLE.search(instructions):
        return "session title"
    return None


def instructions_of(request: ChatRequest) -> str:
    """The text of a request's system messages."""
    return _text(request, "system") or _text(request, "developer")


def _text(request: ChatRequest, role: str) -> str:
    return "\n".join(content_text(message.get("content")) for message in request.messages if message["role"] == role)


_CHEAP = 100_000  # characters, which are tokenized in some hundredths of a second
_CHARACTERS_A_TOKEN = 4  # of a text that is not looked at closely: at most four times the context is tokenized
_FAR = 2  # times the context: a prompt between the two ends its reply with `length`, as any that leaves no room
_MOST_STOPS = 64  # stop strings: each is looked for at every token
_MOST_BESIDES = 256 * 1024  # bytes of a field that is no part of the prompt: engine and tape are given it each turn
_WINDOWS, _WINDOW = 32, 256  # stretches of the text that are tokenized, and their characters


def check_request_size(ask: ChatRequest, max_messages: int, context: int | None, count: Callable[[str], int]) -> None:
    """Raise BadRequest for too many messages or too much besides, PromptTooLong for a prompt far beyond the context.

    `count` counts the tokens of a text; it is given samples of the request's.
    """
    if len(ask.messages) > max_messages:
        raise BadRequest(f"messages: there are {len(ask.messages):,}, and {max_messages:,} are allowed; send fewer")
    _check_besides(ask)
    if context is None:
        return
    given = len(ask.prompt.ids or ()) if ask.prompt is not None else 0
    if given > _FAR * context:
        raise PromptTooLong(
            f"prompt is too long: {given:,} tokens, and the maximum context length is {context:,}; send less"
        )
    texts = [text for text in _texts(ask) if text]
    characters = sum(map(len, texts))
    if characters <= max(context * _CHARACTERS_A_TOKEN, _CHEAP):
        return
    tokens = _estimate(texts, characters, count)
    if tokens > _FAR * context:
        raise PromptTooLong(
            f"prompt is too long: about {tokens:,} tokens, and the maximum context length is {context:,}; send less"
        )


def _check_besides(ask: ChatRequest) -> None:
    if len(ask.sampling.stop or ()) > _MOST_STOPS:
        count = len(ask.sampling.stop or ())
        raise BadRequest(f"stop strings: there are {count:,}, and {_MOST_STOPS} are allowed; send fewer")
    schema = ask.output_schema
    besides = {"metadata": ask.metadata, "stop strings": ask.sampling.stop, schema.field if schema else "": schema}
    for field, value in besides.items():
        size = len(msgspec.json.encode(value)) if value else 0
        if size > _MOST_BESIDES:
            raise BadRequest(f"{field}: {size:,} bytes, and {_MOST_BESIDES:,} are allowed; send less")


def _texts(ask: ChatRequest) -> Iterator[str]:
    """What of a request becomes part of the prompt."""
    if ask.prompt is not None:
        yield ask.prompt.text or ""
    for message in ask.messages:
        yield content_text(message.get("content"))
        if message["role"] == "assistant":
            yield content_text(message.get("reasoning_content"))
            for call in message.get("tool_calls") or ():
                yield content_text(call["function"].get("arguments"))
    if ask.tools:
        yield msgspec.json.encode(ask.tools).decode()


def _estimate(texts: list[str], characters: int, count: Callable[[str], int]) -> int:
    """Tokens by the rate of windows at random places, so that no text can be written to look short."""
    sampled, tokens = 0, 0
    for text in random.choices(texts, [len(text) for text in texts], k=_WINDOWS):
        start = random.randrange(max(len(text) - _WINDOW, 0) + 1)
        window = text[start : start + _WINDOW]
        sampled += len(window)
        tokens += count(window)
    return round(characters * tokens / sampled)

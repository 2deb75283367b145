"""A request in one form for all APIs, its size limits, and the rules for auxiliary requests."""

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Annotated, Any

import msgspec

from rolltape.errors import BadRequest, PromptTooLong
from rolltape.records.messages import content_text

# A smaller body is processed in about a millisecond. Larger ones are processed off the event loop.
INLINE_BYTES = 64 * 1024

_encode = msgspec.json.Encoder(order="deterministic").encode
_OF_STREAMS = frozenset({"stream", "stream_options"})

_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sampling parameters. None: not set, so the next in line decides (agent, session, gateway)."""

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
        """The parameters that are set."""
        given: dict[str, Any] = msgspec.to_builtins(self)
        return given

    def over(self, other: "SamplingParams") -> "SamplingParams":
        """These parameters, with those of `other` where these are None."""
        given = {name: getattr(self, name) for name in self.__struct_fields__ if getattr(self, name) is not None}
        return msgspec.structs.replace(other, **given)


STRICT = "tools: strict"
# In an assistant's message: the parts that are missing of the reply that its id names. Fields, and indexes of calls.
REFERENCES = "references"


class ToolChoice(msgspec.Struct, frozen=True):
    """Whether the model may call tools: `auto`, `none`, or `required`; with `required` perhaps a certain tool."""

    mode: str = "auto"
    name: str | None = None  # None for any


class OutputSchema(msgspec.Struct, frozen=True):
    """The JSON schema that the text of a reply must follow."""

    field: str  # its name in the request
    schema: dict[str, Any]


class Effort(msgspec.Struct, frozen=True):
    """How much the model should think."""

    field: str  # its name in the request
    word: str  # as in `reasoning_effort` of Chat Completions


class GivenPrompt(msgspec.Struct, frozen=True):
    """A prompt that a client sent as a text or as ids, and that is not rendered from messages."""

    text: str | None = None
    ids: list[int] | None = None
    add_special_tokens: bool = True  # whether the tokenizer adds its special tokens to a text (for some models, BOS)


class TokenDetails(msgspec.Struct, frozen=True):
    """The details of tokens that a client requests."""

    ids: bool = False
    texts: bool = False  # of the tokens of a prompt
    logprobs: bool = False  # of the sampled tokens
    top_logprobs: int = 0  # how many of the most likely tokens for each
    tokens_as_ids: bool = False  # write tokens as `token_id:N` instead of their text


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Messages and tools are in chat form (OpenAI's), for every API.

    A message is `{"role", "content"}` with content a text, a list of text parts, or None, and by role
    `tool_calls` and `reasoning_content` (assistant) or `tool_call_id` (tool). Other parts (such as
    a thinking block's signature) are kept under keys of their own, so that nothing is lost.
    """

    api: str  # the dialect's name
    client: str = ""  # its User-Agent
    model: str
    messages: list[dict[str, Any]]
    after_reply: str | None = None  # the messages follow this reply of the session; None if they are complete
    in_thread: bool = False  # it continues with the tools that `after_reply` had
    has_references: bool = False  # some messages have REFERENCES
    instructed: bool = False  # the first message applies to this reply only
    prompt: GivenPrompt | None = None  # replaces messages, which are then empty
    opens_reply: bool = True  # the prompt ends with the start of a reply; False only for requests of ids
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    sampling: SamplingParams = SamplingParams()
    stop_ids: tuple[int, ...] = ()  # additional stop ids, beside those of the model
    n: int = 1  # number of replies; each is a turn
    token_details: TokenDetails = TokenDetails()
    stream: bool = False
    in_array: bool = False  # a streamed reply is one JSON array, and not events
    include_usage: bool = True  # in a streamed reply
    thinking: bool | None = None  # None if not set, so the gateway's setting applies
    effort: Effort | None = None  # None if not set
    custom_tools: frozenset[str] = frozenset()  # tools whose calls are sent as free text, not as arguments
    client_tools: frozenset[str] = frozenset()  # OpenAI's, run by the client; their calls have their own item types
    endpoint_tools: tuple[str, ...] = ()  # types of tools that only a hosted endpoint may know, and runs itself
    namespaces: frozenset[str] = frozenset()  # of tools named `namespace__tool`, whose calls are sent with both names
    # Fields that are understood but not applied, each with what is done instead; a header and the turn list them.
    ignored_params: tuple[str, ...] = ()
    media: tuple[str, ...] = ()  # JSON paths of images and the like; the model sees placeholders
    metadata: dict[str, Any] | None = None  # the client's own, recorded with the turn
    deferred_tools: list[dict[str, Any]] = []  # the model may call them; the conversation defines them
    output_schema: OutputSchema | None = None
    strict_tools: frozenset[str] = frozenset()  # tools whose arguments must follow their schema
    # A digest of each message, or of the given prompt, for comparisons; () before they are made.
    message_keys: tuple[bytes, ...] = ()
    digest: bytes = b""  # by which a retry is recognized; b"" before it is made
    body_bytes: int = 0  # of the raw request
    raw: dict[str, Any] | None = None  # the unchanged body of Chat Completions, for a hosted endpoint; else None
    repaired: bool = False  # text that was not valid Unicode was replaced

    @property
    def all_tools(self) -> list[dict[str, Any]] | None:
        """All tools that the model may call."""
        return [*(self.tools or ()), *self.deferred_tools] or None

    def with_digest(self) -> "ChatRequest":
        """The request with its digest, which is the same with its fields in another order or without streaming."""
        # Codex (0.166) shuffles fields each time. Claude Code (2.1) retries without a stream after one broke.
        rest = msgspec.structs.replace(self, messages=[], prompt=None, message_keys=(), digest=b"", client="", raw=None)
        rest = msgspec.structs.replace(
            rest, body_bytes=0, ignored_params=(), stream=False, in_array=False, include_usage=True
        )
        # A hosted endpoint gets fields that are known to no one else.
        body = {name: value for name, value in (self.raw or {}).items() if name not in _OF_STREAMS}
        passed_on = _encode(body) if body else b""
        digest = blake2b(b"".join((*self.message_keys, _encode(rest), passed_on)), digest_size=16).digest()
        return msgspec.structs.replace(self, digest=digest)

    def for_choice(self, choice: int) -> "ChatRequest":
        """The request for one of its replies, with a seed of its own: with the same seed all would be equal."""
        seed = self.sampling.seed
        if seed is None or not choice:
            return self
        return msgspec.structs.replace(self, sampling=msgspec.structs.replace(self.sampling, seed=seed + choice))

    def with_tools(self, allows: Callable[[str], bool]) -> tuple["ChatRequest", tuple[str, ...]]:
        """The request with only the tools that the session allows, and a message for each denied tool."""
        names = [*(tool["function"]["name"] for tool in self.all_tools or ()), *self.endpoint_tools]
        denied = [name for name in names if not allows(name)]
        if not denied and self.tools != []:
            return self, ()
        tools, deferred = (
            [tool for tool in given if tool["function"]["name"] not in denied]
            for given in (self.tools or (), self.deferred_tools)
        )
        own = tuple(kind for kind in self.endpoint_tools if kind not in denied)
        offered = msgspec.structs.replace(self, tools=tools or None, deferred_tools=deferred, endpoint_tools=own)
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


# A request for a title of the session, in one sentence. Requests for other titles are ordinary tasks.
_TITLED = r"(?:session|conversation|thread|chat)"
_TITLE = re.compile(
    rf"\btitle\b[^.]{{0,100}}\b(?:this|the|a)\b[^.]{{0,20}}\b{_TITLED}\b|\b{_TITLED} titles?\b", re.IGNORECASE
)
_MEMORY = re.compile(
    r"\bmemory (?:extraction|consolidation|dream)\b|\b(?:extract|consolidate)\b[^.]{0,40}\bmemor(?:y|ies)\b",
    re.IGNORECASE,
)
_OPENING = 300  # characters of a system prompt that identify its purpose
_INSTRUCTIONS = 8000  # characters: instructions for a title are shorter than those of a task
_PROBES = frozenset({"quota", "test", "Hi", "count", "."})


def auxiliary_reason(request: ChatRequest, task_instructions: str | None) -> str | None:
    """The purpose of a side request, which is recorded with its turn, or None if the request is part of the task.

    Claude Code (2.1.197) and opencode (1.18.33) request a title of the session, without tools. Claude Code also
    requests a single token to check its quota, a key or a model. A request for no token warms Anthropic's cache.
    qwen-code (0.15.10) has another agent, with tools and the conversation so far, extract memories; if a session begins
    with such instructions (`task_instructions`), they are its task.
    """
    if request.sampling.max_tokens == 0:
        return "probe"
    instructions = instructions_of(request.messages)
    is_aside = task_instructions is not None and instructions != task_instructions
    if is_aside and _MEMORY.search(instructions[:_OPENING]):
        return "memory extraction"
    if request.tools or any(message["role"] == "assistant" for message in request.messages):
        return None
    if (
        request.sampling.max_tokens == 1
        and len(request.messages) == 1
        and _text(request.messages, "user").strip() in _PROBES
    ):
        return "probe"
    if len(instructions) < _INSTRUCTIONS and _TITLE.search(instructions):
        return "session title"
    return None


def instructions_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of the system messages."""
    return _text(messages, "system") or _text(messages, "developer")


def _text(messages: Sequence[Mapping[str, Any]], role: str) -> str:
    return "\n".join(content_text(message.get("content")) for message in messages if message["role"] == role)


_CHEAP = 100_000  # characters that are tokenized in a few hundredths of a second
_CHARACTERS_A_TOKEN = 4  # up to this many per token of the context, the size is not checked
_FAR = 2  # times the context; a prompt between one and two contexts gets an empty reply with finish `length`
_MOST_STOPS = 64  # stop strings: each is searched at every token
_MOST_BESIDES = 256 * 1024  # bytes of a field outside the prompt, which goes to engine and tape each turn
_WINDOWS, _WINDOW = 32, 256  # number of tokenized windows of the text, and their characters


def check_request_size(
    request: ChatRequest, max_messages: int, context: int | None, count: Callable[[str], int]
) -> None:
    """Raise BadRequest for too many messages or too large other fields, PromptTooLong for a far too long prompt.

    `count` counts the tokens of a text; it gets samples of the request's text.
    """
    if len(request.messages) > max_messages:
        raise BadRequest(f"messages: there are {len(request.messages):,}, and {max_messages:,} are allowed; send fewer")
    _check_besides(request)
    if context is None:
        return
    given = len(request.prompt.ids or ()) if request.prompt is not None else 0
    if given > _FAR * context:
        raise PromptTooLong(
            f"prompt is too long: {given:,} tokens, and the maximum context length is {context:,}; send less"
        )
    texts = [text for text in _texts(request) if text]
    characters = sum(map(len, texts))
    if characters <= max(context * _CHARACTERS_A_TOKEN, _CHEAP):
        return
    tokens = _estimate(texts, characters, count)
    if tokens > _FAR * context:
        raise PromptTooLong(
            f"prompt is too long: about {tokens:,} tokens, and the maximum context length is {context:,}; send less"
        )


def _check_besides(request: ChatRequest) -> None:
    if len(request.sampling.stop or ()) > _MOST_STOPS:
        count = len(request.sampling.stop or ())
        raise BadRequest(f"stop strings: there are {count:,}, and {_MOST_STOPS} are allowed; send fewer")
    schema = request.output_schema
    besides = {
        "metadata": request.metadata,
        "stop strings": request.sampling.stop,
        schema.field if schema else "": schema,
    }
    for field, value in besides.items():
        size = len(msgspec.json.encode(value)) if value else 0
        if size > _MOST_BESIDES:
            raise BadRequest(f"{field}: {size:,} bytes, and {_MOST_BESIDES:,} are allowed; send less")


def _texts(request: ChatRequest) -> Iterator[str]:
    """Yield the texts of a request that become part of the prompt."""
    if request.prompt is not None:
        yield request.prompt.text or ""
    for message in request.messages:
        yield content_text(message.get("content"))
        if message["role"] == "assistant":
            yield content_text(message.get("reasoning_content"))
            for call in message.get("tool_calls") or ():
                yield content_text(call["function"].get("arguments"))
    if request.tools:
        yield msgspec.json.encode(request.tools).decode()


def _estimate(texts: list[str], characters: int, count: Callable[[str], int]) -> int:
    """Estimate the tokens from windows at random places, so that no text can be crafted to look short."""
    sampled, tokens = 0, 0
    for text in random.choices(texts, [len(text) for text in texts], k=_WINDOWS):
        start = random.randrange(max(len(text) - _WINDOW, 0) + 1)
        window = text[start : start + _WINDOW]
        sampled += len(window)
        tokens += count(window)
    return round(characters * tokens / sampled)

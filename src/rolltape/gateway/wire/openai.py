"""The parts that OpenAI's APIs and vLLM's share: sampling, token ids, `tool_choice`, tools, content, errors."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rolltape.errors import BadRequest
from rolltape.gateway.request import ChatRequest, Effort, OutputSchema, SamplingParams, TokenDetails, ToolChoice
from rolltape.gateway.wire.fields import (
    Fields,
    event,
    function_tool,
    key_in,
    media_part,
    parse_arguments,
    printable,
    with_headers,
)
from rolltape.gateway.wire.protocol import NO_HEADERS
from rolltape.records.jsonable import encode_json, shown

if TYPE_CHECKING:
    from rolltape.gateway.turn.gateway_turn import GatewayTurn

_COMMENT = b": keepalive\n\n"  # an SSE comment, which readers ignore
# Fields without effect on the reply: bookkeeping, caching and speed at the provider.
HARMLESS = (
    "user",
    "safety_identifier",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
)
_HARMLESS_BETAS = ("responses", "assistants", "realtime")  # these only name an API
_MOST_CHOICES = 32  # replies to one request
MOST_LIKELY = 20  # tokens beside a sampled one
TEXT_OR_PARTS = "give a text, or a list of text parts"
_MODES = {"auto": "auto", "none": "none", "required": "required", "any": "required"}  # `any`: Mistral's word
_MEDIA = {"image": "image", "video": "video", "audio": "audio", "file": "document"}  # by a word in a part's type
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class OpenAIDialect:
    """What the dialects of OpenAI's APIs have in common: SDK, headers, base URL, errors."""

    sdk = "openai"
    variables = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL")

    def __init__(self, read_request: Callable[[bytes], ChatRequest]) -> None:
        self._read_request = read_request

    def is_meant(self, headers: Mapping[str, str], query: Mapping[str, str]) -> bool:
        return False

    def find_key(self, headers: Mapping[str, str], query: Mapping[str, str]) -> str | None:
        return key_in(headers, "x-api-key")

    def base_url(self, root: str) -> str:
        return f"{root}/v1"

    def read(
        self, body: bytes, headers: Mapping[str, str] = NO_HEADERS, path: Mapping[str, str] = NO_HEADERS
    ) -> ChatRequest:
        return with_headers(self._read_request(body), headers, "OpenAI-Beta", _HARMLESS_BETAS)

    def error(self, status: int, message: str, code: str | None = None, *, final: bool = False) -> bytes:
        return _error_body(status, message, code)


class ChunkStream:
    """What streams of chunks have in common: comments while the engine works, errors, and `[DONE]` at the end."""

    def __init__(self, turn: "GatewayTurn", request: ChatRequest) -> None:
        self._turn = turn
        self._request = request

    def opening(self) -> bytes:
        return _COMMENT

    def reasoning(self, piece: str) -> bytes:
        return b""

    def keepalive(self) -> bytes:
        return _COMMENT

    def error(self, status: int, message: str, code: str | None = None, *, final: bool = False) -> bytes:
        return event(_error_body(status, message, code))

    def _closing(self, chunks: list[bytes], usage: bytes) -> bytes:
        """The last chunks, and the one with the usage if the client wants it."""
        usage_chunks = [usage] if self._request.include_usage else []
        return b"".join(event(data) for data in (*chunks, *usage_chunks, b"[DONE]"))


def read_metadata(body: Fields) -> dict[str, Any] | None:
    """The client's metadata, which is recorded with the turn."""
    if body.maybe_flag("store"):
        body.ignore("store: the turn is on the tape, and cannot be fetched by its id")
    metadata = body.maybe_object("metadata")
    return None if metadata is None else metadata.value


def read_reply_options(body: Fields, params: Fields, *limits: str) -> dict[str, Any]:
    """The fields of a ChatRequest about how many replies there are, how each is sampled, and how they are sent.

    `params` has the sampling parameters. `limits` name the fields for the maximum of tokens; the first one set counts.
    """
    options = body.maybe_object("stream_options")
    return {
        "sampling": _read_sampling(params, limits),
        "stop_ids": tuple(read_ids(params, "stop_token_ids")) if params.get("stop_token_ids") else (),
        "n": params.maybe_whole("n", least=1, most=_MOST_CHOICES) or 1,
        "stream": body.maybe_flag("stream") or False,
        "include_usage": options is not None and options.maybe_flag("include_usage") is True,
    }


def _read_sampling(body: Fields, limits: Sequence[str]) -> SamplingParams:
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else body.maybe_texts("stop")
    most = [body.maybe_whole(name, least=1) for name in limits]
    top_k = body.maybe_whole("top_k", least=-1)
    return SamplingParams(
        temperature=body.maybe_number("temperature", least=0),
        top_p=body.maybe_number("top_p", least=0, most=1),
        top_k=-1 if top_k == 0 else top_k,  # vLLM's clients send 0 for all
        min_p=body.maybe_number("min_p", least=0, most=1),
        seed=body.maybe_whole("seed"),
        max_tokens=next((limit for limit in most if limit is not None), None),
        stop=tuple(one for one in stops if one) if stops else None,
        presence_penalty=body.maybe_number("presence_penalty", least=-2, most=2),
        frequency_penalty=body.maybe_number("frequency_penalty", least=-2, most=2),
        repetition_penalty=body.maybe_number("repetition_penalty", least=0),
    )


def read_token_details(body: Fields, *, logprobs: bool, top_logprobs: int | None) -> TokenDetails:
    """The token details that a client requests; each API requests logprobs in its own form."""
    return TokenDetails(
        ids=body.maybe_flag("return_token_ids") or False,
        logprobs=logprobs,
        top_logprobs=top_logprobs or 0 if logprobs else 0,
        tokens_as_ids=body.maybe_flag("return_tokens_as_token_ids") or False,
    )


def read_ids(body: Fields, name: str) -> list[int]:
    """A list of token ids that must be there."""
    return check_ids(body.maybe_list(name) or body.refuse(name, "give a list of token ids"), body.at(name))


def check_ids(given: list[Any], path: str) -> list[int]:
    """The same list; raises BadRequest if a value is not an integer."""
    wrong = next((at for at, one in enumerate(given) if type(one) is not int), None)
    if wrong is not None:
        raise BadRequest(f"{path}[{wrong}] is {shown(given[wrong])}; give token ids")
    return given


def read_effort(fields: Fields, name: str) -> tuple[bool | None, Effort | None]:
    """Whether to think at all, and how much."""
    word = fields.maybe_text(name)
    return (None, None) if word is None else (word != "none", Effort(fields.at(name), word))


def read_tool_choice(body: Fields, offered: Collection[str]) -> ToolChoice:
    """Whether the model may call tools. Chat Completions wraps each name once more than Responses does."""
    if body.get("tool_choice") is None:
        return ToolChoice()
    if isinstance(body.get("tool_choice"), str):
        return ToolChoice(_MODES[body.maybe_one_of("tool_choice", *_MODES) or "auto"])
    choice = body.object("tool_choice")
    kind = choice.text("type")
    if kind in ("function", "custom"):
        return ToolChoice("required", _named(choice, offered))
    if kind == "allowed_tools":
        return _allowed(choice.maybe_object(kind) or choice, offered)
    if kind in offered:
        return ToolChoice("required", kind)  # a tool that OpenAI defines and the client runs
    choice.ignore(f"tool_choice: '{printable(kind)}' is not offered here; auto")
    return ToolChoice()


def _allowed(choice: Fields, offered: Collection[str]) -> ToolChoice:
    mode = _MODES[choice.maybe_one_of("mode", *_MODES) or "auto"]
    tools = choice.objects("tools")
    kinds = [tool.text("type") for tool in tools]
    own = [kind for kind in kinds if kind not in ("function", "custom") and kind in offered]
    names = own + [_named(tool, offered) for tool in tools if tool.text("type") in ("function", "custom")]
    if mode == "required" and len(names) == len(tools) == 1:
        return ToolChoice(mode, names[0])
    if not set(names) >= set(offered):
        # The tool list is part of the prompt: another list for a single turn would break the prefix.
        choice.ignore(f"{choice.at('tools')}: all tools stay offered")
    return ToolChoice(mode)


def _named(tool: Fields, offered: Collection[str]) -> str:
    inner = tool.maybe_object(tool.text("type")) or tool
    name = inner.name()
    if name not in offered:
        raise BadRequest(f"{inner.at('name')} is {name!r}, which is not among the tools; name one that is offered")
    return name


class ToolOffer:
    """The tools offered to the model, all as functions."""

    def __init__(self) -> None:
        self.tools: list[dict[str, Any]] = []
        self.custom_tools: set[str] = set()
        self.namespaces: set[str] = set()
        self.strict: set[str] = set()
        self.client_tools: set[str] = set()
        self.endpoint_tools: list[str] = []

    @property
    def names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.tools]

    def add_function(self, function: Fields, tool: dict[str, Any]) -> None:
        """Offer a tool whose definition is `function`."""
        function.name()
        function.maybe_text("description")
        function.maybe_object("parameters")
        if function.maybe_flag("strict"):
            self.strict.add(tool["function"]["name"])
        self.tools.append(tool)

    def add_custom(self, tool: Fields, name: str) -> None:
        """Offer a custom tool, which takes free text. The model sees a function with the one argument `input`."""
        text: dict[str, Any] = {"type": "string"}
        form = tool.maybe_object("format")
        if form is not None and form.text("type") == "grammar":
            grammar = form.maybe_object("grammar") or form
            text["description"] = f"Follows this {grammar.text('syntax')} grammar:\n{grammar.text('definition')}"
            tool.ignore(f"tools: the grammar of '{printable(name)}' is shown to the model and not enforced")
        parameters = {"type": "object", "properties": {"input": text}, "required": ["input"]}
        self.tools.append(function_tool(name, tool.maybe_text("description"), parameters))
        self.custom_tools.add(name)


def read_output_schema(holder: Fields, name: str) -> OutputSchema | None:
    """The schema that the reply must follow. Chat Completions wraps it once more than Responses does."""
    form = holder.maybe_object(name)
    kind = "text" if form is None else form.text("type")
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return OutputSchema(holder.at(name), {"type": "object"})
    if kind == "json_schema":
        schema = (form.maybe_object(kind) or form).maybe_object("schema")
        return OutputSchema(holder.at(name), {"type": "object"} if schema is None else schema.value)
    holder.ignore(f"{holder.at(name)}: '{printable(kind)}' is not known here; the reply is free")
    return None


def custom_call_arguments(text: str) -> str:
    """The arguments of the function call that stands for a custom tool's call."""
    return json.dumps({"input": text}, ensure_ascii=False)


def custom_call_input(arguments: str) -> str | None:
    """The free text of a call, or None if the arguments are not just `input`; those are sent unchanged."""
    value = parse_arguments(arguments)
    text = value["input"] if value is not None and value.keys() == {"input"} else None
    return text if isinstance(text, str) else None


def read_content(holder: Fields, name: str, *text_kinds: str) -> str | list[dict[str, Any]] | None:
    """A text, or text parts in chat form; other fields of a part are kept. Refusals and media become text."""
    content = holder.maybe_content(name, TEXT_OR_PARTS)
    return [_part(part, text_kinds) for part in content] if isinstance(content, list) else content


def _part(part: Fields, text_kinds: tuple[str, ...]) -> dict[str, Any]:
    kind = part.text("type")
    if kind == "refusal":
        text = part.text("refusal")
    elif kind in text_kinds:
        text = part.text("text")
    elif medium := next((name for word, name in _MEDIA.items() if word in kind), None):
        return media_part(part, medium)
    else:
        part.refuse("type", f"known are {', '.join(text_kinds)}, refusal, and images, videos, audio and files")
    part.skip("logprobs")  # which Responses gives beside a text
    if not part.value.get("annotations"):
        part.skip("annotations")
    return {"type": "text", "text": text} | {name: part.value[name] for name in part.unread()}


def _error_body(status: int, message: str, code: str | None) -> bytes:
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return encode_json({"error": {"message": message, "type": kind, "param": None, "code": code}}, "an error")[0]

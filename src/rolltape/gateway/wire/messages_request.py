"""Parse a request of the Messages API."""

from typing import Any

from rolltape.errors import BadRequest
from rolltape.gateway.exchange import Api, Ask, SamplingParams, ToolChoice
from rolltape.gateway.wire.fields import Fields, read_body
from rolltape.gateway.wire.messages_history import conversation

# Fields about billing, placing and caching, which change nothing in a reply.
_WITHOUT_EFFECT = (
    "betas",
    "cache_control",
    "diagnostics",
    "fallback_credit_token",
    "fallbacks",
    "inference_geo",
    "metadata",
    "service_tier",
    "speed",
    "user_profile_id",
    "workspace_id",
)
# Fields of tools that would; what else a tool may carry (cache marks, how to stream) would not.
_IGNORED_TOOL_PARAMS = {
    "type": "only custom ones are offered, not those of types that Anthropic defines",
    "allowed_callers": "allowed_callers is not honored; the model calls them directly",
    "defer_loading": "defer_loading is not honored; they are offered from the start",
    "input_examples": "input_examples are not shown to the model",
    "strict": "strict is not honored; arguments are not held to the schema",
}
_MODES = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


def read_request(body: bytes) -> Ask:
    """A request for a reply."""
    fields, repaired = read_body(body)
    if fields.maybe_whole("max_tokens", least=1) is None:
        fields.refuse("max_tokens", "say how many tokens the reply may have at most")
    ask = _ask(fields, repaired)
    if ask.messages[-1]["role"] == "assistant":
        where = f"messages[{len(fields.value['messages']) - 1}]"
        raise BadRequest(f"{where} is the assistant's: a reply cannot be begun for the model; end with a user message")
    return ask


def read_counting(body: bytes) -> Ask:
    """A request for the number of tokens of a prompt."""
    return _ask(*read_body(body))


def _ask(fields: Fields, repaired: bool) -> Ask:
    if fields.get("thread") is not None:
        fields.refuse("thread", "conversations are not kept here; send all of it in messages")
    ignored_params: list[str] = []
    tools = _tools(fields, ignored_params)
    choice = fields.maybe_object("tool_choice")
    model, messages, sampling = fields.name("model"), conversation(fields), _sampling(fields)
    thinking, output_schema = _thinking(fields, ignored_params), _output_schema(fields, ignored_params)
    stream = bool(fields.maybe_flag("stream"))
    _context_management(fields, ignored_params)
    fields.skip(*_WITHOUT_EFFECT)
    ignored_params += fields.ignored()
    return Ask(
        api=Api.MESSAGES,
        model=model,
        messages=messages,
        tools=tools or None,
        tool_choice=ToolChoice() if choice is None else _tool_choice(choice, tools),
        parallel_tool_calls=choice is None or not choice.maybe_flag("disable_parallel_tool_use"),
        sampling=sampling,
        stream=stream,
        thinking=thinking,
        ignored_params=tuple(ignored_params),
        output_schema=output_schema,
        repaired=repaired,
    )


def _sampling(fields: Fields) -> SamplingParams:
    stops = fields.maybe_texts("stop_sequences")
    if stops and "" in stops:
        fields.refuse("stop_sequences", "give texts that are not empty")
    return SamplingParams(
        temperature=fields.maybe_number("temperature", least=0),
        top_p=fields.maybe_number("top_p", least=0, most=1),
        top_k=fields.maybe_whole("top_k", least=0) or None,  # 0: all
        max_tokens=fields.maybe_whole("max_tokens", least=1),
        stop=tuple(stops) if stops else None,
    )


def _tools(fields: Fields, ignored_params: list[str]) -> list[dict[str, Any]]:
    """The tools that the client itself defines, as functions. Those that Anthropic defines are not offered."""
    tools: dict[str, dict[str, Any]] = {}
    extras: set[str] = set()
    for tool in fields.maybe_objects("tools") or ():
        kind = tool.maybe_text("type") or "custom"
        if kind != "custom":
            extras.add("type")
            continue
        name, description = tool.name(), tool.maybe_text("description")
        if name in tools:
            tool.refuse("name", "there is another tool of that name; give each its own")
        function = {"name": name, "description": description, "parameters": tool.object("input_schema").value}
        tools[name] = {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}
        extras |= {extra for extra in tool.unread() if tool.value[extra] is not False}
    ignored_params += [f"tools: {instead}" for extra, instead in _IGNORED_TOOL_PARAMS.items() if extra in extras]
    return list(tools.values())


def _tool_choice(choice: Fields, tools: list[dict[str, Any]]) -> ToolChoice:
    kind = choice.maybe_one_of("type", *_MODES) or choice.refuse("type", f"give one of {', '.join(_MODES)}")
    name = choice.name() if kind == "tool" else None
    names = [tool["function"]["name"] for tool in tools]
    if name is not None and name not in names:
        choice.refuse("name", f"offered are {', '.join(names) or 'no tools'}")
    if _MODES[kind] == "required" and not names:
        choice.refuse("type", "no tools are offered; give some, or leave it out")
    return ToolChoice(_MODES[kind], name)


def _thinking(fields: Fields, ignored_params: list[str]) -> bool | None:
    thinking = fields.maybe_object("thinking")
    if thinking is None:
        return None
    kinds = ("enabled", "adaptive", "between_tools", "disabled")
    kind = thinking.maybe_one_of("type", *kinds) or thinking.refuse("type", f"give one of {', '.join(kinds)}")
    if kind == "between_tools":
        ignored_params.append("thinking.type: the model may think at any time")
    if thinking.maybe_whole("budget_tokens", least=0) is not None:
        ignored_params.append("thinking.budget_tokens: thinking is limited by max_tokens alone")
    if thinking.maybe_text("display") is not None:
        ignored_params.append("thinking.display: thinking is shown in full")
    return kind != "disabled"


def _output_schema(fields: Fields, ignored_params: list[str]) -> bool:
    """Whether the reply is to follow a schema; nothing here makes it do so."""
    config = fields.maybe_object("output_config")
    asked = {"output_format": fields.maybe_object("output_format")}
    if config is not None:
        asked["output_config.format"] = config.maybe_object("format")
        if config.maybe_text("effort") is not None:
            ignored_params.append("output_config.effort: the model is not told")
        ignored_params += config.ignored()
    given = [path for path, value in asked.items() if value is not None]
    ignored_params += [f"{path}: the reply is not held to the schema" for path in given]
    return bool(given)


def _context_management(fields: Fields, ignored_params: list[str]) -> None:
    """Edits that Anthropic's server would make in the history. Claude Code sends one that keeps all thinking."""
    management = fields.maybe_object("context_management")
    edits = [] if management is None else management.maybe_objects("edits") or []
    if any(edit.get("keep") != "all" for edit in edits):
        ignored_params.append("context_management.edits: the history is read as it is sent")

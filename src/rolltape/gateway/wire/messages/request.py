"""Parse a request of the Messages API, and convert its conversation to chat form.

Cache marks are left out. They are for Anthropic's own cache and move each turn, so every message would be stored
once with a mark and once without.
"""

from collections.abc import Callable
from typing import Any

from rolltape.errors import BadRequest, ThreadUnsupported
from rolltape.gateway.request import ChatRequest, Effort, OutputSchema, SamplingParams, ToolChoice
from rolltape.gateway.wire.fields import (
    Fields,
    assistant_message,
    function_tool,
    kept_medium,
    media_part,
    plain_content,
    printable,
    read_body,
    user_messages,
)
from rolltape.gateway.wire.messages.tools import function_of
from rolltape.records.jsonable import encode_json
from rolltape.records.messages import content_text

MESSAGE_PREFIX = "msg_"  # before the id of a reply
# Fields about billing, placement and caching, which do not change a reply.
_WITHOUT_EFFECT = (
    "betas",
    "cache_control",
    "diagnostics",
    "fallback_credit_token",
    "fallbacks",
    "inference_geo",
    "service_tier",
    "speed",
    "user_profile_id",
    "workspace_id",
)
# Ignored fields of tools that would change a reply, and what is done instead. Cache marks and streaming would not.
_IGNORED_TOOL_PARAMS = {
    "allowed_callers": "allowed_callers is not honored; the model calls them directly",
    "input_examples": "input_examples are not shown to the model",
}
_MODES = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]]


def read_request(body: bytes) -> ChatRequest:
    """A request for a reply."""
    fields, repaired = read_body(body)
    if fields.maybe_whole("max_tokens", least=0) is None:
        fields.refuse("max_tokens", "say how many tokens the reply may have at most")
    request = _request(fields, repaired)
    if request.messages[-1]["role"] == "assistant":
        where = f"messages[{len(fields.value['messages']) - 1}]"
        raise BadRequest(f"{where} is the assistant's: a reply cannot be begun for the model; end with a user message")
    return request


def read_counting(body: bytes) -> ChatRequest:
    """A request for the number of tokens of a prompt."""
    return _request(*read_body(body))


def _request(fields: Fields, repaired: bool) -> ChatRequest:
    tools, deferred, strict = _tools(fields)
    after_reply = _thread(fields, keeps_tools=not (deferred or strict))
    choice = fields.maybe_object("tool_choice")
    metadata = fields.maybe_object("metadata")
    output_schema, effort = _output_config(fields)
    return ChatRequest(
        api="messages",
        model=fields.name("model"),
        messages=_with_definitions(_conversation(fields), deferred),
        after_reply=after_reply,
        in_thread=after_reply is not None,
        tools=tools or None,
        deferred_tools=deferred,
        tool_choice=ToolChoice()
        if choice is None
        else _tool_choice(choice, tools + deferred if after_reply is None else None),
        parallel_tool_calls=choice is None or not choice.maybe_flag("disable_parallel_tool_use"),
        sampling=_sampling(fields),
        stream=bool(fields.maybe_flag("stream")),
        thinking=_thinking(fields),
        effort=effort,
        output_schema=output_schema,
        media=tuple(fields.media),
        metadata=None if metadata is None else metadata.value,
        strict_tools=strict,
        repaired=repaired,
        ignored_params=_ignored_params(fields),  # last, since it names the unread fields
    )


def _thread(fields: Fields, *, keeps_tools: bool) -> str | None:
    """The reply that a request goes on from in a thread; None: it brings its whole conversation."""
    thread = fields.maybe_object("thread")
    if thread is None:
        return None
    kind = thread.maybe_one_of("type", "create", "continue") or thread.refuse("type", "give create or continue")
    if not keeps_tools:  # the tape has tools as the model was offered them
        raise ThreadUnsupported("thread: tools with strict or defer_loading are not kept; send all of it in messages")
    if kind == "create":
        return None
    for name in ("system", "tools"):
        if fields.get(name) is not None:
            fields.refuse(name, "leave it out: a thread goes on with what it was created with")
    return thread.name("previous_message_id").removeprefix(MESSAGE_PREFIX)


def _sampling(fields: Fields) -> SamplingParams:
    return SamplingParams(
        temperature=fields.maybe_number("temperature", least=0),
        top_p=fields.maybe_number("top_p", least=0, most=1),
        top_k=fields.maybe_whole("top_k", least=0) or None,  # 0: all
        max_tokens=fields.maybe_whole("max_tokens", least=0),  # 0: the prompt alone is to be read, into a cache
        stop=fields.maybe_stops("stop_sequences"),
    )


def _tools(fields: Fields) -> tuple[Tools, Tools, frozenset[str]]:
    """The tools that the client runs, as functions: those to be offered, those whose loading is deferred, and the names
    of those whose arguments must follow their schema."""
    tools: dict[str, dict[str, Any]] = {}
    deferred: set[str] = set()
    strict: set[str] = set()
    extras: set[str] = set()
    for tool in fields.maybe_objects("tools") or ():
        kind = tool.maybe_text("type") or "custom"
        if kind == "custom":
            name = tool.name()
            function = function_tool(name, tool.maybe_text("description"), tool.object("input_schema").value)
        elif (known := function_of(kind, tool.maybe_text("name") or kind)) is not None:
            name, function = known["function"]["name"], known
        else:
            fields.ignore(f"tools: '{printable(kind)}' is not offered here")
            continue
        if name in tools:
            tool.refuse("name", "there is another tool of that name; give each its own")
        tools[name] = function
        if tool.maybe_flag("defer_loading"):
            deferred.add(name)
        if tool.maybe_flag("strict"):
            strict.add(name)
        extras |= {extra for extra in tool.unread() if tool.value[extra] is not False}
    for extra, instead in _IGNORED_TOOL_PARAMS.items():
        if extra in extras:
            fields.ignore(f"tools: {instead}")
    offered = [tool for name, tool in tools.items() if name not in deferred]
    return offered, [tools[name] for name in tools if name in deferred], frozenset(strict)


def _with_definitions(messages: Messages, deferred: Tools) -> Messages:
    """Messages in which each reference to a deferred tool is replaced by its definition."""
    known = {tool["function"]["name"]: tool for tool in deferred}
    for message in messages:
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            if (name := part.get("tool_reference")) is not None:
                tool = known.get(name)
                part["text"] = encode_json(tool, name)[0].decode() if tool else f"{name} is available."
    return messages


def _tool_choice(choice: Fields, tools: Tools | None) -> ToolChoice:
    """Whether the model may call tools; None: they are those of the thread."""
    kind = choice.maybe_one_of("type", *_MODES) or choice.refuse("type", f"give one of {', '.join(_MODES)}")
    name = choice.name() if kind == "tool" else None
    if tools is None:
        return ToolChoice(_MODES[kind], name)
    names = [tool["function"]["name"] for tool in tools]
    if name is not None and name not in names:
        choice.refuse("name", f"offered are {', '.join(names) or 'no tools'}")
    if _MODES[kind] == "required" and not names:
        choice.refuse("type", "no tools are offered; give some, or leave it out")
    return ToolChoice(_MODES[kind], name)


def _thinking(fields: Fields) -> bool | None:
    thinking = fields.maybe_object("thinking")
    if thinking is None:
        return None
    kinds = ("enabled", "adaptive", "between_tools", "disabled")
    kind = thinking.maybe_one_of("type", *kinds) or thinking.refuse("type", f"give one of {', '.join(kinds)}")
    if kind == "between_tools":
        fields.ignore("thinking.type: the model may think at any time")
    if thinking.maybe_whole("budget_tokens", least=0) is not None:
        fields.ignore("thinking.budget_tokens: thinking is limited only by max_tokens")
    if thinking.maybe_text("display") is not None:
        fields.ignore("thinking.display: thinking is shown in full")
    return kind != "disabled"


def _output_config(fields: Fields) -> tuple[OutputSchema | None, Effort | None]:
    """The schema that the reply must follow, under its older or its newer name; and how much to think."""
    config = fields.maybe_object("output_config")
    forms = {"output_format": fields.maybe_object("output_format")}
    word: str | None = None
    if config is not None:
        forms["output_config.format"] = config.maybe_object("format")
        word = config.maybe_text("effort")
        config.ignore_unread()
    given = ((path, form.maybe_object("schema")) for path, form in forms.items() if form is not None)
    found = next((OutputSchema(path, schema.value) for path, schema in given if schema is not None), None)
    return found, None if word is None else Effort("output_config.effort", word)


def _ignored_params(fields: Fields) -> tuple[str, ...]:
    # Edits of the history by Anthropic's server; Claude Code sends one that keeps all thinking, and so has no effect.
    management = fields.maybe_object("context_management")
    edits = [] if management is None else management.maybe_objects("edits") or []
    if any(edit.get("keep") != "all" for edit in edits):
        fields.ignore("context_management.edits: the history is read as it is sent")
    return fields.all_ignored(*_WITHOUT_EFFECT)


def _conversation(request: Fields) -> Messages:
    """`system` as a first message, and `messages`."""
    read: Messages = []
    if request.get("system") is not None:
        read.append({"role": "system", "content": _texts(request, "system")})
    given = request.objects("messages")
    if not given:
        request.refuse("messages", "give at least one message")
    for message in given:
        role = message.maybe_one_of("role", *_READERS) or message.refuse("role", "give user, assistant or system")
        read += _READERS[role](message)
    return read


def _system(message: Fields) -> Messages:
    return [{"role": "system", "content": _texts(message, "content")}]


def _user(message: Fields) -> Messages:
    content = _content(message, "content")
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    return user_messages(content, _tool_result, _text_part) or [{"role": "user", "content": []}]


def _assistant(message: Fields) -> Messages:
    """One message. Text, thinking and calls each keep their order; chat form has no order between them."""
    content = _content(message, "content")
    if isinstance(content, str):
        return [{"role": "assistant", "content": content}]
    texts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thinking: list[str] = []
    signatures: list[str] = []
    redacted: list[str] = []
    for block in content:
        match block.get("type"):
            case "thinking":
                thinking.append(block.text("thinking"))
                signatures.append(block.maybe_text("signature") or "")
            case "redacted_thinking":
                redacted.append(block.text("data"))
                block.ignore("messages: redacted_thinking cannot be read; it is not shown to the model")
            case "tool_use":
                calls.append(_tool_call(block))
            case _:
                texts.append(_text_part(block))
    reasoning = "\n\n".join(filter(None, thinking))
    text = plain_content(texts)
    return [assistant_message(text, reasoning, signatures, redacted_thinking=redacted, tool_calls=calls)]


_READERS: dict[str, Callable[[Fields], Messages]] = {"user": _user, "assistant": _assistant, "system": _system}


def _tool_call(block: Fields) -> dict[str, Any]:
    given = block.get("input")
    if given is None and "input" not in block.value:  # a null is the echo of arguments that were null
        block.refuse("input", "give an object")
    # A text is the echo of arguments that were not JSON.
    arguments = given if isinstance(given, str) else encode_json(given, block.at("input"))[0].decode()
    return {"id": block.name("id"), "type": "function", "function": {"name": block.name(), "arguments": arguments}}


def _tool_result(block: Fields) -> dict[str, Any] | None:
    if block.get("type") != "tool_result":
        return None
    # The result of a tool that returned nothing may have no content.
    content = "" if block.get("content") is None else _texts(block, "content")
    message = {"role": "tool", "tool_call_id": block.name("tool_use_id"), "content": content}
    return message | {"is_error": True} if block.maybe_flag("is_error") else message


def _texts(fields: Fields, name: str) -> str | list[dict[str, Any]]:
    """A text, or text parts."""
    content = _content(fields, name)
    return content if isinstance(content, str) else [_text_part(block) for block in content]


def _content(fields: Fields, name: str) -> str | list[Fields]:
    wanted = "give a text or a list of blocks"
    content = fields.maybe_content(name, wanted)
    return fields.refuse(name, wanted) if content is None else content


def _text_part(block: Fields) -> dict[str, Any]:
    match block.name("type"):
        case "text":
            block.text("text")
            if block.value.get("tool_reference") is not None:
                block.refuse("tool_reference", "leave it out: a text has no such field")
            return {key: value for key, value in block.value.items() if value is not None and key != "cache_control"}
        case "document":
            return _document(block)
        case "search_result":
            return _search_result(block)
        case "image":
            return media_part(block, "image")
        case "tool_reference":
            return {"type": "text", "text": "", "tool_reference": block.name("tool_name")}
    return block.refuse("type", "blocks of this type are not supported here")


def _search_result(block: Fields) -> dict[str, Any]:
    """A search result as text: its title, its source and its content."""
    _ignore_citations(block, "search results")
    lines = (block.text("title"), block.text("source"), content_text(_texts(block, "content")))
    return {"type": "text", "text": "\n".join(line for line in lines if line), "media": kept_medium(block)}


def _document(block: Fields) -> dict[str, Any]:
    """The text of a text document, or a placeholder for another document."""
    _ignore_citations(block, "documents")
    source = block.object("source")
    match source.get("type"):
        case "text":
            text = source.text("data")
        case "content":
            text = content_text(_texts(source, "content"))
        case _:
            return media_part(block, "document")
    if block.maybe_text("title") or block.maybe_text("context"):
        block.ignore("messages: the title and the context of a document are not shown to the model")
    return {"type": "text", "text": text, "media": kept_medium(block)}


def _ignore_citations(block: Fields, kinds: str) -> None:
    citations = block.maybe_object("citations")
    if citations is not None and citations.maybe_flag("enabled"):
        block.ignore(f"messages: citations of {kinds} are not given")

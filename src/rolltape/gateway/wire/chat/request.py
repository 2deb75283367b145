"""Parse a Chat Completions request. Messages are checked, and kept unchanged if possible."""

from typing import Any

from rolltape.errors import BadRequest
from rolltape.gateway.request import ChatRequest, Effort
from rolltape.gateway.wire.fields import Fields, printable, read_body
from rolltape.gateway.wire.openai import (
    HARMLESS,
    MOST_LIKELY,
    TEXT_OR_PARTS,
    ToolOffer,
    custom_call_arguments,
    read_content,
    read_effort,
    read_metadata,
    read_output_schema,
    read_reply_options,
    read_token_details,
    read_tool_choice,
)
from rolltape.records.jsonable import encode_json

_PLAIN_ROLES = ("system", "developer", "user", "assistant")
_ROLES = (*_PLAIN_ROLES, "tool")


def read_request(raw: bytes) -> ChatRequest:
    """The body of a request; raises BadRequest."""
    body, repaired = read_body(raw)
    _refuse_unservable(body)
    messages = _messages(body)
    offer = _tools(body)
    choice = read_tool_choice(body, offer.names)
    thinking, effort = _thinking(body)
    output_schema = read_output_schema(body, "response_format")
    return ChatRequest(
        api="chat",
        model=body.name("model"),
        messages=messages,
        tools=offer.tools or None,
        tool_choice=choice,
        parallel_tool_calls=body.maybe_flag("parallel_tool_calls") is not False,
        **read_reply_options(body, body, "max_completion_tokens", "max_tokens"),
        token_details=read_token_details(
            body,
            logprobs=body.maybe_flag("logprobs") or False,
            top_logprobs=body.maybe_whole("top_logprobs", least=0, most=MOST_LIKELY),
        ),
        thinking=thinking,
        effort=effort,
        custom_tools=frozenset(offer.custom_tools),
        endpoint_tools=tuple(offer.endpoint_tools),
        output_schema=output_schema,
        media=tuple(body.media),
        metadata=read_metadata(body),
        strict_tools=frozenset(offer.strict),
        repaired=repaired,
        raw=body.value,
        ignored_params=_ignored_params(body),  # last, since it names the unread fields
    )


def read_prompt_parts(body: Fields) -> dict[str, Any]:
    """The fields of a ChatRequest from which its prompt is made."""
    return {"messages": _messages(body), "tools": _tools(body).tools or None, "thinking": _thinking(body)[0]}


def _refuse_unservable(body: Fields) -> None:
    for legacy, now in (("functions", "tools"), ("function_call", "tool_choice")):
        if body.get(legacy) is not None:
            raise BadRequest(f"{legacy} was replaced by {now}; send that")
    if body.get("audio") is not None or "audio" in (body.maybe_texts("modalities") or ()):
        raise BadRequest("modalities: audio is not supported; ask for text")


def _tools(body: Fields) -> ToolOffer:
    offer = ToolOffer()
    for tool in body.maybe_objects("tools") or ():
        match tool.text("type"):
            case "function":
                offer.add_function(tool.object("function"), tool.value)
            case "custom":
                custom = tool.object("custom")
                offer.add_custom(custom, custom.name())
            case kind:
                offer.endpoint_tools.append(kind)
                tool.ignore(f"tools: '{printable(kind)}' is not offered here")
    return offer


def _thinking(body: Fields) -> tuple[bool | None, Effort | None]:
    """Whether to think, by the template's own option, else by `thinking`, else by the effort; and how much."""
    thinking, effort = read_effort(body, "reasoning_effort")
    given = body.value.get("thinking")  # of DeepSeek, Kimi and GLM
    kind = given.get("type") if isinstance(given, dict) else None
    if kind in ("enabled", "disabled"):
        thinking = kind == "enabled"
        body.skip("thinking")
    template = body.maybe_object("chat_template_kwargs")
    if template is None:
        return thinking, effort
    outright = template.maybe_flag("enable_thinking")
    template.ignore_unread()
    return thinking if outright is None else outright, effort


def _ignored_params(body: Fields) -> tuple[str, ...]:
    if body.get("top_logprobs") and not body.get("logprobs"):
        body.ignore("top_logprobs: ignored without logprobs")
    if body.get("logit_bias"):
        body.ignore("logit_bias: ignored")
    if body.get("prediction") is not None:
        body.ignore("prediction: ignored")
    return body.all_ignored(*HARMLESS)


def _messages(body: Fields) -> list[dict[str, Any]]:
    """All messages of a body, in chat form."""
    given = body.get("messages")
    if not isinstance(given, list):
        body.refuse("messages", "give a list of objects")
    if not given:
        body.refuse("messages", "give at least one")
    return [
        # Most messages of a long history have only a role and a text.
        message if _is_plain(message) else _message(Fields(message, f"messages[{index}]", body))
        for index, message in enumerate(given)
    ]


def _is_plain(message: object) -> bool:
    return (
        type(message) is dict
        and len(message) == 2
        and type(message.get("content")) is str
        and type(message.get("role")) is str
        and message["role"] in _PLAIN_ROLES
    )


def _message(message: Fields) -> dict[str, Any]:
    """One message in chat form; unknown fields are kept."""
    role = message.text("role")
    if role == "function":
        message.refuse("role", "functions were replaced by tools; send tool_calls and tool messages")
    if role not in _ROLES:
        message.refuse("role", f"known are {', '.join(_ROLES)}")
    read: dict[str, Any] = {"role": role, "content": read_content(message, "content", "text")}
    if role == "assistant":
        read |= _assistant_fields(message)
    elif read["content"] is None:
        message.refuse("content", TEXT_OR_PARTS)
    if role == "tool":
        read["tool_call_id"] = message.text("tool_call_id")
    elif message.value.get("name") is not None:
        message.ignore("messages: a name is not shown to the model")
    return read | {name: message.value[name] for name in message.unread()}


def _assistant_fields(message: Fields) -> dict[str, Any]:
    for name in ("function_call", "audio"):
        if message.get(name) is not None:
            message.refuse(name, "leave it out: it cannot be put into a prompt")
    if message.value.get("refusal"):
        message.ignore("messages: a refusal beside the content is not shown to the model")
    read: dict[str, Any] = {}
    # vLLM's newer servers and some clients use `reasoning`.
    reasoning = message.maybe_text("reasoning_content") or message.maybe_text("reasoning")
    if reasoning is not None:
        read["reasoning_content"] = reasoning
    if calls := message.maybe_objects("tool_calls"):
        read["tool_calls"] = [_call(call) for call in calls]
    return read


def _call(call: Fields) -> dict[str, Any]:
    kind = call.maybe_one_of("type", "function", "custom") or "function"
    if kind == "custom":
        custom = call.object("custom")
        function = {"name": custom.name(), "arguments": custom_call_arguments(custom.text("input"))}
    else:
        given = call.object("function")
        function = {"name": given.name(), "arguments": _arguments(given)}
    return {"id": call.text("id"), "type": "function", "function": function}


def _arguments(function: Fields) -> str:
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        return encode_json(arguments, function.at("arguments"))[0].decode()
    return "" if arguments is None else function.text("arguments")

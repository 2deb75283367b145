"""Parse a Responses request. The input items of one reply are joined to one message again."""

from typing import Any

from rolltape.errors import BadRequest
from rolltape.gateway.request import REFERENCES, ChatRequest, Effort, OutputSchema, SamplingParams, TokenDetails
from rolltape.gateway.wire.fields import Fields, plain_content, printable, read_body
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
    read_tool_choice,
)
from rolltape.gateway.wire.responses.items import ItemId, joined_name, parse_item_id, unsealed
from rolltape.gateway.wire.responses.tools import CALLS, OUTPUTS, as_function, is_run_by_client, read_call, read_output

RESPONSE_PREFIX = "resp_"  # before the id of a reply
_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = ("reasoning.encrypted_content", _LOGPROBS)
_ROLES = ("system", "developer", "user", "assistant")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
# In the order of the items within one reply.
_REASONING, _TEXT, _CALL = range(3)
_OF_A_REPLY = {
    "reasoning": _REASONING,
    "function_call": _CALL,
    "custom_tool_call": _CALL,
    **dict.fromkeys(CALLS, _CALL),
}
_KNOWN = ("message", *_OF_A_REPLY, *_OUTPUTS, *OUTPUTS)


def read_request(raw: bytes) -> ChatRequest:
    """The body of a request; raises BadRequest."""
    body, repaired = read_body(raw)
    body.name("model")
    return _request(body, repaired)


def read_counting(raw: bytes) -> ChatRequest:
    """The body of a request for the number of tokens of a prompt."""
    return _request(*read_body(raw))


def _request(body: Fields, repaired: bool) -> ChatRequest:
    _refuse_unservable(body)
    offer = ToolOffer()
    _add_tools(offer, body.maybe_objects("tools") or [])
    choice = read_tool_choice(body, offer.names)
    thinking, effort = _thinking(body)
    after_reply = body.maybe_text("previous_response_id")
    messages = _messages(body)
    output_schema = _output_schema(body)
    return ChatRequest(
        api="responses",
        model=body.maybe_text("model") or "",
        messages=messages,
        after_reply=None if after_reply is None else after_reply.removeprefix(RESPONSE_PREFIX),
        has_references=any(REFERENCES in message for message in messages),
        instructed=bool(body.maybe_text("instructions")),
        tools=offer.tools or None,
        tool_choice=choice,
        parallel_tool_calls=body.maybe_flag("parallel_tool_calls") is not False,
        sampling=SamplingParams(
            temperature=body.maybe_number("temperature", least=0),
            top_p=body.maybe_number("top_p", least=0, most=1),
            max_tokens=body.maybe_whole("max_output_tokens", least=1),
        ),
        token_details=_token_details(body),
        stream=body.maybe_flag("stream") or False,
        thinking=thinking,
        effort=effort,
        custom_tools=frozenset(offer.custom_tools),
        client_tools=frozenset(offer.client_tools),
        namespaces=frozenset(offer.namespaces),
        output_schema=output_schema,
        media=tuple(body.media),
        metadata=read_metadata(body),
        strict_tools=frozenset(offer.strict),
        repaired=repaired,
        ignored_params=_ignored_params(body),  # last, since it names the unread fields
    )


def _token_details(body: Fields) -> TokenDetails:
    wanted = _LOGPROBS in (body.maybe_texts("include") or ())
    likely = body.maybe_whole("top_logprobs", least=0, most=MOST_LIKELY) or 0
    if likely and not wanted:
        body.ignore(f"top_logprobs: ignored without '{_LOGPROBS}' in include")
    return TokenDetails(logprobs=wanted, top_logprobs=likely if wanted else 0)


def _refuse_unservable(body: Fields) -> None:
    for name in ("conversation", "prompt"):
        if body.get(name) is not None:
            body.refuse(name, "it is not stored here; send the whole input")
    if body.maybe_flag("background"):
        body.refuse("background", "nothing is stored here; wait for the reply")


def _messages(body: Fields) -> list[dict[str, Any]]:
    instructions = body.maybe_text("instructions")
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given := body.get("input"), str):
        messages.append({"role": "user", "content": given})
    else:
        messages += _history(body.maybe_objects("input") or [])
    if not messages:
        body.refuse("input", "give a text, or a list of items with at least one")
    return messages


def _add_tools(offer: ToolOffer, tools: list[Fields], namespace: str | None = None) -> None:
    for tool in tools:
        kind = tool.text("type")
        if kind == "function":
            function = tool.value | {"name": joined_name(namespace, tool.name())}
            del function["type"]
            offer.add_function(tool, {"type": "function", "function": function})
        elif kind == "custom":
            offer.add_custom(tool, joined_name(namespace, tool.name()))
        elif kind == "namespace" and namespace is None:
            offer.namespaces.add(tool.name())
            _add_tools(offer, tool.objects("tools"), tool.name())
        elif namespace is None and is_run_by_client(tool) and kind not in offer.names:
            offer.tools.append(as_function(tool))
            offer.client_tools.add(kind)
        else:
            tool.ignore(f"tools: '{printable(kind)}' is not offered here")


def _thinking(body: Fields) -> tuple[bool | None, Effort | None]:
    reasoning = body.maybe_object("reasoning")
    if reasoning is None:
        return None, None
    if (reasoning.maybe_text("summary") or reasoning.maybe_text("generate_summary")) is not None:
        body.ignore("reasoning.summary: the reasoning itself is given")
    found = read_effort(reasoning, "effort")
    reasoning.ignore_unread()
    return found


def _output_schema(body: Fields) -> OutputSchema | None:
    text = body.maybe_object("text")
    if text is None:
        return None
    schema = read_output_schema(text, "format")
    text.ignore_unread()
    return schema


def _ignored_params(body: Fields) -> tuple[str, ...]:
    if body.maybe_one_of("truncation", "auto", "disabled") == "auto":
        body.ignore("truncation: a prompt that is too long ends the reply")
    unknown = [one for one in body.maybe_texts("include") or () if one not in _INCLUDED]
    for one in unknown[:8]:
        body.ignore(f"include '{printable(one)}': not given")
    return body.all_ignored(*HARMLESS, "client_metadata", "stream_options")


def _history(items: list[Fields]) -> list[dict[str, Any]]:
    """The messages of the items, in order."""
    messages: list[dict[str, Any]] = []
    call_ids: dict[str, str] = {}  # of calls, by the ids of their items
    reply: _ReplyItems | None = None
    for item in items:
        kind = item.maybe_text("type") or "message"
        place = _OF_A_REPLY.get(kind)
        if kind == "item_reference":
            place = _referred_place(item)
        if kind == "message" and item.text("role") == "assistant":
            place = _TEXT
        if place is None:
            reply = None
            messages.append(_output(item, call_ids) if kind in OUTPUTS else _other(item, kind))
            continue
        if kind in CALLS and (given := item.maybe_text("id")) is not None:
            call_ids[given] = item.text("call_id")
        item_id = parse_item_id(item.maybe_text("id"))
        of = None if item_id is None else item_id.reply
        if reply is None or not reply.takes(place, of):
            reply = _ReplyItems(of)
            messages.append(reply.message)
        if kind == "item_reference" and item_id is not None:
            reply.refer(item_id, place)
        else:
            reply.add(item, place)
    return messages


def _referred_place(item: Fields) -> int:
    """The place in a reply of an item that is only referred to."""
    if (item_id := parse_item_id(item.maybe_text("id"))) is None:
        raise BadRequest(f"{item.path} refers to an item that no reply here has; send the item itself")
    return {"reasoning_content": _REASONING, "content": _TEXT}.get(str(item_id.part), _CALL)


class _ReplyItems:
    """An assistant's message, built from items."""

    def __init__(self, draft: str | None) -> None:
        self.message: dict[str, Any] = {"role": "assistant", "content": None}
        if draft is not None:
            self.message["id"] = draft
        self._draft = draft
        self._places: list[int] = []

    def takes(self, place: int, draft: str | None) -> bool:
        """Whether an item belongs to this message: by its id, or without one by the order within a reply."""
        if draft is not None and self._draft is not None:
            return draft == self._draft and (place == _CALL or place not in self._places)
        return place > self._places[-1] or place == self._places[-1] != _TEXT

    def refer(self, item_id: ItemId, place: int) -> None:
        """Add an item that is only referred to; the gateway knows its content."""
        self._places.append(place)
        self.message.setdefault(REFERENCES, []).append(item_id.part)

    def add(self, item: Fields, place: int) -> None:
        self._places.append(place)
        if place == _REASONING:
            self._add_reasoning(item)
        elif place == _CALL:
            self.message.setdefault("tool_calls", []).append(_call(item))
        else:
            self.message["content"] = _content(item, "content")
            item.skip("type", "role", "status", "id")
            if self._draft is None and (given := item.maybe_text("id")) is not None:
                self.message["id"] = given
            self.message |= _other_fields(item, "tool_calls", "reasoning_content", "reasoning")

    def _add_reasoning(self, item: Fields) -> None:
        text = _reasoning(item)
        if text is None:
            # Encrypted by another server: the model cannot read it, and it is kept unchanged.
            self.message["encrypted_content"] = item.maybe_text("encrypted_content")
            return
        before = self.message.get("reasoning_content")
        self.message["reasoning_content"] = text if before is None else f"{before}\n{text}"


def _reasoning(item: Fields) -> str | None:
    """A reasoning item's text, in the fullest form that came back, or None if it is encrypted."""
    texts = [part.text("text") for part in item.maybe_objects("content") or ()]
    if texts:
        return "\n".join(texts)
    if (sealed := item.maybe_text("encrypted_content")) is not None and (text := unsealed(sealed)) is not None:
        return text
    summaries = [part.text("text") for part in item.maybe_objects("summary") or ()]
    return None if sealed is not None and not summaries else "\n".join(summaries)


def _call(item: Fields) -> dict[str, Any]:
    if item.text("type") in CALLS:
        return {"id": item.text("call_id"), "type": "function", "function": read_call(item)}
    custom = item.text("type") == "custom_tool_call"
    function = {
        "name": joined_name(item.maybe_text("namespace"), item.name()),
        "arguments": custom_call_arguments(item.text("input")) if custom else item.text("arguments"),
    }
    return {"id": item.text("call_id"), "type": "function", "function": function}


def _output(item: Fields, call_ids: dict[str, str]) -> dict[str, Any]:
    """The message for the output of an OpenAI tool that the client ran."""
    # The output of a local shell has no call_id; its id is that of the call, or of the call's item.
    call_id = item.maybe_text("call_id") or item.text("id")
    message = {"role": "tool", "tool_call_id": call_ids.get(call_id, call_id), "content": read_output(item)}
    item.skip("type", "status", "id")
    if isinstance(item.value.get("output"), list):
        message["output"] = item.value["output"]
    return {name: item.value[name] for name in item.unread()} | message


def _other(item: Fields, kind: str) -> dict[str, Any]:
    if kind in _OUTPUTS:
        item.skip("type", "status")
        message = {"role": "tool", "tool_call_id": item.text("call_id"), "content": _needed_content(item, "output")}
    elif kind == "message":
        item.skip("type", "status")
        if (role := item.text("role")) not in _ROLES:
            item.refuse("role", f"known are {', '.join(_ROLES)}")
        message = {"role": role, "content": _needed_content(item, "content")}
    else:
        item.refuse("type", f"known are {', '.join(_KNOWN)}")
    return message | _other_fields(item, *message)


def _other_fields(item: Fields, *taken: str) -> dict[str, Any]:
    """The unread fields, which are kept. Raises BadRequest for one that has the name of a field of the message."""
    for name in item.unread():
        if name in taken:
            item.refuse(name, "leave it out: an item of this type has no such field")
    return {name: item.value[name] for name in item.unread()}


def _needed_content(item: Fields, name: str) -> str | list[dict[str, Any]]:
    content = _content(item, name)
    return item.refuse(name, TEXT_OR_PARTS) if content is None else content


def _content(item: Fields, name: str) -> str | list[dict[str, Any]] | None:
    content = read_content(item, name, "input_text", "output_text", "text")
    return plain_content(content) if isinstance(content, list) else content

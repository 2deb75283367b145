"""Write a reply as the output items of Responses, and the events that stream them.

The ids of items contain the id of their reply, so that the items of one reply are recognized when they come back.
"""

import base64
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rolltape.gateway.request import ChatRequest
from rolltape.gateway.wire.openai import custom_call_input
from rolltape.gateway.wire.reply_tokens import token_logprobs
from rolltape.gateway.wire.responses.tools import CLIENT_TOOLS, ID_PREFIXES, call_fields
from rolltape.records.messages import content_text
from rolltape.records.turn import Finish

if TYPE_CHECKING:
    from rolltape.gateway.turn.gateway_turn import GatewayTurn

_ITEM_ID = re.compile(rf"(msg|rs|fc|ctc|{'|'.join(ID_PREFIXES)})_rt(\d*)_(\w+)")
_FIELDS = {"rs": "reasoning_content", "msg": "content"}
_SEALED = "rt1."  # before reasoning that is sent as encrypted_content; it is not secret
_BETWEEN = "__"  # between namespace and tool in the name that the model sees


def output_items(turn: "GatewayTurn") -> list[dict[str, Any]]:
    """Reasoning, text and calls, in this order; an empty reply becomes an empty text."""
    message = turn.message
    reasoning, text = message.get("reasoning_content"), content_text(message.get("content"))
    calls = message.get("tool_calls") or []
    items: list[dict[str, Any]] = []
    if reasoning:
        items.append(_reasoning_item(turn, reasoning))
    if text or not (reasoning or calls):
        items.append(_message_item(turn, text, token_logprobs(turn) or []))
    items += [_call_item(turn.request, call, f"rt{index}_{turn.id}") for index, call in enumerate(calls)]
    if turn.finish not in (Finish.STOP, Finish.STOP_STRING) and items[-1]["type"] in ("reasoning", "message"):
        # An incomplete call is delivered as text, so calls are always complete.
        items[-1]["status"] = "incomplete"
    return items


class ItemId(NamedTuple):
    """The facts in the id of an item."""

    reply: str  # the id of the reply that it belongs to
    part: str | int  # which part of the reply it is: a field of the message, or the index of a call


def parse_item_id(item_id: str | None) -> ItemId | None:
    """Parse an item's id; None if the gateway did not make it, or there is none."""
    found = _ITEM_ID.fullmatch(item_id or "")
    return None if found is None else ItemId(found[3], _FIELDS.get(found[1]) or int(found[2] or 0))


def unsealed(encrypted_content: str) -> str | None:
    """The reasoning in an `encrypted_content` of the gateway, or None if another server wrote it."""
    if not encrypted_content.startswith(_SEALED):
        return None
    try:
        return base64.b64decode(encrypted_content.removeprefix(_SEALED), validate=True).decode()
    except ValueError:
        return None


def joined_name(namespace: str | None, name: str) -> str:
    """The name of a tool as the model sees it."""
    return name if namespace is None else f"{namespace}{_BETWEEN}{name}"


def _reasoning_item(turn: "GatewayTurn", reasoning: str) -> dict[str, Any]:
    return {
        "id": f"rs_rt_{turn.id}",
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": reasoning}],
        # For clients that send back only this of a reasoning item.
        "encrypted_content": _SEALED + base64.b64encode(reasoning.encode()).decode(),
        "status": "completed",
    }


def _message_item(turn: "GatewayTurn", text: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """`logprobs` are of all sampled tokens, as in vLLM: those of thinking and calls, too."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    return {"id": f"msg_rt_{turn.id}", "type": "message", "role": "assistant", "status": "completed", "content": [part]}


def _call_item(request: ChatRequest, call: dict[str, Any], suffix: str) -> dict[str, Any]:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    named = {"call_id": call["id"], **_split_name(request, name), "status": "completed"}
    text = custom_call_input(arguments) if name in request.custom_tools else None
    if text is not None:
        return {"id": f"ctc_{suffix}", "type": "custom_tool_call", "input": text, **named}
    fields = call_fields(name, arguments) if name in request.client_tools else None
    if fields is not None:
        return {"id": f"{CLIENT_TOOLS[name].id_prefix}_{suffix}", "call_id": call["id"], "status": "completed"} | fields
    return {"id": f"fc_{suffix}", "type": "function_call", "arguments": arguments, **named}


def _split_name(request: ChatRequest, name: str) -> dict[str, str]:
    for namespace in sorted(request.namespaces, key=len, reverse=True):
        if name.startswith(namespace + _BETWEEN):
            return {"namespace": namespace, "name": name.removeprefix(namespace + _BETWEEN)}
    return {"name": name}


class ResponsesEvent(NamedTuple):
    """An event's name and fields; its number is added when it is sent."""

    name: str
    fields: dict[str, Any]


class ItemStream:
    """The events of a reply's items. Reasoning and text are sent piece by piece, calls in one piece."""

    def __init__(self, turn: "GatewayTurn") -> None:
        self._turn = turn
        self._open: str | None = None  # the type of the open item, or None
        self._reasoning: list[str] = []
        self._index = 0

    def reasoning(self, piece: str) -> Iterator[ResponsesEvent]:
        """More reasoning."""
        item = _reasoning_item(self._turn, "")
        if self._open is None:
            yield from self._opened(item | {"encrypted_content": None})
        self._reasoning.append(piece)
        yield ResponsesEvent("response.reasoning_text.delta", self._at(item) | {"delta": piece})

    def text(self, piece: str) -> Iterator[ResponsesEvent]:
        """More text."""
        item = _message_item(self._turn, "")
        if self._open != "message":
            if self._open is not None:
                yield from self._closed(_reasoning_item(self._turn, "".join(self._reasoning)))
            yield from self._opened(item)
        yield ResponsesEvent("response.output_text.delta", self._at(item) | {"delta": piece, "logprobs": []})

    def closing(self, items: list[dict[str, Any]]) -> Iterator[ResponsesEvent]:
        """The end of the open item, and all further items."""
        if self._open is not None:
            yield from self._closed(items[self._index])
        for item in items[self._index :]:
            if item["type"] == "message":  # the empty text of an empty reply
                yield from self._opened(item)
                yield from self._closed(item)
                continue
            empty, filling = _call_events(item, self._index)
            yield self._added(empty)
            yield from filling
            yield self._done(item)

    def _opened(self, item: dict[str, Any]) -> Iterator[ResponsesEvent]:
        self._open = item["type"]
        yield self._added(item | {"content": []})
        yield ResponsesEvent("response.content_part.added", self._at(item) | {"part": item["content"][0]})

    def _closed(self, item: dict[str, Any]) -> Iterator[ResponsesEvent]:
        """The end of the open item."""
        at, part = self._at(item), item["content"][0]
        if self._open == "reasoning":
            yield ResponsesEvent("response.reasoning_text.done", at | {"text": part["text"]})
        else:
            whole = {"text": part["text"], "logprobs": part["logprobs"]}
            yield ResponsesEvent("response.output_text.done", at | whole)
        yield ResponsesEvent("response.content_part.done", at | {"part": part})
        yield self._done(item)
        self._open = None

    def _at(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": self._index, "content_index": 0}

    def _added(self, empty: dict[str, Any]) -> ResponsesEvent:
        item = empty | {"status": "in_progress"}
        return ResponsesEvent("response.output_item.added", {"output_index": self._index, "item": item})

    def _done(self, item: dict[str, Any]) -> ResponsesEvent:
        self._index += 1
        return ResponsesEvent("response.output_item.done", {"output_index": self._index - 1, "item": item})


# The field that events fill, and its name in the events' names.
_FILLED = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}


def _call_events(item: dict[str, Any], index: int) -> tuple[dict[str, Any], list[ResponsesEvent]]:
    """A call before it is filled, and the events that fill it. The API has no such events for some types of calls."""
    if item["type"] in _FILLED:
        field, name = _FILLED[item["type"]]
        at = {"item_id": item["id"], "output_index": index}
        return item | {field: ""}, [
            ResponsesEvent(f"response.{name}.delta", at | {"delta": item[field]}),
            ResponsesEvent(f"response.{name}.done", at | {field: item[field]}),
        ]
    if item["type"] != "shell_call":
        return item, []
    events = []
    for number, command in enumerate(item["action"]["commands"]):
        at = {"output_index": index, "command_index": number}
        events += [
            ResponsesEvent("response.shell_call_command.added", at | {"command": ""}),
            ResponsesEvent("response.shell_call_command.delta", at | {"delta": command}),
            ResponsesEvent("response.shell_call_command.done", at | {"command": command}),
        ]
    return item | {"action": item["action"] | {"commands": []}}, events

"""Write a reply as the output items of Responses, and the events that stream them.

By their ids the items of one reply are found when they come back.
"""

import base64
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from rolltape.gateway.request import ChatRequest
from rolltape.gateway.wire.openai import custom_call_input
from rolltape.gateway.wire.responses.tools import CLIENT_TOOLS, ID_PREFIXES, call_fields
from rolltape.records.messages import content_text
from rolltape.records.turn import Finish

if TYPE_CHECKING:
    from rolltape.gateway.turn.gateway_turn import GatewayTurn

_ITEM_ID = re.compile(rf"(?:msg|rs|fc|ctc|{'|'.join(ID_PREFIXES)})_rt\d*_(\w+)")
_SEALED = "rt1."  # in front of reasoning that travels as encrypted_content; it is not secret
_BETWEEN = "__"  # a namespace and a tool of it, in the one name that the model sees


def output_items(turn: "GatewayTurn") -> list[dict[str, Any]]:
    """Reasoning, text and calls, in this order; a reply without any of them is an empty text."""
    message = turn.message
    reasoning, text = message.get("reasoning_content"), content_text(message.get("content"))
    calls = message.get("tool_calls") or []
    items: list[dict[str, Any]] = []
    if reasoning:
        items.append(_reasoning_item(turn, reasoning))
    if text or not (reasoning or calls):
        items.append(_message_item(turn, text))
    items += [_call_item(turn.request, call, f"rt{index}_{turn.id}") for index, call in enumerate(calls)]
    if turn.finish not in (Finish.STOP, Finish.STOP_STRING) and items[-1]["type"] in ("reasoning", "message"):
        # A call that was cut off is delivered as text, so calls are always whole.
        items[-1]["status"] = "incomplete"
    return items


def reply_id(item_id: str | None) -> str | None:
    """The id of the reply that an item belongs to; None: it is not ours, or came without its id."""
    found = _ITEM_ID.fullmatch(item_id or "")
    return found[1] if found else None


def unsealed(encrypted_content: str) -> str | None:
    """The reasoning in an `encrypted_content` of ours; None: it is somebody else's."""
    if not encrypted_content.startswith(_SEALED):
        return None
    try:
        return base64.b64decode(encrypted_content.removeprefix(_SEALED), validate=True).decode()
    except ValueError:
        return None


def joined_name(namespace: str | None, name: str) -> str:
    """The one name of a tool under which the model knows it."""
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


def _message_item(turn: "GatewayTurn", text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
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
    """An event's name and fields; its number in the stream is put on when it is sent."""

    name: str
    fields: dict[str, Any]


class ItemStream:
    """The events of a reply's items. Reasoning and text are filled piece by piece, calls come whole."""

    def __init__(self, turn: "GatewayTurn") -> None:
        self._turn = turn
        self._open: str | None = None  # the type of the item that is being filled; None: none is
        self._pieces: list[str] = []  # of it
        self._index = 0

    def reasoning(self, piece: str) -> Iterator[ResponsesEvent]:
        """More reasoning."""
        if self._open is None:
            yield from self._opened(_reasoning_item(self._turn, "") | {"encrypted_content": None})
        yield self._piece("response.reasoning_text.delta", {"delta": piece})

    def text(self, piece: str) -> Iterator[ResponsesEvent]:
        """More text."""
        if self._open != "message":
            yield from self._closed(_reasoning_item)
            yield from self._opened(_message_item(self._turn, ""))
        yield self._piece("response.output_text.delta", {"delta": piece, "logprobs": []})

    def closing(self, items: list[dict[str, Any]]) -> Iterator[ResponsesEvent]:
        """The end of the item that is being filled, and all items that are still to come."""
        if self._open is not None:
            item = items[self._index]
            yield from self._closed(lambda *_: item)
        for item in items[self._index :]:
            at = {"item_id": item["id"], "output_index": self._index}
            empty, filling = _FILLERS[item["type"]](item, at)
            yield self._added(empty)
            yield from filling
            yield self._done(item)

    def _opened(self, item: dict[str, Any]) -> Iterator[ResponsesEvent]:
        self._open = item["type"]
        yield self._added(item | {"content": []})
        yield ResponsesEvent("response.content_part.added", self._at(item["id"]) | {"part": item["content"][0]})

    def _piece(self, name: str, fields: dict[str, Any]) -> ResponsesEvent:
        self._pieces.append(fields["delta"])
        prefix = "rs" if self._open == "reasoning" else "msg"
        return ResponsesEvent(name, self._at(f"{prefix}_rt_{self._turn.id}") | fields)

    def _closed(self, make: Callable[["GatewayTurn", str], dict[str, Any]]) -> Iterator[ResponsesEvent]:
        """The end of the item that is being filled, if there is one."""
        if self._open is None:
            return
        item = make(self._turn, "".join(self._pieces))
        at, part = self._at(item["id"]), item["content"][0]
        if self._open == "reasoning":
            yield ResponsesEvent("response.reasoning_text.done", at | {"text": part["text"]})
        else:
            yield ResponsesEvent("response.output_text.done", at | {"text": part["text"], "logprobs": []})
        yield ResponsesEvent("response.content_part.done", at | {"part": part})
        yield self._done(item)
        self._open, self._pieces = None, []

    def _at(self, item_id: str) -> dict[str, Any]:
        return {"item_id": item_id, "output_index": self._index, "content_index": 0}

    def _added(self, empty: dict[str, Any]) -> ResponsesEvent:
        item = empty | {"status": "in_progress"}
        return ResponsesEvent("response.output_item.added", {"output_index": self._index, "item": item})

    def _done(self, item: dict[str, Any]) -> ResponsesEvent:
        self._index += 1
        return ResponsesEvent("response.output_item.done", {"output_index": self._index - 1, "item": item})


Filler = tuple[dict[str, Any], list[ResponsesEvent]]


def _message(item: dict[str, Any], at: dict[str, Any]) -> Filler:
    """The empty text of a reply that says nothing."""
    part = item["content"][0]
    at = at | {"content_index": 0}
    return item | {"content": []}, [
        ResponsesEvent("response.content_part.added", at | {"part": part}),
        ResponsesEvent("response.output_text.done", at | {"text": part["text"], "logprobs": []}),
        ResponsesEvent("response.content_part.done", at | {"part": part}),
    ]


def _function_call(item: dict[str, Any], at: dict[str, Any]) -> Filler:
    return item | {"arguments": ""}, [
        ResponsesEvent("response.function_call_arguments.delta", at | {"delta": item["arguments"]}),
        ResponsesEvent("response.function_call_arguments.done", at | {"arguments": item["arguments"]}),
    ]


def _custom_tool_call(item: dict[str, Any], at: dict[str, Any]) -> Filler:
    return item | {"input": ""}, [
        ResponsesEvent("response.custom_tool_call_input.delta", at | {"delta": item["input"]}),
        ResponsesEvent("response.custom_tool_call_input.done", at | {"input": item["input"]}),
    ]


def _shell_call(item: dict[str, Any], at: dict[str, Any]) -> Filler:
    commands, events = item["action"]["commands"], []
    for index, command in enumerate(commands):
        place = {"output_index": at["output_index"], "command_index": index}
        events += [
            ResponsesEvent("response.shell_call_command.added", place | {"command": ""}),
            ResponsesEvent("response.shell_call_command.delta", place | {"delta": command}),
            ResponsesEvent("response.shell_call_command.done", place | {"command": command}),
        ]
    return item | {"action": item["action"] | {"commands": []}}, events


def _at_once(item: dict[str, Any], _: dict[str, Any]) -> Filler:
    """An item for which the API has no events of its own."""
    return item, []


_FILLERS = {
    "message": _message,
    "function_call": _function_call,
    "custom_tool_call": _custom_tool_call,
    "shell_call": _shell_call,
    "local_shell_call": _at_once,
    "apply_patch_call": _at_once,
}

"""Write a reply as the output items of Responses, and the events that stream them.

By their ids the items of one reply are found when they come back.
"""

import base64
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from rolltape.gateway.request import ChatRequest, Reply
from rolltape.gateway.wire.openai import custom_call_input
from rolltape.gateway.wire.responses_tools import CLIENT_TOOLS, ID_PREFIXES, call_fields
from rolltape.records.messages import content_text
from rolltape.records.turn import Finish

_ITEM_ID = re.compile(rf"(?:msg|rs|fc|ctc|{'|'.join(ID_PREFIXES)})_rt\d*_(\w+)")
_SEALED = "rt1."  # in front of reasoning that travels as encrypted_content; it is not secret
_BETWEEN = "__"  # a namespace and a tool of it, in the one name that the model sees


def output_items(ask: ChatRequest, reply: Reply) -> list[dict[str, Any]]:
    """Reasoning, text and calls, in this order; a reply without any of them is an empty text."""
    message, draft = reply.message, reply.draft
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    text = content_text(message.get("content"))
    calls = message.get("tool_calls") or []
    items: list[dict[str, Any]] = []
    if reasoning:
        items.append(_reasoning_item(f"rs_rt_{draft.id}", reasoning))
    if text or not (reasoning or calls):
        items.append(_message_item(f"msg_rt_{draft.id}", text))
    items += [_call_item(ask, call, f"rt{index}_{draft.id}") for index, call in enumerate(calls)]
    if reply.finish not in (Finish.STOP, Finish.STOP_STRING) and items[-1]["type"] in ("reasoning", "message"):
        # A call that was cut off is delivered as text, so calls are always whole.
        items[-1]["status"] = "incomplete"
    return items


def draft_id(item_id: str | None) -> str | None:
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


def _reasoning_item(item_id: str, reasoning: str) -> dict[str, Any]:
    return {
        "id": item_id,
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": reasoning}],
        # For clients that send back only this of a reasoning item.
        "encrypted_content": _SEALED + base64.b64encode(reasoning.encode()).decode(),
        "status": "completed",
    }


def _message_item(item_id: str, text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"id": item_id, "type": "message", "role": "assistant", "status": "completed", "content": [part]}


def _call_item(ask: ChatRequest, call: dict[str, Any], suffix: str) -> dict[str, Any]:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    named = {"call_id": call["id"], **_split_name(ask, name), "status": "completed"}
    text = custom_call_input(arguments) if name in ask.custom_tools else None
    if text is not None:
        return {"id": f"ctc_{suffix}", "type": "custom_tool_call", "input": text, **named}
    fields = call_fields(name, arguments) if name in ask.client_tools else None
    if fields is not None:
        return {"id": f"{CLIENT_TOOLS[name].id_prefix}_{suffix}", "call_id": call["id"], "status": "completed"} | fields
    return {"id": f"fc_{suffix}", "type": "function_call", "arguments": arguments, **named}


def _split_name(ask: ChatRequest, name: str) -> dict[str, str]:
    for namespace in sorted(ask.namespaces, key=len, reverse=True):
        if name.startswith(namespace + _BETWEEN):
            return {"namespace": namespace, "name": name.removeprefix(namespace + _BETWEEN)}
    return {"name": name}


class ResponsesEvent(NamedTuple):
    """An event's name and fields; its number in the stream is put on when it is sent."""

    name: str
    fields: dict[str, Any]


def item_events(item: dict[str, Any], index: int) -> Iterator[ResponsesEvent]:
    """All events of one item: it is added empty, filled by one delta, and done."""
    at = {"item_id": item["id"], "output_index": index}
    empty, filling = _FILLERS[item["type"]](item, at)
    yield ResponsesEvent(
        "response.output_item.added", {"output_index": index, "item": empty | {"status": "in_progress"}}
    )
    yield from filling
    yield ResponsesEvent("response.output_item.done", {"output_index": index, "item": item})


Filler = tuple[dict[str, Any], list[ResponsesEvent]]


def _reasoning(item: dict[str, Any], at: dict[str, Any]) -> Filler:
    part = item["content"][0]
    at = at | {"content_index": 0}
    return item | {"content": [], "encrypted_content": None}, [
        ResponsesEvent("response.content_part.added", at | {"part": part | {"text": ""}}),
        ResponsesEvent("response.reasoning_text.delta", at | {"delta": part["text"]}),
        ResponsesEvent("response.reasoning_text.done", at | {"text": part["text"]}),
        ResponsesEvent("response.content_part.done", at | {"part": part}),
    ]


def _message(item: dict[str, Any], at: dict[str, Any]) -> Filler:
    part = item["content"][0]
    at = at | {"content_index": 0}
    return item | {"content": []}, [
        ResponsesEvent("response.content_part.added", at | {"part": part | {"text": ""}}),
        ResponsesEvent("response.output_text.delta", at | {"delta": part["text"], "logprobs": []}),
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
    "reasoning": _reasoning,
    "message": _message,
    "function_call": _function_call,
    "custom_tool_call": _custom_tool_call,
    "shell_call": _shell_call,
    "local_shell_call": _at_once,
    "apply_patch_call": _at_once,
}

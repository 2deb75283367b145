"""Write the events that stream an output item."""

from collections.abc import Iterator
from typing import Any, NamedTuple


class Event(NamedTuple):
    """An event's name and fields; its number in the stream is put on when it is sent."""

    name: str
    fields: dict[str, Any]


def item_events(item: dict[str, Any], index: int) -> Iterator[Event]:
    """All events of one item: it is added empty, filled by one delta, and done."""
    at = {"item_id": item["id"], "output_index": index}
    empty, filling = _FILLERS[item["type"]](item, at)
    yield Event("response.output_item.added", {"output_index": index, "item": empty | {"status": "in_progress"}})
    yield from filling
    yield Event("response.output_item.done", {"output_index": index, "item": item})


Filler = tuple[dict[str, Any], list[Event]]


def _reasoning(item: dict[str, Any], at: dict[str, Any]) -> Filler:
    part = item["content"][0]
    at = at | {"content_index": 0}
    return item | {"content": [], "encrypted_content": None}, [
        Event("response.content_part.added", at | {"part": part | {"text": ""}}),
        Event("response.reasoning_text.delta", at | {"delta": part["text"]}),
        Event("response.reasoning_text.done", at | {"text": part["text"]}),
        Event("response.content_part.done", at | {"part": part}),
    ]


def _message(item: dict[str, Any], at: dict[str, Any]) -> Filler:
    part = item["content"][0]
    at = at | {"content_index": 0}
    return item | {"content": []}, [
        Event("response.content_part.added", at | {"part": part | {"text": ""}}),
        Event("response.output_text.delta", at | {"delta": part["text"], "logprobs": []}),
        Event("response.output_text.done", at | {"text": part["text"], "logprobs": []}),
        Event("response.content_part.done", at | {"part": part}),
    ]


def _function_call(item: dict[str, Any], at: dict[str, Any]) -> Filler:
    return item | {"arguments": ""}, [
        Event("response.function_call_arguments.delta", at | {"delta": item["arguments"]}),
        Event("response.function_call_arguments.done", at | {"arguments": item["arguments"]}),
    ]


def _custom_tool_call(item: dict[str, Any], at: dict[str, Any]) -> Filler:
    return item | {"input": ""}, [
        Event("response.custom_tool_call_input.delta", at | {"delta": item["input"]}),
        Event("response.custom_tool_call_input.done", at | {"input": item["input"]}),
    ]


_FILLERS = {
    "reasoning": _reasoning,
    "message": _message,
    "function_call": _function_call,
    "custom_tool_call": _custom_tool_call,
}

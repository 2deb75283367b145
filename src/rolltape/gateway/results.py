"""Tool results in the order of their calls: templates without ids tell them apart by their place alone."""

from collections.abc import Sequence
from typing import Any


def in_call_order(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with each run of tool results put in the order of the calls before it.

    Claude Code (2.1) sends the results of parallel calls in the order in which they came.
    """
    if sum(message["role"] == "tool" for message in messages) < 2:
        return list(messages)
    ordered: list[dict[str, Any]] = []
    places: dict[str, int] = {}
    run: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            run.append(message)
            continue
        ordered += _sorted(run, places)
        run = []
        ordered.append(message)
        if message["role"] == "assistant":
            places = {call.get("id"): place for place, call in enumerate(message.get("tool_calls") or ())}
    return ordered + _sorted(run, places)


def _sorted(run: list[dict[str, Any]], places: dict[str, int]) -> list[dict[str, Any]]:
    """Results whose call is known in its order; others stay behind the one that they followed."""
    if len(run) < 2:
        return run
    last, keys = -1, []
    for result in run:
        last = places.get(result.get("tool_call_id") or "", last)
        keys.append(last)
    return [result for _, result in sorted(zip(keys, run, strict=True), key=lambda pair: pair[0])]

"""A model's tool call → the message that tells it the result. Whatever goes wrong is a result too."""

import json
from collections.abc import Mapping
from typing import Any

from rolltape.collect.environments.protocol import Message, Tool
from rolltape.collect.threads import called
from rolltape.records.jsonable import shown


async def tool_result(tools: Mapping[str, Tool], call: Mapping[str, Any]) -> Message:
    """Call a tool of these by name, with arguments that nobody else holds."""
    return {"role": "tool", "tool_call_id": call["id"], "content": await _result(tools, call["function"])}


async def _result(tools: Mapping[str, Tool], function: Mapping[str, Any]) -> str:
    tool = tools.get(function["name"])
    if tool is None:
        return f"error: there is no tool {shown(function['name'])}; there are: {', '.join(tools) or 'none'}"
    arguments = _arguments(function["arguments"])
    if arguments is None:
        return f"error: the arguments of {tool.name} are no JSON object: {shown(function['arguments'])}"
    try:
        return str(await called(tool.function, **arguments))
    except Exception as error:  # noqa: BLE001 - a tool may raise anything, and the model is told
        return f"error: {type(error).__name__}: {error}"


def _arguments(text: object) -> dict[str, Any] | None:
    try:
        found = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None

"""Tools of both OpenAI APIs. To the model all are functions: a custom tool takes free text, and so one of `input`."""

import json
from typing import Any

from rolltape.gateway.wire.fields import Fields


def unenforced(function: Fields) -> list[str]:
    """Check a function's definition; what of it cannot be honoured."""
    function.name()
    function.maybe_text("description")
    function.maybe_object("parameters")
    strict = function.maybe_flag("strict")
    return ["tools: strict is not honoured; arguments are not held to the schema"] if strict else []


def offered(tool: Fields, name: str) -> tuple[dict[str, Any], list[str]]:
    """The function for a custom tool's definition, and what of that cannot be honoured."""
    text: dict[str, Any] = {"type": "string"}
    unhonoured = []
    form = tool.maybe_object("format")
    if form is not None and form.text("type") == "grammar":
        grammar = form.maybe_object("grammar") or form
        text["description"] = f"Follows this {grammar.text('syntax')} grammar:\n{grammar.text('definition')}"
        unhonoured.append(f"tools: the grammar of {ascii(name)[:80]} is shown to the model and not enforced")
    function: dict[str, Any] = {"name": name}
    if (description := tool.maybe_text("description")) is not None:
        function["description"] = description
    function["parameters"] = {"type": "object", "properties": {"input": text}, "required": ["input"]}
    return {"type": "function", "function": function}, unhonoured


def arguments_of(text: str) -> str:
    """The arguments of the function's call that stands for a custom tool's call."""
    return json.dumps({"input": text}, ensure_ascii=False)


def input_of(arguments: str) -> str | None:
    """The free text of a call, or None if the model gave anything else than `input`: that goes back as it is."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or value.keys() != {"input"} or not isinstance(value["input"], str):
        return None
    text: str = value["input"]
    return text

"""`tool_choice` of both OpenAI APIs; Chat Completions wraps each name once more than Responses does."""

from collections.abc import Collection

from rolltape.errors import BadRequest
from rolltape.gateway.exchange import ToolChoice
from rolltape.gateway.wire.fields import Fields

_MODES = ("auto", "none", "required")


def read_tool_choice(body: Fields, offered: Collection[str]) -> tuple[ToolChoice, list[str]]:
    """Whether the model may call tools, and what of that cannot be honoured."""
    if body.get("tool_choice") is None:
        return ToolChoice(), []
    if isinstance(body.get("tool_choice"), str):
        return ToolChoice(body.maybe_one_of("tool_choice", *_MODES) or "auto"), []
    choice = body.object("tool_choice")
    kind = choice.text("type")
    if kind in ("function", "custom"):
        return ToolChoice("required", _named(choice, offered)), []
    if kind == "allowed_tools":
        return _allowed(choice.maybe_object(kind) or choice, offered)
    return ToolChoice(), [f"tool_choice: {ascii(kind)[:80]} is not offered here; auto"]


def _allowed(choice: Fields, offered: Collection[str]) -> tuple[ToolChoice, list[str]]:
    mode = choice.maybe_one_of("mode", *_MODES) or "auto"
    tools = choice.objects("tools")
    names = [_named(tool, offered) for tool in tools if tool.text("type") in ("function", "custom")]
    if mode == "required" and len(names) == len(tools) == 1:
        return ToolChoice(mode, names[0]), []
    if set(names) >= set(offered):
        return ToolChoice(mode), []
    # The tool list is part of the prompt: another one for a single turn would break the prefix.
    return ToolChoice(mode), [f"{choice.at('tools')}: all tools stay offered"]


def _named(tool: Fields, offered: Collection[str]) -> str:
    inner = tool.maybe_object(tool.text("type")) or tool
    name = inner.name()
    if name not in offered:
        raise BadRequest(f"{inner.at('name')} is {name!r}, which is not among the tools; name one that is offered")
    return name

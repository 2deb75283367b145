"""Python functions as tools: their JSON schema, and the conversion of arguments to their signature."""

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import msgspec

from rolltape.collect.functions import function_named
from rolltape.errors import TaskError

_PLAIN = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class ToolSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool as a task names it. Missing fields come from the function."""

    function: str  # "python:module:function"
    name: str | None = None
    description: str | None = None


class ToolAnswer(msgspec.Struct, frozen=True):
    """A tool's result that may also end the episode, or give a reward."""

    text: str
    done: bool = False  # the episode ends here
    reward: float = 0.0


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True):
    """A function and its description for a model."""

    name: str
    description: str
    parameters: dict[str, Any]  # a JSON schema
    arguments: type[msgspec.Struct]  # by the signature
    function: Callable[..., Any]

    def convert_arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """A call's arguments in the types of the signature; raises msgspec.ValidationError if they do not fit."""
        converted = msgspec.convert(given, self.arguments, strict=False)
        return {name: getattr(converted, name) for name in self.arguments.__struct_fields__}


def describe_tool(given: str | ToolSpec) -> FunctionTool:
    """Describe a function as a tool; raises TaskError if its signature does not allow it."""
    spec = ToolSpec(function=given) if isinstance(given, str) else given
    function = function_named(spec.function)
    parameters = inspect.signature(function).parameters.values()
    odd = next((one.name for one in parameters if one.kind not in _PLAIN), None)
    if odd is not None:
        raise TaskError(f"{spec.function}: a model cannot give the parameter {odd}; a tool takes named ones only")
    name = spec.name or str(getattr(function, "__name__", "tool"))
    hints = get_type_hints(function, include_extras=True)
    arguments = msgspec.defstruct(
        name,
        [_field(one, hints.get(one.name, Any)) for one in parameters],
        forbid_unknown_fields=True,
        kw_only=True,
    )
    try:
        schema = msgspec.json.schema(arguments)
    except TypeError as error:
        raise TaskError(
            f"{spec.function}: its parameters have no JSON schema: {error}; annotate them plainly"
        ) from None
    definitions = schema["$defs"]
    own = definitions.pop(name)
    parts = {"type": "object", "properties": own["properties"], "required": own["required"]}
    return FunctionTool(
        name=name,
        description=spec.description or inspect.getdoc(function) or name,
        parameters=parts | ({"$defs": definitions} if definitions else {}),
        arguments=arguments,
        function=function,
    )


def _field(parameter: inspect.Parameter, kind: Any) -> tuple[str, Any] | tuple[str, Any, Any]:
    if parameter.default is inspect.Parameter.empty:
        return (parameter.name, kind)
    return (parameter.name, kind, parameter.default)

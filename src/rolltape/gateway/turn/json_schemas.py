"""Check a value against a JSON schema, by the keywords that structured outputs of engines and APIs support."""

from collections.abc import Callable
from typing import Any

_MOST_STEPS = 20_000  # a few lines of schema can ask for an unbounded computation
_LISTS, _STEP = ("type", "enum", "required", "prefixItems"), 64  # keywords with a list, and the entries per step

_TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: _is_number(value) and float(value).is_integer(),
    "number": lambda value: _is_number(value),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
_BOUNDS: dict[str, Callable[[Any, Any], bool]] = {
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "exclusiveMinimum": lambda value, bound: value > bound,
    "exclusiveMaximum": lambda value, bound: value < bound,
}
_SIZES = {"Length": str, "Items": list, "Properties": dict}


def follows_schema(value: Any, schema: Any) -> bool:
    """Whether a value follows a schema. Unknown keywords are ignored, and any value follows an invalid schema.

    Example:

        follows_schema({"n": 1}, {"type": "object", "required": ["n"]})  # True
    """
    try:
        return _ValueCheck(schema).follows(value, schema)
    except (_TooManySteps, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
        return True


class _TooManySteps(Exception):
    """The check of a value took too many steps."""


class _ValueCheck:
    """One check of a value against a schema; `root` has the `$defs` that its references point to."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._steps_left = _MOST_STEPS

    def follows(self, value: Any, schema: Any) -> bool:
        if not isinstance(schema, dict):
            return schema is not False
        listed = sum(len(schema[name]) for name in _LISTS if isinstance(schema.get(name), list))
        self._steps_left -= 1 + listed // _STEP
        if self._steps_left < 0:
            raise _TooManySteps
        if "$ref" in schema and not self.follows(value, self._referred(schema["$ref"])):
            return False
        kinds = schema.get("type")
        known = [kinds] if isinstance(kinds, str) else kinds or ()
        if known and not any(_TYPES[kind](value) for kind in known if kind in _TYPES):
            return False
        if ("enum" in schema and value not in schema["enum"]) or ("const" in schema and value != schema["const"]):
            return False
        return _is_bounded(value, schema) and self._combines(value, schema) and self._holds(value, schema)

    def _referred(self, pointer: str) -> Any:
        """The schema that a local reference (`#/$defs/step`) points to; any value follows another reference."""
        if not pointer.startswith("#"):
            return True
        found = self._root
        for part in pointer.split("/")[1:]:
            found = found.get(part.replace("~1", "/").replace("~0", "~"), True)
        return found

    def _combines(self, value: Any, schema: dict[str, Any]) -> bool:
        if not all(self.follows(value, one) for one in schema.get("allOf", ())):
            return False
        choices = [schema[name] for name in ("anyOf", "oneOf") if schema.get(name)]
        return all(any(self.follows(value, one) for one in choice) for choice in choices)

    def _holds(self, value: Any, schema: dict[str, Any]) -> bool:
        """Whether the entries of a list or an object follow their schemas."""
        if isinstance(value, list):
            first = schema.get("prefixItems", ())
            rest = [schema.get("items", True)] * max(len(value) - len(first), 0)
            return all(self.follows(one, inner) for one, inner in zip(value, [*first, *rest], strict=False))
        if not isinstance(value, dict):
            return True
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        if any(name not in value for name in schema.get("required", ())):
            return False
        return all(self.follows(one, properties.get(name, others)) for name, one in value.items())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_bounded(value: Any, schema: dict[str, Any]) -> bool:
    if _is_number(value):
        return all(within(value, schema[name]) for name, within in _BOUNDS.items() if name in schema)
    for size, kind in _SIZES.items():
        if isinstance(value, kind):
            most = schema.get(f"max{size}")
            return bool(schema.get(f"min{size}", 0) <= len(value) <= (len(value) if most is None else most))
    return True

"""Convert the Gemini API's schemas, a dialect of OpenAPI's, to JSON schemas."""

from typing import Any

_RENAMED = {"defs": "$defs", "ref": "$ref"}
_NAMED_SCHEMAS = frozenset({"properties", "defs", "$defs"})
_COUNTS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})
_LEFT_OUT = frozenset({"nullable", "propertyOrdering"})  # expressed in other ways
_UNSPECIFIED = "TYPE_UNSPECIFIED"


def to_json_schema(schema: object) -> Any:
    """A schema as JSON schema; unknown or malformed parts are kept unchanged.

    Example:

        to_json_schema({"type": "STRING", "nullable": True})  # {"type": ["string", "null"]}
    """
    if not isinstance(schema, dict):
        return schema
    given = {name: value for name, value in schema.items() if value is not None}
    read = {_RENAMED.get(name, name): _read(name, value) for name, value in given.items() if name not in _LEFT_OUT}
    if read.get("type") == _UNSPECIFIED.lower():
        del read["type"]
    if "example" in read:
        read["examples"] = [read.pop("example")]
    order, properties = given.get("propertyOrdering"), read.get("properties")
    if isinstance(order, list) and isinstance(properties, dict):
        first = [name for name in order if isinstance(name, str) and name in properties]
        read["properties"] = {name: properties[name] for name in [*first, *properties]}
    return _or_null(read) if given.get("nullable") is True else read


def _read(name: str, value: Any) -> Any:
    if name == "type" and isinstance(value, str):
        return value.lower()
    if name == "ref" and isinstance(value, str):
        return value.replace("#/defs/", "#/$defs/", 1)
    if name in _COUNTS and isinstance(value, str) and value.isdecimal():
        return int(value)  # Google's JSON writes 64-bit numbers as texts
    if name in _NAMED_SCHEMAS and isinstance(value, dict):
        return {key: to_json_schema(inner) for key, inner in value.items()}
    if name in ("items", "additionalProperties"):
        return to_json_schema(value)
    if name in ("anyOf", "prefixItems") and isinstance(value, list):
        return [to_json_schema(inner) for inner in value]
    return value


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema that also allows null."""
    read = dict(schema)
    if isinstance(read.get("type"), str):
        read["type"] = [read["type"], "null"]
    if isinstance(read.get("enum"), list) and None not in read["enum"]:
        read["enum"] = [*read["enum"], None]
    if isinstance(read.get("anyOf"), list):
        read["anyOf"] = [*read["anyOf"], {"type": "null"}]
    return read

"""JSON schemas as structured outputs use them: what follows one, what does not, and schemas that have no end."""

from typing import Any

import pytest

from rolltape.gateway.turn.json_schemas import follows_schema

TREE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "integer"}, [1, 2.0, -5], [1.5, True, "1", None, float("inf")]),
        ({"type": ["string", "null"]}, ["", None], [0, [], {}]),
        ({"enum": ["a", 1]}, ["a", 1], ["b", None]),
        ({"const": {"a": [1]}}, [{"a": [1]}], [{"a": [2]}]),
        ({"minimum": 1, "exclusiveMaximum": 3}, [1, 2.9, "text"], [0, 3]),
        ({"minLength": 1, "maxLength": 2}, ["a", "ab", 5], ["", "abc"]),
        ({"items": {"type": "number"}, "minItems": 1}, [[1], [1, 2.5]], [[], ["a"], [1, None]]),
        ({"prefixItems": [{"type": "string"}], "items": False}, [[], ["a"]], [[1], ["a", "b"]]),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ["a", None], [1]),
        ({"allOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1, "b": 2}], [{"a": 1}]),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "null"}}}, [None], [0]),
        (TREE, [{"name": "a", "children": [{"name": "b"}]}], [{"name": "a", "children": [{}]}, {"name": "a", "x": 1}]),
        (False, [], [None, {}]),
    ],
)
def test_a_value_follows_a_schema_or_does_not(schema: Any, right: list[Any], wrong: list[Any]) -> None:
    assert [value for value in right if not follows_schema(value, schema)] == []
    assert [value for value in wrong if follows_schema(value, schema)] == []


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$defs": {str(at): {"allOf": [{"$ref": f"#/$defs/{at + 1}"}] * 2} for at in range(60)}, "$ref": "#/$defs/0"},
        {"enum": 5},
        {"type": 7},
        {"required": None},
        {"properties": [1]},
        {"unknown": "keyword", "pattern": "("},
    ],
)
def test_a_schema_that_is_none_or_has_no_end_asks_for_nothing(schema: Any) -> None:
    assert follows_schema({"a": 1}, schema)


class _CountedText(str):
    compared = 0

    def __eq__(self, other: object) -> bool:
        type(self).compared += 1
        return False

    __hash__ = str.__hash__


def test_long_lists_of_a_schema_count_in_how_much_is_computed() -> None:
    schema: Any = {"anyOf": [{"$ref": "#/$defs/a"}] * 2000, "$defs": {"a": {"enum": [str(n) for n in range(2000)]}}}
    assert follows_schema(_CountedText("x"), schema)  # given up
    assert _CountedText.compared < 2_000_000
    assert not follows_schema("x", schema["$defs"]["a"])

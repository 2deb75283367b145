"""What commands print with `--json`, held to the schemas of the reference."""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator
from reference_docs.json_schemas import RECORDS, schema_of


def schemas_of(command: str) -> list[str]:
    """The names of the schemas of a command's lines."""
    return [name for name, (typed, _) in RECORDS.items() if typed.split()[1] == command]


def check_lines(command: str, lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """The name of each line's schema. A line of no schema of the command, or with other fields, fails."""
    return [_schema_of_line(command, line) for line in lines]


def _schema_of_line(command: str, line: Mapping[str, Any]) -> str:
    wrong = {}
    for name in schemas_of(command):
        wrong[name] = [error.message for error in _closed(name).iter_errors(line)]
        if not wrong[name]:
            return name
    raise AssertionError(f"rolltape {command} --json printed a line that no schema allows: {line}: {wrong}")


@cache
def _closed(name: str) -> Draft202012Validator:
    return Draft202012Validator({"additionalProperties": False, **schema_of(name)})

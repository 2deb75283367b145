"""What a command line gave back."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple


class Result(NamedTuple):
    code: int
    out: str
    err: str


Cli = Callable[..., Result]


def rows(result: Result) -> list[dict[str, Any]]:
    """The JSON lines of a result."""
    return [strict_json(line) for line in result.out.splitlines()]


def strict_json(line: str) -> dict[str, Any]:
    """A line of JSON; a literal that is no JSON fails."""

    def refuse(literal: str) -> None:
        raise AssertionError(f"{literal} is no JSON")

    value: dict[str, Any] = json.loads(line, parse_constant=refuse)
    return value

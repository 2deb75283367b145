"""How questions are read and answers are spelled."""

from collections.abc import Mapping
from typing import Any

import msgspec

from rolltape.errors import NoAnswer


def number_in(query: Mapping[str, str], name: str, default: float | None = None) -> float | None:
    """A number in a query; the default where there is none."""
    given = query.get(name)
    if given is None or given == "":
        return default
    try:
        return float(given)
    except ValueError:
        raise NoAnswer(f"{name} is {given[:40]!r}; give a number") from None


def count_in(query: Mapping[str, str], name: str, default: int, most: int) -> int:
    """A whole number in a query, 0 to `most`."""
    given = query.get(name)
    if given is None or given == "":
        return default
    if not (given.isascii() and given.isdecimal() and len(given) < 16):
        raise NoAnswer(f"{name} is {given[:40]!r}; give a whole number, 0 to {most}")
    return min(int(given), most)


def step_in(query: Mapping[str, str]) -> int | None:
    """The step that is asked for; None: all of them."""
    step = number_in(query, "step")
    if step is None:
        return None
    if not step.is_integer():
        raise NoAnswer(f"step is {query['step'][:40]!r}; give a whole number")
    return int(step)


def finite(value: object) -> object:
    """An answer in which each float that JSON lacks is an object that spells it."""
    if isinstance(value, float):
        return value if value - value == 0 else {"$float": _spelled(value)}
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def _spelled(value: float) -> str:
    return "nan" if value != value else "inf" if value > 0 else "-inf"


def plain(record: object) -> Any:
    """A record as an answer has it."""
    return msgspec.to_builtins(record)


def encoded(answer: object) -> bytes:
    """An answer as JSON."""
    return msgspec.json.encode(finite(answer))

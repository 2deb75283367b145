"""Parse the common parts of the page's queries, and encode answers as JSON."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from rolltape.errors import NoAnswer
from rolltape.records.policy import PRESETS, CutPolicy

MOST_ROWS = 500  # of one page of a table
to_plain = msgspec.to_builtins  # a record as plain values


def parse_number(query: Mapping[str, str], name: str) -> float | None:
    given = query.get(name)
    if not given:
        return None
    try:
        return float(given)
    except ValueError:
        raise NoAnswer(f"{name} is {given[:40]!r}; give a number") from None


def parse_count(query: Mapping[str, str], name: str, default: int, most: int) -> int:
    """An integer in a query, from 0 to `most`."""
    given = query.get(name)
    if not given:
        return default
    if not (given.isascii() and given.isdecimal() and len(given) < 16):
        raise NoAnswer(f"{name} is {given[:40]!r}; give a whole number, 0 to {most}")
    return min(int(given), most)


def parse_page(query: Mapping[str, str]) -> slice:
    """The requested rows of a query: `limit` of them from `offset` on."""
    offset = parse_count(query, "offset", 0, 2**31)
    return slice(offset, offset + parse_count(query, "limit", 100, MOST_ROWS))


def parse_sort(sort: str, sorts: Iterable[str]) -> tuple[str, bool]:
    """The column to sort by, and whether the largest come first, which a "-" before the name requests."""
    name = sort.removeprefix("-")
    if name not in sorts:
        raise NoAnswer(
            f"sort is {name[:40]!r}; give one of {', '.join(sorts)}, with a - before it for the largest first"
        )
    return name, sort.startswith("-")


def parse_policy(name: str | None) -> CutPolicy:
    """A preset by its name; `exact` if none is given."""
    name = name or "exact"
    if name not in PRESETS:
        raise NoAnswer(f"policy is {name[:40]!r}; give {', '.join(PRESETS)}")
    return PRESETS[name]


def parse_step(query: Mapping[str, str]) -> int | None:
    """The step in a query, or None for all steps."""
    step = parse_number(query, "step")
    if step is None:
        return None
    if not step.is_integer():
        raise NoAnswer(f"step is {query['step'][:40]!r}; give a whole number")
    return int(step)


def number_or_none(value: float) -> float | None:
    """A number; None instead of NaN."""
    return None if value != value else float(value)


def encode_answer(answer: object) -> bytes:
    """An answer as JSON; a float that JSON lacks becomes {"$float": "nan"}."""
    return msgspec.json.encode(_finite(answer))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else {"$float": str(value)}
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value

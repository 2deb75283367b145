"""The events of a trace → what they come to, per step: of each field the latest counts."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from rolltape.records.rollout import Event, EventKind

Fields = dict[str, Any]


class Statements(NamedTuple):
    """What was said of each step, and at the end."""

    steps: dict[int, Fields]
    final: Fields
    recorded: frozenset[int]  # the steps that the environment itself recorded; others were only amended


def statements_of(events: Iterable[Event]) -> Statements:
    """Read a rollout's events, given in their order."""
    steps: dict[int, Fields] = {}
    final: Fields = {}
    recorded: set[int] = set()
    for event in events:
        if event.kind != EventKind.TRACE:
            continue
        data = dict(event.data)
        index, amends = data.pop("step", None), data.pop("amends", False)
        _revise(final if index is None else steps.setdefault(index, {}), data)
        if index is not None and not amends:
            recorded.add(index)
    return Statements(dict(sorted(steps.items())), final, frozenset(recorded))


def _revise(held: Fields, said: Fields) -> None:
    """Put later fields in the place of earlier ones; what is given again is no longer missing."""
    missing = {name: why for name, why in held.get("unrecorded", {}).items() if name.partition(".")[0] not in said}
    held |= said
    held["unrecorded"] = missing | said.get("unrecorded", {})

"""Who collects which step of which source, and whether they are at it, have come to the end, or have died before."""

from collections.abc import Callable
from typing import Any, NamedTuple

from rolltape.records.rollout import Event

_Order = tuple[int, str, int]


class Part(NamedTuple):
    """What one collection is of."""

    step: int
    source: str | None


class Collectors:
    """The collections that the run tells of. One may be resumed, by another writer or by several."""

    def __init__(self, is_writing: Callable[[str], bool]) -> None:
        """`is_writing` says of a writer whether its process lives."""
        self._is_writing = is_writing
        self._sizes: dict[Part, int] = {}
        self._begun: dict[Part, dict[str, _Order]] = {}  # by writer: the last time
        self._ended: dict[Part, dict[str, _Order]] = {}

    def began(self, event: Event) -> None:
        """Take in that a collection has begun, or goes on."""
        settings: dict[str, Any] = event.data["settings"]
        part = _part(settings)
        self._sizes[part] = settings["group_size"]
        _later(self._begun.setdefault(part, {}), event)

    def ended(self, event: Event) -> None:
        """Take in that a collection has come to its end."""
        _later(self._ended.setdefault(_part(event.data), {}), event)

    def size_of(self, part: Part) -> int | None:
        """How many attempts its groups have; None: there is no such collection."""
        return self._sizes.get(part)

    def is_over(self, part: Part) -> bool:
        """Whether its end is the last that was said of it: but for what still runs nothing more is to be expected."""
        begun, ended = self._begun.get(part, {}), self._ended.get(part, {})
        return bool(ended) and max(ended.values()) > max(begun.values(), default=(0, "", 0))

    def is_step_over(self, step: int, source: str | None) -> bool:
        """Whether a step was collected, of a source or of any, and all such collections have come to their end."""
        parts = self._of(step, source)
        return bool(parts) and all(map(self.is_over, parts))

    def broken_off(self, step: int | None, source: str | None) -> dict[Part, str]:
        """Collections that are waited for while none is at work, with the writer that died before their end.

        Of all steps the last one to begin is waited for: earlier ones were left behind.
        """
        parts = self._of(step, source)
        if any(map(self._at_work, parts)):
            return {}
        if step is None:
            parts = sorted(parts, key=lambda part: max(self._begun[part].values()))[-1:]
        return {part: _last(self._begun[part]) for part in parts if not self.is_over(part)}

    def _of(self, step: int | None, source: str | None) -> list[Part]:
        return [part for part in self._begun if step in (None, part.step) and source in (None, part.source)]

    def _at_work(self, part: Part) -> bool:
        begun, ended = self._begun.get(part, {}), self._ended.get(part, {})
        return any(
            self._is_writing(writer) for writer, order in begun.items() if writer not in ended or ended[writer] < order
        )


def _part(data: dict[str, Any]) -> Part:
    return Part(data["step"], data["source"])


def _later(orders: dict[str, _Order], event: Event) -> None:
    orders[event.writer] = max(event.order, orders.get(event.writer, event.order))


def _last(orders: dict[str, _Order]) -> str:
    return max(orders, key=orders.__getitem__)

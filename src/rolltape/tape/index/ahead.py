"""What other writers have said by clocks ahead of ours: a later word of ours must not look like an earlier one.

Nothing else of what they say is kept. That is all in the past by our clock, so whatever is said now comes after it.
"""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rolltape.errors import TapeError
from rolltape.tape.index.others import OtherJournals
from rolltape.tape.journal.schema import event_crc
from rolltape.tape.shards.reading import ShardSource
from rolltape.tape.stored import About, about_of

_EVENTS = "SELECT sequence, body, crc FROM events WHERE sequence BETWEEN ? AND ? ORDER BY sequence"
_LOOK_BACK = 256  # events: threads of one writer may write theirs in another order than they made them


class WordsAhead:
    """Per rollout, the latest time by somebody's clock that has not come by ours."""

    def __init__(self, others: OtherJournals) -> None:
        self._others = others
        self._next: dict[Path, int] = {}  # the next event to read of each journal
        self._latest_ns: dict[str | None, int] = {}  # None: of the run

    def latest_ns(self, rollout: str | None) -> int:
        """When somebody last spoke of a rollout, or (None) of the run, if that is still to come; else 0."""
        return self._latest_ns.get(rollout, 0)

    def listen(self) -> None:
        """Hear what was written into journals since the last time."""
        now_ns = time.time_ns()
        self._latest_ns = {rollout: at_ns for rollout, at_ns in self._latest_ns.items() if at_ns >= now_ns}
        for path in self._others.paths():
            if path not in self._next:
                self._next[path] = self._first(path, now_ns)
            for sequence, said in self._heads(path, self._next[path]):
                self._next[path] = sequence + 1
                self._hear(said, now_ns)

    def hear_shard(self, source: ShardSource) -> None:
        """Hear what a shard holds."""
        now_ns = time.time_ns()
        if source.manifest.get("latest_ns", now_ns) >= now_ns:
            with contextlib.suppress(TapeError, OSError):
                for stored in source.events():
                    self._hear(stored.about, now_ns)

    def _first(self, path: Path, now_ns: int) -> int:
        """From which event on those of a journal may be ahead: it is written in about the order of time."""
        first = next((last + 1 for (last,) in self._others.asked(path, "SELECT max(sequence) FROM events") if last), 0)
        while first and any(said.at_ns >= now_ns for _, said in self._heads(path, first - _LOOK_BACK, first - 1)):
            first = max(first - _LOOK_BACK, 0)
        return first

    def _heads(self, path: Path, first: int, last: int = 2**62) -> Iterator[tuple[int, About]]:
        for sequence, body, crc in self._others.asked(path, _EVENTS, first, last):
            with contextlib.suppress(msgspec.MsgspecError, TypeError):
                if event_crc(sequence, body) == crc:
                    yield sequence, about_of(body)

    def _hear(self, said: About, now_ns: int) -> None:
        if said.at_ns >= now_ns:
            self._latest_ns[said.rollout] = max(said.at_ns, self._latest_ns.get(said.rollout, 0))

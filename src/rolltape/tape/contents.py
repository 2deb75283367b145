"""All that a run consists of, read from its journals and shards themselves: for sealing, pruning and checking.

A rollout that was taken over has one part per writer; the parts are joined here. A journal holds the part of its own
writer, with counts that include the earlier parts. A shard holds a rollout whole, up to the part of the writer that it
names.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from rolltape.errors import DamagedTapeError
from rolltape.records.rollout import Event, EventKind, Status
from rolltape.tape.index.sources import FoundRollout, RunSources, count_rollout
from rolltape.tape.journal.reading import JournalSource
from rolltape.tape.rundir import Place, RunDirectory
from rolltape.tape.shards.reading import ShardSource
from rolltape.tape.stored import (
    HeldRollout,
    Key,
    Problem,
    StoredEvent,
    StoredSession,
    counts_for,
    decides,
    join_sessions,
    rank_part,
    read_errors,
)

S = TypeVar("S", bound=JournalSource | ShardSource)


class SourceContents(Generic[S]):
    """What one journal or shard holds, read at first use."""

    def __init__(self, source: S) -> None:
        self.source = source
        self._unreadable: list[Problem] = []

    @cached_property
    def events(self) -> list[StoredEvent]:
        """All events, about its own rollouts and others."""
        with self._noting("its events", "their contents, rewards and finishes included"):
            return [stored for _, stored in self.source.numbered_events()]
        return []

    @cached_property
    def rollouts(self) -> dict[Key, HeldRollout]:
        """Its rollouts, or its parts of them."""
        # Events first: a rollout that ends in the meantime then counts as running.
        ends = {(one.about.key, one.writer): one for one in self.events if one.about.kind == EventKind.FINISH}
        held: dict[Key, HeldRollout] = {}
        with self._noting("its rollouts", "those of its rollouts that are not listed"):
            for found in self.source.heads():
                finish = ends.get((found.head.key, found.writer))
                status = None if finish is None else Status(finish.event.data["status"])
                if isinstance(self.source, ShardSource):
                    counts = self.source.counts(found.row)
                else:
                    rollout = FoundRollout(found.row, finish=finish)
                    count_rollout(self.source, rollout)
                    counts = rollout.counts
                held[found.head.key] = HeldRollout(found, status, counts)
        return held

    def load(self, key: Key) -> list[StoredSession]:
        """The sessions of one of its rollouts."""
        found = self.rollouts[key].found
        return self.source.stored(found.row, found.head)

    def problems(self) -> list[Problem]:
        """What could not be read so far."""
        return [*self.source.problems(), *self._unreadable]

    @contextlib.contextmanager
    def _noting(self, what: str, lost: str) -> Iterator[None]:
        try:
            yield
        except read_errors() as error:
            self._unreadable.append(Problem(self.source.where, f"{what} cannot be read: {error}", lost))


AnySource = SourceContents[JournalSource] | SourceContents[ShardSource]


class Listed(NamedTuple):
    """A rollout, and the sources to load it from: its parts, in the order of their epochs."""

    held: HeldRollout
    parts: tuple[AnySource, ...]

    @property
    def alive(self) -> bool:
        """Whether the process of its owner is alive."""
        return self.parts[-1].source.alive

    def load(self) -> list[StoredSession]:
        """All its sessions."""
        return join_sessions(part.load(self.held.key) for part in self.parts)


class RunContents:
    """What a run's sources hold. Close it after use, because it keeps files open."""

    def __init__(self, sources: RunSources, journals: Iterable[Path] | None = None) -> None:
        """Without `journals`, it reads all journals of the run."""
        self.journals: list[SourceContents[JournalSource]] = []
        self._found: list[Problem] = []
        # Journals first: one that is sealed and removed in the meantime is still open here, or among the shards.
        for path in sources.journal_paths() if journals is None else journals:
            try:
                self.journals.append(SourceContents(JournalSource(path)))
            except DamagedTapeError as error:
                if path.exists():
                    self._found.append(Problem(f"journal {path.name}", str(error), "everything in it"))
        self.shards = [SourceContents(shard) for shard in sources.shards(set())]
        self._found += sources.problems()

    @property
    def _all(self) -> list[AnySource]:
        return [*self.shards, *self.journals]

    @cached_property
    def entries(self) -> dict[Key, Listed]:
        """The rollouts, in the order of their start."""
        found: dict[Key, list[AnySource]] = {}
        for one in self._all:
            for key in one.rollouts:
                found.setdefault(key, []).append(one)
        entries: dict[Key, Listed] = {}
        for key, parts in found.items():
            entries[key], problems = _join_parts(key, parts)
            self._found += problems
        return dict(sorted(entries.items(), key=lambda item: (item[1].held.head.started_at_ns, item[0])))

    @cached_property
    def events(self) -> dict[tuple[str, int], StoredEvent]:
        """All events, each once, in their order."""
        merged: dict[tuple[str, int], StoredEvent] = {}
        for one in self._all:
            for stored in one.events:
                merged.setdefault(stored.key, stored)
        return dict(sorted(merged.items(), key=lambda item: item[1].order))

    def deciding(self, key: Key) -> list[Event]:
        """The events that decide the outcome of a rollout, in order."""
        return [stored.event for stored in self._deciding.get(key, ())]

    @cached_property
    def _deciding(self) -> dict[Key, list[StoredEvent]]:
        found: dict[Key, list[StoredEvent]] = {}
        for stored in self.events.values():
            entry = self.entries.get(stored.about.key)
            if entry is not None and decides(stored.about) and counts_for(stored, entry.held.writer):
                found.setdefault(stored.about.key, []).append(stored)
        return found

    def problems(self) -> list[Problem]:
        """What was wrong with all that has been read so far."""
        return list(dict.fromkeys([*self._found, *(problem for one in self._all for problem in one.problems())]))

    def close(self) -> None:
        for one in self._all:
            one.source.close()


@contextlib.contextmanager
def open_contents(directory: RunDirectory) -> Iterator[RunContents]:
    """Everything that a local run consists of: its journals, its shards, and those published elsewhere."""
    directory.published()  # raises if it cannot be read: shards published elsewhere would seem to be missing
    with contextlib.closing(RunContents(RunSources(directory, Place(directory.path)))) as contents:
        yield contents


def _join_parts(key: Key, found: Sequence[AnySource]) -> tuple[Listed, list[Problem]]:
    """One rollout as several sources list it, and its problems: a missing part, or a second one of the same epoch.

    If there are two copies of a part, the first one counts.
    """
    parts: dict[str, AnySource] = {}
    for one in found:
        parts.setdefault(one.rollouts[key].writer, one)
    ranked = sorted(parts.values(), key=lambda part: _rank(part.rollouts[key]))
    chain, problems = _chain(key, ranked[0], parts)
    best = {part.rollouts[key].head.epoch: part.rollouts[key].writer for part in [*reversed(ranked), *chain]}
    for part in ranked:
        held = part.rollouts[key]
        if held.writer != (first := best[held.head.epoch]):
            what = f"try {key[1]} of rollout {key[0]} was recorded by {first} as well"
            problems.append(Problem(part.source.where, what, "this one of the two"))
    chain.reverse()
    return Listed(chain[-1].rollouts[key], tuple(chain)), problems


def _rank(held: HeldRollout) -> tuple[int, bool, int, str]:
    head = held.head
    return rank_part(head.epoch, ended=held.status is not None, started_ns=head.started_at_ns, writer=held.writer)


def _chain(key: Key, top: AnySource, parts: dict[str, AnySource]) -> tuple[list[AnySource], list[Problem]]:
    """The parts that a rollout is read from, the last one first."""
    chain = [top]
    while not chain[-1].source.sealed and (writer := chain[-1].rollouts[key].head.continues) is not None:
        if writer not in parts or parts[writer] in chain:
            what = f"try {key[1]} of rollout {key[0]} was taken over from {writer}, whose part is missing"
            return chain, [Problem(chain[-1].source.where, what, f"what {writer} recorded of it")]
        chain.append(parts[writer])
    return chain, []

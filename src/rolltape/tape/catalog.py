"""All that a run consists of at one moment: journals and shards brought together, each rollout and event once."""

from collections.abc import Iterable
from functools import cached_property
from types import TracebackType
from typing import Self

import msgspec

from rolltape.errors import DamagedTapeError, TapeError
from rolltape.records.rollout import Event, EventKind
from rolltape.tape.journalfile import JournalSource
from rolltape.tape.places import Place
from rolltape.tape.rundir import RunDirectory
from rolltape.tape.shardfile import ShardSource, shards_at
from rolltape.tape.stored import HeldRollout, Key, Problem, Source, StoredEvent


class Listed(msgspec.Struct, frozen=True):
    """A rollout, and the source to load it from."""

    held: HeldRollout
    source: Source


class Catalog:
    """What a run's sources hold. Close it: it keeps files open."""

    def __init__(self, directory: RunDirectory | None, places: Iterable[Place]) -> None:
        self.journals: list[JournalSource] = []
        self.shards: list[ShardSource] = []
        self._found: list[Problem] = []
        # Journals first: one that is sealed and removed meanwhile is then still open here, or among the shards.
        for path in directory.journal_paths() if directory else ():
            try:
                self.journals.append(JournalSource(path))
            except DamagedTapeError as error:
                if path.exists():
                    self._found.append(Problem(f"journal {path.name}", str(error), "everything in it"))
        for place in places:
            self._add_shards(place)
        self.entries = self._merged_rollouts()
        self.events = self._merged_events()
        self.events_of: dict[Key, list[Event]] = {}
        for stored in self.events.values():
            key = (stored.event.rollout, stored.event.try_index)
            if key in self.entries and self._counts(stored.event, self.entries[key].held):
                self.events_of.setdefault(key, []).append(stored.event)

    @staticmethod
    def _counts(event: Event, about: HeldRollout) -> bool:
        # Only its own writer finishes a rollout; another that recorded the same try by mistake does not.
        return event.kind != EventKind.FINISH or event.writer == about.writer

    def _add_shards(self, place: Place) -> None:
        try:
            shards, problems = shards_at(place)
            if place.about() is None:
                problems.append(Problem(place.url, "shards of this run were published there, it holds no run now", ""))
        except (TapeError, OSError) as error:
            if isinstance(error, TapeError) and not isinstance(error.__cause__, OSError):
                raise
            problems = [Problem(place.url, f"cannot be reached: {error}", "the rollouts that were published there")]
            shards = []
        self.shards += shards
        self._found += problems

    @cached_property
    def tries(self) -> dict[str, list[int]]:
        """The tries of each rollout."""
        tries: dict[str, list[int]] = {}
        for rollout, try_index in self.entries:
            tries.setdefault(rollout, []).append(try_index)
        return tries

    @property
    def sources(self) -> list[Source]:
        """Shards, then journals."""
        return [*self.shards, *self.journals]

    def _merged_rollouts(self) -> dict[Key, Listed]:
        entries: dict[Key, Listed] = {}
        for source in self.sources:
            for held in source.listing():
                other = entries.get(held.key)
                if other is None:
                    entries[held.key] = Listed(held, source)
                elif other.held.writer != held.writer:
                    first, second = sorted((other, Listed(held, source)), key=lambda one: one.held.head.started_at_ns)
                    entries[held.key] = first
                    what = f"try {held.key[1]} of rollout {held.key[0]} was recorded by {first.held.writer} as well"
                    self._found.append(Problem(second.source.where, what, "the later of the two"))
        return dict(sorted(entries.items(), key=lambda item: (item[1].held.head.started_at_ns, item[0])))

    def _merged_events(self) -> dict[tuple[str, int], StoredEvent]:
        merged: dict[tuple[str, int], StoredEvent] = {}
        for source in self.sources:
            for stored in source.events():
                merged.setdefault(stored.key, stored)
        return dict(sorted(merged.items(), key=lambda item: item[1].event.order))

    def problems(self) -> list[Problem]:
        """What was wrong with all that has been read so far."""
        found = [problem for source in self.sources for problem in source.problems()]
        return list(dict.fromkeys([*self._found, *found]))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for source in self.sources:
            source.close()


def catalog_of(directory: RunDirectory) -> Catalog:
    """Everything that a local run consists of: its journals, its shards, and those published elsewhere."""
    return Catalog(directory, [Place(directory.path), *(Place(url) for url in directory.published())])

"""All that a run consists of at one moment: journals and shards brought together, each rollout and event once."""

from collections.abc import Iterable
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Self

from rolltape.errors import DamagedTapeError, TapeError
from rolltape.records.rollout import Event, EventKind
from rolltape.tape.index.loading import Listed, join_parts
from rolltape.tape.journal.reading import JournalSource
from rolltape.tape.rundir import Place, RunDirectory
from rolltape.tape.shards.reading import ShardSource, shards_at
from rolltape.tape.stored import HeldRollout, Key, Problem, Source, StoredEvent, decides


class Catalog:
    """What a run's sources hold. Close it: it keeps files open."""

    def __init__(
        self, directory: RunDirectory | None, places: Iterable[Place], journals: Iterable[Path] | None = None
    ) -> None:
        """Of the journals in the directory it takes all, or those given."""
        self.journals: list[JournalSource] = []
        self.shards: list[ShardSource] = []
        self._found: list[Problem] = []
        # Journals first: one that is sealed and removed meanwhile is then still open here, or among the shards.
        for path in journals if journals is not None else directory.journal_paths() if directory else ():
            try:
                self.journals.append(JournalSource(path))
            except DamagedTapeError as error:
                if path.exists():
                    self._found.append(Problem(f"journal {path.name}", str(error), "everything in it"))
        for place in places:
            self._add_shards(place)

    def listed(self) -> Self:
        """The same, with its rollouts and events listed now and not when they are first asked for."""
        _ = self.entries, self.events
        return self

    def events_of(self, key: Key) -> list[Event]:
        """What was said of a rollout, in its order."""
        return [stored.event for stored in self._said_of.get(key, ())]

    def deciding(self, key: Key) -> list[Event]:
        """As much of it as its outcome follows from: no deliveries and traces, which are most of it."""
        return [stored.event for stored in self._said_of.get(key, ()) if decides(stored.about)]

    @cached_property
    def _said_of(self) -> dict[Key, list[StoredEvent]]:
        found: dict[Key, list[StoredEvent]] = {}
        for stored in self.events.values():
            key = stored.about.key
            # Only its own writer finishes a rollout; another that recorded the same try by mistake does not.
            if key in self.entries and (
                stored.about.kind != EventKind.FINISH or stored.writer == self.entries[key].held.writer
            ):
                found.setdefault(key, []).append(stored)
        return found

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

    @cached_property
    def entries(self) -> dict[Key, Listed]:
        """The rollouts, in the order of their start."""
        found: dict[Key, list[tuple[HeldRollout, Source]]] = {}
        for source in self.sources:
            for held in source.listing():
                found.setdefault(held.key, []).append((held, source))
        entries: dict[Key, Listed] = {}
        for key, parts in found.items():
            entries[key], problems = join_parts(parts)
            self._found += problems
        return dict(sorted(entries.items(), key=lambda item: (item[1].held.head.started_at_ns, item[0])))

    @cached_property
    def events(self) -> dict[tuple[str, int], StoredEvent]:
        """All events, in their order."""
        return _merged(source.events() for source in self.sources)

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


def _merged(sources: Iterable[Iterable[StoredEvent]]) -> dict[tuple[str, int], StoredEvent]:
    merged: dict[tuple[str, int], StoredEvent] = {}
    for stored in chain.from_iterable(sources):
        merged.setdefault(stored.key, stored)
    return dict(sorted(merged.items(), key=lambda item: item[1].order))


def catalog_of(directory: RunDirectory) -> Catalog:
    """Everything that a local run consists of: its journals, its shards, and those published elsewhere."""
    return Catalog(directory, [Place(directory.path), *(Place(url) for url in directory.published())])

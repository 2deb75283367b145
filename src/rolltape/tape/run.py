"""`Run`, the reader of a run: it shows all journals and shards as one, also while they are written."""

import contextlib
import os
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy.typing as npt

from rolltape.errors import NoSuchRollout, RunNotFound
from rolltape.records.rollout import Annotations, Event, EventKind, Rollout, RolloutHead
from rolltape.tape.contents import RunContents
from rolltape.tape.index.database import IndexFile
from rolltape.tape.index.index import Index, NamedTries
from rolltape.tape.index.queries import annotations_by_hand
from rolltape.tape.index.rows import LatestScore, RolloutRow
from rolltape.tape.index.sources import RunSources
from rolltape.tape.recording.fields import as_text
from rolltape.tape.rundir import Place, RunDirectory, find_run
from rolltape.tape.stored import Key, Problem

__all__ = ["LatestScore", "NamedTries", "RolloutRow", "Run", "read"]


class Run:
    """A reader of one run. Every call sees what was written before it, unless it is within a `snapshot`.

    Example:

        run = rolltape.read("runs/exp1")
        for row in run.index():
            print(row.id, row.outcome.status, row.outcome.reward)
        for rollout in run.rollouts(step=3):
            print(len(rollout.turns))

    What the run holds comes from its index, which is brought up to date first; turns come from the tape itself.
    """

    def __init__(self, location: str, about: dict[str, Any], directory: RunDirectory | None, place: Place) -> None:
        self.location = location
        self.name = str(about["name"])
        self.schema = str(about["schema"])
        self.directory = directory
        self._about = about
        self._place = place
        self._found: dict[Problem, None] = {}
        self._of: Run | None = None  # within a snapshot: the run that it is of
        path = None if directory is None else directory.path
        self.tape_index = Index(RunSources(directory, place), IndexFile(path, location, about.get("created")), location)
        weakref.finalize(self, self.tape_index.close)

    @contextlib.contextmanager
    def snapshot(self) -> "Iterator[Run]":
        """A reader for many calls in a row: it lists rollouts and events as they are now.

        Turns are read when they are requested, so a rollout that is being recorded may show more of them than the list
        counts. It is for one thread. After the block it is a reader like any other.
        """
        if self._of is not None:
            yield self
            return
        self._check_there()
        self.tape_index.advance()
        held = Run(self.location, self._about, self.directory, self._place)
        with held.tape_index.moment():
            held._of = self
            try:
                yield held
            finally:
                held._of = None

    def index(self) -> list[RolloutRow]:
        """All rollouts in the order of their start, without loading their turns."""
        return self._indexed().rows()

    def rollouts(
        self, *, step: int | None = None, group: str | None = None, task_id: str | None = None
    ) -> Iterator[Rollout]:
        """Rollouts in the order of their start, loaded one at a time."""
        rows = self._indexed().rows(step=step, group=group)
        yield from self.load_each([row.key for row in rows if task_id in (None, row.task_id)])

    def load_each(self, keys: Sequence[Key]) -> Iterator[Rollout]:
        """The rollouts of these ids and tries, loaded one at a time."""
        return self._loading().load_each(keys)

    def rollout(self, rollout_id: str, try_index: int | None = None) -> Rollout:
        """One rollout by its id, a foreign id of it, or the beginning of its id. By default its latest try."""
        found = self.find(rollout_id, try_index)
        return self._loading().load((found.id, found.tries[-1]))

    def find(self, rollout_id: str, try_index: int | None = None) -> NamedTries:
        """The rollout that an id means, and its tries: all, those with this foreign id, or the given one.

        Raises NoSuchRollout, or its subclass AmbiguousId if several rollouts may be meant.
        """
        found = self._indexed().find(as_text(rollout_id, "the id of a rollout") or "", self.name)
        if try_index is None:
            return found
        if try_index not in found.tries:
            tries = ", ".join(map(str, found.tries))
            raise NoSuchRollout(f"rollout {rollout_id} has no try {try_index}; it has {tries}")
        return NamedTries(found.id, [try_index])

    def latest(self, rollout_ids: Collection[str]) -> dict[str, Rollout]:
        """The latest tries of these rollouts, as far as they are there."""
        index = self._indexed()
        tries = {one: found[-1] for one in rollout_ids if (found := index.tries(one))}
        return {one: self._loading().load((one, try_index)) for one, try_index in tries.items()}

    def annotations(self, rollout_id: str, try_index: int) -> Annotations:
        """The tags and notes of one try of a rollout, without loading its turns."""
        return self._indexed().annotations((rollout_id, try_index))

    def annotations_by_hand(self) -> dict[tuple[str, int], Annotations]:
        """The tags and notes of each rollout and try that has a note, or whose tags were added to or taken from."""
        found: dict[tuple[str, int], Annotations] = self._indexed().ask(annotations_by_hand)
        return found

    def versions(self) -> tuple[str, ...]:
        """Weight versions, oldest first: those never announced as they first appear, then as they were announced."""
        return self._indexed().versions()

    def events(self, *, summaries: bool = False) -> list[Event]:
        """All events of all writers, in order; with `summaries`, also those, which add nothing new. Reads the tape."""
        with self._contents() as contents:
            found = contents.events.values()
            return [one.event for one in found if summaries or one.about.kind != EventKind.SUMMARY]

    def remarks(self, kind: EventKind) -> list[Event]:
        """The events of one kind, in order, from the index. It lacks finishes, traces, deliveries, events about turns,
        and scores that came with a finish."""
        return self._indexed().events(kind)

    def writers(self) -> frozenset[str]:
        """The writers of this run whose processes are alive."""
        return self._indexed().writers()

    def standings(self, *, step: int, source: str | None) -> npt.NDArray[Any]:
        """How the rollouts of a step and source stand: an array of RESUMED, a row for each try, in no order."""
        return self._indexed().resumed(step, source)

    def group_heads(self, *, step: int, source: str | None) -> list[RolloutHead]:
        """The head of the latest rollout of each group of a step and source."""
        return self._indexed().group_heads(step, source)

    def problems(self) -> list[Problem]:
        """Everything on the tape that cannot be read or contradicts itself. Reads the whole tape."""
        for row in self._indexed().rows():
            self._loading().load(row.key)
        with self._contents() as contents:
            _ = contents.entries
            for journal in contents.journals:
                journal.source.check_whole()
        return self.noticed()

    def noticed(self) -> list[Problem]:
        """The problems that the index and the calls so far have met."""
        return list(dict.fromkeys([*self._loading().problems(), *self._found]))

    def verify_shards(self) -> list[Problem]:
        """Compare every sealed file with the checksum in its manifest."""
        with self._contents() as contents:
            return [problem for shard in contents.shards for problem in shard.source.verify()]

    def _indexed(self) -> Index:
        """The index, up to date, or as it was when a snapshot was taken."""
        if self._of is None:
            self._check_there()
            self.tape_index.advance()
        return self.tape_index

    def _check_there(self) -> None:
        """Raise RunNotFound if the run was moved or deleted, or another one was made in its place."""
        if self.directory is not None and RunDirectory.opened(self.directory.path).about != self._about:
            raise RunNotFound(f"{self.location}: the run there is not the one that was opened; read it again")

    def _loading(self) -> Index:
        """The index that finds rollouts where they are now."""
        return self.tape_index if self._of is None else self._of.tape_index

    @contextlib.contextmanager
    def _contents(self) -> Iterator[RunContents]:
        self._check_there()
        with contextlib.closing(RunContents(RunSources(self.directory, self._place))) as contents:
            try:
                yield contents
            finally:
                self._found.update(dict.fromkeys(contents.problems()))

    def __repr__(self) -> str:
        return f"Run({self.name!r}, {self.location!r})"

    def _repr_html_(self) -> str:
        from rolltape.notebook import run_html

        return run_html(self)


def read(location: str | os.PathLike[str]) -> Run:
    """Open the run at a path or an fsspec URL for reading, also while it is being written.

    Example:

        run = rolltape.read("s3://bucket/exp1")
    """
    return Run(*find_run(location))

"""A run as a reader sees it: all writers' journals and all shards as one, while it is being written."""

import contextlib
import os
from collections.abc import Collection, Iterator
from typing import Any

import msgspec
import numpy.typing as npt

from rolltape.errors import NoSuchRollout, RunNotFound
from rolltape.records.rollout import Event, EventKind, Outcome, Rollout, RolloutHead, outcome_of
from rolltape.tape.index.catalog import Catalog, Listed, catalog_of
from rolltape.tape.recording.fields import is_unicode
from rolltape.tape.repair.rebuild import pruned_of, rebuilt
from rolltape.tape.rundir import RUN_FILE, RunDirectory, checked_about
from rolltape.tape.shards.places import Place
from rolltape.tape.stored import Key, Problem, StoredSession


class RolloutRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a run's index."""

    head: RolloutHead
    outcome: Outcome
    sessions: int
    turns: int
    sampled_tokens: int
    versions: tuple[str, ...]  # of the weights that sampled them, as far as they were told
    sealed: bool
    pruned: tuple[str, ...]  # "turns", or "side array NAME"; the counts are those from before

    @property
    def id(self) -> str:
        return self.head.id

    @property
    def key(self) -> Key:
        return self.head.key


class Run:
    """A reader of one run. Every call looks at the tape anew, unless it is within a `snapshot`."""

    def __init__(self, location: str, about: dict[str, Any], directory: RunDirectory | None, place: Place) -> None:
        self.location = location
        self.name = str(about["name"])
        self.schema = str(about["schema"])
        self._directory = directory
        self._place = place
        self._noticed: dict[Problem, None] = {}
        self._held: Catalog | None = None

    @contextlib.contextmanager
    def snapshot(self) -> "Iterator[Run]":
        """A reader for many questions in a row: it lists rollouts and events once, as they are now.

        Turns are read when they are asked for, so a rollout that is being recorded may show more of them than
        the index counts. It is for one thread; when the block ends it is a reader like any other.
        """
        with self._opened() as catalog:
            held = Run(self.location, {"name": self.name, "schema": self.schema}, self._directory, self._place)
            held._held, held._noticed = catalog.listed(), self._noticed
            try:
                yield held
            finally:
                held._held = None

    def index(self) -> list[RolloutRow]:
        """All rollouts in the order of their start, without loading their turns."""
        with self._opened() as catalog:
            return [_row(entry, catalog) for entry in catalog.entries.values()]

    def rollouts(
        self, *, step: int | None = None, group: str | None = None, task_id: str | None = None
    ) -> Iterator[Rollout]:
        """Rollouts in the order of their start, loaded one at a time."""
        with self._opened() as catalog:
            for key, entry in catalog.entries.items():
                head = entry.held.head
                if step in (None, head.step) and group in (None, head.group) and task_id in (None, head.task_id):
                    yield self._load(catalog, key)

    def rollout(self, rollout_id: str, try_index: int | None = None) -> Rollout:
        """One rollout by its id or the beginning of it; its latest try, unless told which."""
        with self._opened() as catalog:
            if rollout_id in catalog.tries:
                ids = {rollout_id}
            else:
                ids = {one for one in catalog.tries if one.startswith(rollout_id)} if rollout_id else set()
            if not ids:
                held = len(catalog.entries)
                raise NoSuchRollout(f"run {self.name} holds no rollout {rollout_id!r}; it has {held}, see its index")
            if len(ids) > 1:
                some = ", ".join(sorted(ids)[:3])
                raise NoSuchRollout(f"run {self.name}: {rollout_id!r} begins {len(ids)} ids ({some}…); give more of it")
            (found,) = ids
            tries = sorted(catalog.tries[found])
            if try_index is not None and try_index not in tries:
                raise NoSuchRollout(f"rollout {found} has no try {try_index}; it has {', '.join(map(str, tries))}")
            return self._load(catalog, (found, tries[-1] if try_index is None else try_index))

    def latest(self, rollout_ids: Collection[str]) -> dict[str, Rollout]:
        """The latest tries of these rollouts, as far as they are there, at the cost of one look at the whole run.

        What it holds meanwhile grows with these alone.
        """
        with self._opened() as catalog:
            if self._held is None:
                catalog.restricted_to(rollout_ids)
            tries = {one: max(catalog.tries[one]) for one in rollout_ids if one in catalog.tries}
            return {one: self._load(catalog, (one, index)) for one, index in tries.items()}

    def versions(self) -> tuple[str, ...]:
        """Weight versions, oldest first: those never announced as they first appear, then as they were announced."""
        with self._opened() as catalog:
            announced = [str(event.data["version"]) for event in catalog.remarks() if event.kind == EventKind.VERSION]
            seen = list(dict.fromkeys(one for entry in catalog.entries.values() for one in entry.held.versions))
        # What counts is the last announcement: after a rollback an old version is the newest again.
        latest_last = reversed(dict.fromkeys(reversed([*seen, *announced])))
        return tuple(latest_last)

    def events(self) -> list[Event]:
        """Everything that was said after the fact, by all writers, in its order."""
        with self._opened() as catalog:
            return [stored.event for stored in catalog.events.values()]

    def remarks(self, kind: EventKind) -> list[Event]:
        """What was said of one kind, in its order, without reading all events. Not for finishes, traces, deliveries,
        and what is of a turn; of scores those that came later than the finish."""
        with self._opened() as catalog:
            return [event for event in catalog.remarks() if event.kind == kind]

    def standings(self, *, step: int, source: str | None) -> npt.NDArray[Any]:
        """How the rollouts of a step and source stand: an array of STANDING, a row for each try, in no order.

        It costs little more than reading their ids; `index` tells more of them.
        """
        with self._opened() as catalog:
            return catalog.standings(step, source)

    def problems(self) -> list[Problem]:
        """Everything on the tape that cannot be read or contradicts itself. Reads the whole tape."""
        with self._opened() as catalog:
            for key in catalog.listed().entries:
                self._load(catalog, key)
            for journal in catalog.journals:
                journal.check_whole()
        return self.noticed()

    def noticed(self) -> list[Problem]:
        """The problems that the calls so far have met."""
        return list(self._noticed)

    def verify_shards(self) -> list[Problem]:
        """Compare every sealed file with the checksum in its manifest."""
        with self._opened() as catalog:
            return [problem for shard in catalog.shards for problem in shard.verify()]

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Catalog]:
        if self._held is not None:
            yield self._held
            self._noticed.update(dict.fromkeys(self._held.problems()))
            return
        with Catalog(None, [self._place]) if self._directory is None else catalog_of(self._directory) as catalog:
            try:
                yield catalog
            finally:
                self._noticed.update(dict.fromkeys(catalog.problems()))

    def _load(self, catalog: Catalog, key: Key) -> Rollout:
        entry = catalog.entries[key]
        events = catalog.events_of(key)
        sessions = [_less_pruned(session, pruned_of(events)) for session in entry.source.load(key)]
        rollout, problems = rebuilt(
            entry.held.head, sessions, events, entry.source.alive, entry.source.where, self.location
        )
        self._noticed.update(dict.fromkeys(problems))
        return rollout

    def __repr__(self) -> str:
        return f"Run({self.name!r}, {self.location!r})"

    def _repr_html_(self) -> str:
        from rolltape.notebook import run_html

        return run_html(self)


def read(location: str | os.PathLike[str]) -> Run:
    """The run at a path or an fsspec URL, for reading."""
    text = os.fspath(location)
    if not isinstance(text, str) or not is_unicode(text) or "\0" in text:
        raise RunNotFound(f"{text!r}: no run there; it is no path or URL in valid Unicode")
    place = Place(text)
    if place.is_local:
        directory = RunDirectory.opened(place.root)
        return Run(str(directory.path), directory.about, directory, place)
    raw = place.about()
    if raw is None:
        raise RunNotFound(f"{place.url}: no run there ({RUN_FILE} is missing)")
    return Run(place.url, checked_about(raw, place.url), None, place)


def _row(entry: Listed, catalog: Catalog) -> RolloutRow:
    held = entry.held
    events = catalog.deciding(held.key)
    return RolloutRow(
        head=held.head,
        outcome=outcome_of(events, entry.source.alive),
        sessions=len(held.turns),
        turns=sum(held.turns),
        sampled_tokens=held.sampled_tokens,
        versions=held.versions,
        sealed=entry.source.sealed,
        pruned=pruned_of(events),
    )


def _less_pruned(session: StoredSession, pruned: tuple[str, ...]) -> StoredSession:
    """What was pruned is gone for readers at once, also from copies that a live writer still holds."""
    if "turns" in pruned:
        return StoredSession(session.head, session.ordinal, [])
    gone = {one.removeprefix("side array ") for one in pruned}
    if not gone:
        return session
    turns = [
        msgspec.structs.replace(turn, side={name: side for name, side in turn.side.items() if name not in gone})
        for turn in session.turns
    ]
    return StoredSession(session.head, session.ordinal, turns)

"""Publishing: what has ended on one machine of a cluster goes to a place that all of them see, a shard at a time."""

import contextlib
import logging
from collections.abc import Collection, Iterable

from rolltape.errors import DamagedTapeError
from rolltape.records.rollout import EventKind
from rolltape.tape.index.catalog import Catalog
from rolltape.tape.index.loading import Listed
from rolltape.tape.journal.fences import find_part, read_fences
from rolltape.tape.journal.file import is_alive
from rolltape.tape.journal.reading import JournalSource, Since
from rolltape.tape.recording.tape import Tape
from rolltape.tape.rundir import Place, RunDirectory, locked
from rolltape.tape.shards.reading import ShardSource, shards_at
from rolltape.tape.shards.seal import remove_journal, written
from rolltape.tape.stored import Key, StoredEvent

log = logging.getLogger("rolltape.tape")


class Publisher:
    """Publishes a tape that is being recorded, each of its rollouts and events once."""

    def __init__(self, tape: Tape, place: Place) -> None:
        self._directory = tape.directory
        self._path = tape.directory.journals / f"{tape.writer}.sqlite"
        self._place = place
        self._since = Since()
        self._rollouts: set[Key] = set()  # published, of those that are read again
        self._events: set[int] = set()

    def publish(self) -> frozenset[Key]:
        """Write what has ended since the last time; those rollouts. What cannot be written is tried again then."""
        with contextlib.closing(JournalSource(self._path, self._since)) as source:
            # Events first: a rollout that ends meanwhile then counts as running, and is for the next time. Sessions
            # before rollouts: then each of them is of a rollout that is read, also if it began meanwhile.
            events = {stored.sequence: stored for stored in source.events()}
            source.read_sessions()
            ended = _ended(events.values()) | self._rollouts
            listed = {held.key: held for held in source.listing()}
            running = listed.keys() - ended
            fresh = {key: Listed(held, (source,)) for key, held in listed.items() if key in ended - self._rollouts}
            said = {
                sequence: stored
                for sequence, stored in events.items()
                if sequence not in self._events and stored.about.key not in running
            }
            self._write(fresh, list(said.values()))
            done = self._events | said.keys()
            first_event = next((sequence for sequence in events if sequence not in done), _after(events, self._since))
            self._since = source.since(running, first_event)
            self._events = {sequence for sequence in done if sequence >= first_event}
            self._rollouts = {key for key in listed if key not in running}
            return frozenset(fresh)

    def _write(self, fresh: dict[Key, Listed], said: list[StoredEvent]) -> None:
        """Publish rollouts and events; those that were taken over with what their earlier writers recorded and said."""
        taken = {key for key, entry in fresh.items() if entry.held.head.epoch}
        with contextlib.ExitStack() as stack:
            if taken:
                catalog = stack.enter_context(_catalog_of(taken, self._directory, self._place))
                fresh = fresh | {key: catalog.entries[key] for key in taken}
                known = {stored.key for shard in _shards_of(catalog, self._place) for stored in shard.events()}
                known |= {stored.key for stored in said}
                earlier = (stored for stored in catalog.events.values() if stored.about.key in taken)
                said = [*said, *(stored for stored in earlier if stored.key not in known)]
            for _ in written(self._place, fresh, said):
                pass


def _after(events: Collection[int], since: Since) -> int:
    return max(events, default=since.event - 1) + 1


def publish_left(directory: RunDirectory, place: Place) -> frozenset[Key]:
    """Publish what processes that died have left in their journals, and remove those; the rollouts that had ended.

    These include what such a process had published itself: it may have died before it could say so. Those that had
    not ended are published, too, as lost ones. A journal stays while a living process goes on with one of its rollouts.
    """
    published: set[Key] = set()
    with locked(directory.path, "seal.lock"):
        for path in directory.journal_paths():
            if is_alive(path):
                continue
            with contextlib.closing(JournalSource(path)) as source:
                is_needed = _publish_all(source, directory, place)
                published |= _ended(source.events())
                source.check_whole()
                problems = source.problems()
            if is_needed:
                continue
            if problems:
                log.warning("%s is damaged and stays, as %s: %s", path, path.stem, problems[0])
                path.rename(path.with_suffix(".damaged"))
            else:
                remove_journal(path)
    return frozenset(published)


def _publish_all(source: JournalSource, directory: RunDirectory, place: Place) -> bool:
    """Publish whatever of a journal the place lacks; whether the journal is still needed for a rollout that runs."""
    held: set[Key] = set()
    said: set[tuple[str, int]] = set()
    for shard in shards_at(place)[0]:
        with contextlib.closing(shard):
            held.update(key for key, writer in shard.writers.items() if writer == source.writer)
            said.update(stored.key for stored in shard.events() if stored.writer == source.writer)
    listed = {one.key: one for one in source.listing()}
    taken = {key for key, one in listed.items() if one.head.epoch} | (read_fences(source.path).keys() & listed.keys())
    fresh = {key: Listed(one, (source,)) for key, one in listed.items() if key not in held | taken}
    running: set[Key] = set()
    with contextlib.ExitStack() as stack:
        if taken:
            catalog = stack.enter_context(_catalog_of(taken, directory, place))
            there = {one for shard in _shards_of(catalog, place) for one in shard.epochs.items()}
            running = {key for key in taken if catalog.entries[key].source.alive}
            ended = {key: catalog.entries[key] for key in taken - running}
            fresh |= {key: entry for key, entry in ended.items() if (key, entry.held.head.epoch) not in there}
        for _ in written(place, fresh, [stored for stored in source.events() if stored.key not in said]):
            pass
    return bool(running)


def _catalog_of(rollouts: Collection[Key], directory: RunDirectory, place: Place) -> Catalog:
    """What is known of some rollouts, among others, on this machine and at a place."""
    holders = []
    for path in directory.journal_paths():
        with contextlib.suppress(DamagedTapeError):
            if any(find_part(path, key) for key in rollouts):
                holders.append(path)
    return Catalog(directory, [Place(directory.path), place], holders)


def _shards_of(catalog: Catalog, place: Place) -> list[ShardSource]:
    return [shard for shard in catalog.shards if shard.place.url == place.url]


def _ended(events: Iterable[StoredEvent]) -> set[Key]:
    return {stored.about.key for stored in events if stored.about.kind == EventKind.FINISH}

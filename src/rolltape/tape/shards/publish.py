"""Publishing: what has ended on one machine of a cluster goes to a place that all of them see, a shard at a time."""

import contextlib
import logging
from collections.abc import Collection, Iterable

from rolltape.records.rollout import EventKind
from rolltape.tape.index.catalog import Listed
from rolltape.tape.journal.owner import is_alive
from rolltape.tape.journal.reading import JournalSource, Since
from rolltape.tape.recording.tape import Tape
from rolltape.tape.rundir import RunDirectory, locked
from rolltape.tape.shards.places import Place
from rolltape.tape.shards.reading import shards_at
from rolltape.tape.shards.seal import remove_journal, written
from rolltape.tape.stored import Key, StoredEvent

log = logging.getLogger("rolltape.tape")


class Publisher:
    """Publishes a tape that is being recorded, each of its rollouts and events once."""

    def __init__(self, tape: Tape, place: Place) -> None:
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
            fresh = {key: Listed(held, source) for key, held in listed.items() if key in ended - self._rollouts}
            said = {
                sequence: stored
                for sequence, stored in events.items()
                if sequence not in self._events and stored.about.key not in running
            }
            for _ in written(self._place, fresh, list(said.values())):
                pass
            done = self._events | said.keys()
            first_event = next((sequence for sequence in events if sequence not in done), _after(events, self._since))
            self._since = source.since(running, first_event)
            self._events = {sequence for sequence in done if sequence >= first_event}
            self._rollouts = {key for key in listed if key not in running}
            return frozenset(fresh)


def _after(events: Collection[int], since: Since) -> int:
    return max(events, default=since.event - 1) + 1


def publish_left(directory: RunDirectory, place: Place) -> frozenset[Key]:
    """Publish what processes that died have left in their journals, and remove those; the rollouts that had ended.

    These include what such a process had published itself: it may have died before it could say so. Those that had
    not ended are published, too, as lost ones.
    """
    published: set[Key] = set()
    with locked(directory.path, "seal.lock"):
        for path in directory.journal_paths():
            if is_alive(path):
                continue
            with contextlib.closing(JournalSource(path)) as source:
                published |= _publish_all(source, place)
                source.check_whole()
                problems = source.problems()
            if problems:
                log.warning("%s is damaged and stays, as %s: %s", path, path.stem, problems[0])
                path.rename(path.with_suffix(".damaged"))
            else:
                remove_journal(path)
    return frozenset(published)


def _publish_all(source: JournalSource, place: Place) -> set[Key]:
    """Whatever of a journal the place lacks."""
    held: set[Key] = set()
    said: set[tuple[str, int]] = set()
    for shard in shards_at(place)[0]:
        with contextlib.closing(shard):
            held.update(key for key, writer in shard.writers.items() if writer == source.writer)
            said.update(stored.key for stored in shard.events() if stored.writer == source.writer)
    fresh = {one.key: Listed(one, source) for one in source.listing() if one.key not in held}
    for _ in written(place, fresh, [stored for stored in source.events() if stored.key not in said]):
        pass
    return _ended(source.events())


def _ended(events: Iterable[StoredEvent]) -> set[Key]:
    return {stored.about.key for stored in events if stored.about.kind == EventKind.FINISH}

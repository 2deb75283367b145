"""Publishes ended rollouts of one machine of a cluster to a place that all machines see, a shard at a time."""

import contextlib
import logging
from collections.abc import Collection

from rolltape.errors import DamagedTapeError
from rolltape.records.rollout import EventKind, Status
from rolltape.tape.contents import Listed, RunContents, SourceContents
from rolltape.tape.index.sources import Marks, RunSources, journal_news, key_named
from rolltape.tape.journal.fences import find_part, read_fences
from rolltape.tape.journal.file import is_alive
from rolltape.tape.journal.reading import JournalSource
from rolltape.tape.recording.tape import Tape
from rolltape.tape.rundir import Place, RunDirectory, locked
from rolltape.tape.shards.reading import ShardSource, shards_at
from rolltape.tape.shards.seal import remove_journal, written
from rolltape.tape.stored import HeldRollout, Key, StoredEvent

log = logging.getLogger("rolltape.tape")


class Publisher:
    """Publishes a tape that is being recorded, each of its rollouts and events once."""

    def __init__(self, tape: Tape, place: Place) -> None:
        self._directory = tape.directory
        self._path = tape.directory.journals / f"{tape.writer}.sqlite"
        self._place = place
        self._marks = Marks(1)  # how far the journal was published; events of running rollouts wait for their end

    def publish(self) -> frozenset[Key]:
        """Write the rollouts that ended since the last call, and return them. After an error, the next call retries."""
        with contextlib.closing(JournalSource(self._path)) as source:
            source.pin()
            news = journal_news(source, self._marks)
            running = {key_named(name) for name in news.marks.open}
            by_number = {
                one.sequence: one for one in (*news.apart, *news.summaries.values()) if one.about.key not in running
            }
            ended = {key: one for key, one in news.rollouts.items() if one.finish is not None}
            if ended:
                first = min(one.first_event for one in ended.values())
                events = source.numbered_events(first, news.marks.next_event - 1)
                by_number |= {number: one for number, one in events if one.about.key in ended}
            source.unpin()
            journal = SourceContents(source)
            journal.rollouts = {
                key: HeldRollout(found, Status(one.finish.event.data["status"]), one.counts)
                for key, one in ended.items()
                for found in source.heads(one.row, one.row)
                if one.finish is not None
            }
            fresh = {key: Listed(held, (journal,)) for key, held in journal.rollouts.items()}
            self._write(fresh, [by_number[number] for number in sorted(by_number)])
            self._marks = news.marks
            return frozenset(fresh)

    def _write(self, fresh: dict[Key, Listed], unwritten: list[StoredEvent]) -> None:
        """Publish rollouts and events. For a rollout that was taken over, include the data of its earlier writers."""
        taken = {key for key, entry in fresh.items() if entry.held.head.epoch}
        with contextlib.ExitStack() as stack:
            if taken:
                contents = stack.enter_context(_open_contents(taken, self._directory, self._place))
                fresh = fresh | {key: contents.entries[key] for key in taken}
                known = {stored.key for shard in _shards_at(contents, self._place) for stored in shard.events}
                known |= {stored.key for stored in unwritten}
                earlier = (stored for stored in contents.events.values() if stored.about.key in taken)
                unwritten = [*unwritten, *(stored for stored in earlier if stored.key not in known)]
            for _ in written(self._place, fresh, unwritten):
                pass


def publish_left(directory: RunDirectory, place: Place) -> frozenset[Key]:
    """Publish and remove the journals of processes that died. Return the rollouts that had ended.

    These include rollouts that such a process had published itself: it may have died before it could report them.
    Rollouts that had not ended are published too, as lost. A journal stays while a live process continues one of its
    rollouts.
    """
    published: set[Key] = set()
    with locked(directory.path, "seal.lock", for_long=True):
        for path in directory.journal_paths():
            if is_alive(path):
                continue
            with contextlib.closing(JournalSource(path)) as source:
                journal = SourceContents(source)
                is_needed = _publish_all(journal, directory, place)
                published |= {one.about.key for one in journal.events if one.about.kind == EventKind.FINISH}
                source.check_whole()
                problems = journal.problems()
            if is_needed:
                continue
            if problems:
                log.warning("%s is damaged and stays, as %s: %s", path, path.stem, problems[0])
                path.rename(path.with_suffix(".damaged"))
            else:
                remove_journal(path)
    return frozenset(published)


def _publish_all(journal: SourceContents[JournalSource], directory: RunDirectory, place: Place) -> bool:
    """Publish what the place lacks of a journal. Return whether a running rollout still needs the journal."""
    held: set[Key] = set()
    published: set[tuple[str, int]] = set()
    writer = journal.source.writer
    for shard in map(SourceContents, shards_at(place)[0]):
        with contextlib.closing(shard.source):
            held.update(key for key, one in shard.rollouts.items() if one.writer == writer)
            published.update(stored.key for stored in shard.events if stored.writer == writer)
    listed = journal.rollouts
    taken = {key for key, one in listed.items() if one.head.epoch}
    taken |= read_fences(journal.source.path).keys() & listed.keys()
    fresh = {key: Listed(one, (journal,)) for key, one in listed.items() if key not in held | taken}
    running: set[Key] = set()
    with contextlib.ExitStack() as stack:
        if taken:
            contents = stack.enter_context(_open_contents(taken, directory, place))
            shards = _shards_at(contents, place)
            there = {(key, one.head.epoch) for shard in shards for key, one in shard.rollouts.items()}
            running = {key for key in taken if contents.entries[key].alive}
            ended = {key: contents.entries[key] for key in taken - running}
            fresh |= {key: entry for key, entry in ended.items() if (key, entry.held.head.epoch) not in there}
        for _ in written(place, fresh, [stored for stored in journal.events if stored.key not in published]):
            pass
    return bool(running)


def _open_contents(rollouts: Collection[Key], directory: RunDirectory, place: Place) -> contextlib.closing[RunContents]:
    """The contents of this machine and of a place that hold these rollouts."""
    holders = []
    for path in directory.journal_paths():
        with contextlib.suppress(DamagedTapeError):
            if any(find_part(path, key) for key in rollouts):
                holders.append(path)
    return contextlib.closing(RunContents(RunSources(directory, Place(directory.path), place), holders))


def _shards_at(contents: RunContents, place: Place) -> list[SourceContents[ShardSource]]:
    return [shard for shard in contents.shards if shard.source.place.url == place.url]

"""What is new on a run since one last looked: of a journal the rows that came since, of shards those that came since.

What was read is not read again, so looking costs what is new, however large the run has become.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rolltape.errors import DamagedTapeError, TapeError
from rolltape.records.rollout import Event, EventKind, Rollout, RolloutHead
from rolltape.tape.journal.reading import BEGINNING, JournalSource, Since
from rolltape.tape.repair.rebuild import pruned_of, rebuilt
from rolltape.tape.rundir import RunDirectory
from rolltape.tape.shards.places import Place
from rolltape.tape.shards.reading import ShardSource, shards_at

_FAR_LOOK_S = 2.0  # between looks at a place that is not local, since each is a request


class InJournal(NamedTuple):
    """From which rows on a journal holds a rollout and its sessions."""

    path: Path
    since: Since


class Found(NamedTuple):
    """A try of a rollout, and where it can be loaded from."""

    head: RolloutHead
    writer: str
    place: InJournal | ShardSource


class News(NamedTuple):
    """What one source has that is new."""

    rollouts: Sequence[Found]
    events: Sequence[Event]


class _Mark(NamedTuple):
    """How far a journal was read, the last time and the time before."""

    now: Since = BEGINNING
    before: Since = BEGINNING
    is_over: bool = False  # it was read after its writer had ended


class Follower:
    """Follows one run. For one thread at a time."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._marks: dict[Path, _Mark] = {}
        self._alive: set[str] = set()
        self._places: dict[str, Place] = {}
        self._shards: dict[str, set[str]] = {}  # by place: those that were read
        self._looked_at_s: dict[str, float] = {}
        self._loading: dict[str, JournalSource | ShardSource] = {}  # open, by their names

    def news(self) -> Iterator[News]:
        """What came since the last time, source by source."""
        # Journals first: what is sealed and removed meanwhile is then found among the shards.
        collected = False
        paths = self._directory.journal_paths()
        self._alive &= {path.stem for path in paths}
        for path in paths:
            for news in self._of_journal(path):
                collected = collected or any(event.kind == EventKind.COLLECTED for event in news.events)
                yield news
        if collected:
            self._looked_at_s.clear()  # all that it has published is to be seen with its end
        for url in (str(self._directory.path), *self._directory.published()):
            if url not in self._places:
                self._places[url] = Place(url)
        for place in self._places.values():
            yield from self._of_place(place)

    def is_writing(self, writer: str) -> bool:
        """Whether a writer's process lived when it was last looked at."""
        return writer in self._alive

    def is_alive(self, found: Found) -> bool:
        """Whether a rollout was still open to its writer when it was last looked at, if it has not ended."""
        return isinstance(found.place, InJournal) and self.is_writing(found.writer)

    def load(self, found: Found, events: Sequence[Event]) -> Rollout | None:
        """A rollout that has ended, with its turns; None: it is no longer where it was found, since it was sealed."""
        folder = str(self._directory.path)
        if "turns" in pruned_of(events):
            return rebuilt(found.head, [], events, False, found.writer, folder)[0]
        for fresh in (False, True):
            try:
                source = self._source(found.place, fresh=fresh)
                sessions = source.load(found.head.key)
            except (DamagedTapeError, KeyError):
                continue
            rollout, missing = rebuilt(found.head, sessions, events, False, source.where, folder)
            # One that was opened before the rollout had ended may not know of all that it has.
            if not missing or fresh:
                return rollout
        return None

    def rest(self) -> None:
        """Let go of the files that were opened to load from."""
        for source in self._loading.values():
            source.close()
        self._loading.clear()

    def _of_journal(self, path: Path) -> Iterator[News]:
        mark = self._marks.get(path, _Mark())
        if mark.is_over:
            return
        try:
            source = JournalSource(path, mark.now)
        except DamagedTapeError:  # readers of the run name it; here its attempts are missing
            return
        try:
            # Events first: what they are about is then among the rollouts.
            events = [stored.event for stored in source.events()]
            held = source.listing()
            after = source.since((), events[-1].sequence + 1 if events else mark.now.event)
        finally:
            source.close()
        (self._alive.add if source.alive else self._alive.discard)(source.writer)
        self._marks[path] = _Mark(after, mark.now, is_over=not source.alive)
        # A rollout that was not there at the last look has no session that was there at the look before.
        place = InJournal(path, Since(mark.now.rollout, mark.before.session))
        yield News([Found(one.head, one.writer, place) for one in held], events)

    def _of_place(self, place: Place) -> Iterator[News]:
        now_s = time.monotonic()
        if not place.is_local and now_s - self._looked_at_s.get(place.url, -_FAR_LOOK_S) < _FAR_LOOK_S:
            return
        self._looked_at_s[place.url] = now_s
        known = self._shards.setdefault(place.url, set())
        try:
            sources = shards_at(place, known)[0]
        except (TapeError, OSError):  # out of reach: it is looked at again the next time
            return
        for source in sources:
            news = News(
                [Found(held.head, held.writer, source) for held in source.listing()],
                [stored.event for stored in source.events()],
            )
            source.close()
            known.add(source.shard)
            yield news

    def _source(self, place: InJournal | ShardSource, *, fresh: bool) -> JournalSource | ShardSource:
        """What to load from; it stays open for what else is loaded from it."""
        name = place.where if isinstance(place, ShardSource) else str(place.path)
        held = self._loading.get(name)
        if held is None or fresh:
            if held is not None:
                held.close()
            held = place if isinstance(place, ShardSource) else JournalSource(place.path, place.since)
            self._loading[name] = held
        return held

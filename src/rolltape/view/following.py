"""A run followed: news of its journals and shards, from wherever one left off."""

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyarrow as pa

from rolltape.errors import DamagedTapeError, TapeError
from rolltape.tape.index.stretches import JournalStretches, ShardStretches, Stretches
from rolltape.tape.rundir import RUN_FILE, RunDirectory
from rolltape.tape.shards.places import Place as FilePlace
from rolltape.tape.shards.reading import shards_at
from rolltape.view.reports import Looked, Report
from rolltape.view.shard_news import shard_news
from rolltape.view.tail import TailMark, journal_news

_EVENTS_A_LOOK = 20_000
_FAR_LOOK_S = 15.0  # between looks at a place that is not local, since each is a request
_UNREADABLE = (TapeError, OSError, sqlite3.Error, pa.ArrowException, ValueError, KeyError, TypeError)


class RunPlaces:
    """Where the journals and the shards of a run lie, by the names that they have in reports."""

    def __init__(self, location: str) -> None:
        place = FilePlace(location)
        self.directory = RunDirectory.opened(place.root) if place.is_local else None
        self._own = place
        self._places: dict[str, FilePlace] = {}

    def shard_places(self) -> list[FilePlace]:
        """The run's own place, and those where it was published."""
        published: list[str] = []
        with contextlib.suppress(DamagedTapeError):  # which `trouble` tells
            published = [] if self.directory is None else self.directory.published()
        for url in published:
            if url not in self._places:
                with contextlib.suppress(TapeError):
                    self._places[url] = FilePlace(url)
        return [self._own, *(self._places[url] for url in published if url in self._places)]

    def journal_paths(self) -> list[Path]:
        return [] if self.directory is None else self.directory.journal_paths()

    def trouble(self) -> str | None:
        """What is wrong with the run's directory itself; None: nothing."""
        if self.directory is None:
            return None
        if not (self.directory.path / RUN_FILE).exists():
            return f"{self.directory.path}: the run is no longer there; what was known of it is still shown"
        try:
            self.directory.published()
        except DamagedTapeError as error:
            return str(error)
        return None

    def open(self, source: str) -> Stretches:
        """The source of a name; raises DamagedTapeError if it is not there."""
        kind, _, rest = source.partition("/")
        if kind == "journal" and self.directory is not None:
            return JournalStretches(self.directory.journals / f"{rest}.sqlite")
        shard, _, url = rest.partition("@")
        for place in self.shard_places():
            if kind == "shard" and url in ("", place.url):
                for found in shards_at(place)[0]:
                    if found.shard == shard:
                        return ShardStretches(found.place, found.shard, found.manifest)
        raise DamagedTapeError(f"{source}: is no longer there")

    def name(self, shard: ShardStretches) -> str:
        """The name of a shard; a place other than the run's own is part of it."""
        own = shard.place.url == self._own.url
        return f"shard/{shard.shard}" if own else f"shard/{shard.shard}@{shard.place.url}"


class Marks(msgspec.Struct):
    """How far a run was read."""

    journals: dict[str, TailMark] = {}
    shards: list[str] = []
    problems: dict[str, list[str]] = {}  # by source: what cannot be read in it


class Follower:
    """Follows one run. For one thread."""

    def __init__(self, location: str, marks: bytes = b"") -> None:
        self._places = RunPlaces(location)
        self._marks = msgspec.json.decode(marks, type=Marks) if marks else Marks()
        self._looked_at_s: dict[str, float] = {}
        self._given_up: set[str] = set()  # shards that could not be read; the next server tries them again

    def look(self) -> Iterator[Report]:
        """What came since the last look, or a part of it; ends with a Looked that says which."""
        alive: list[str] = []
        done = True
        trouble = self._places.trouble()
        self._marks.problems["run"] = [] if trouble is None else [trouble]
        # Journals first: what is sealed and removed meanwhile is then found among the shards.
        for path in self._places.journal_paths():
            mark = self._marks.journals.setdefault(path.stem, TailMark())
            if mark.ended:
                continue
            try:
                with contextlib.closing(JournalStretches(path)) as journal:
                    yield from journal_news(journal, mark, _EVENTS_A_LOOK)
                    self._note(path.stem, *map(str, journal.problems()))
                    alive += [journal.writer] if journal.alive else []
                    done = done and (mark.ended or journal.last_event() < mark.next_event)
            except _UNREADABLE as error:
                if path.exists():
                    self._note(path.stem, f"journal {path.name}: {error}")
        for place in self._places.shard_places():
            yield from self._shards_at(place)
        # In the midst of a large journal all that are open there would be told again and again.
        marks = msgspec.json.encode(self._marks) if done else None
        problems = tuple(one for several in self._marks.problems.values() for one in several)
        yield Looked(marks=marks, alive=tuple(alive), problems=problems, done=done)

    def _note(self, source: str, *problems: str) -> None:
        if problems:
            known = self._marks.problems.get(source, [])
            self._marks.problems[source] = list(dict.fromkeys([*known, *problems]))

    def _shards_at(self, place: FilePlace) -> Iterator[Report]:
        now_s = time.monotonic()
        if not place.is_local and now_s - self._looked_at_s.get(place.url, -_FAR_LOOK_S) < _FAR_LOOK_S:
            return
        self._looked_at_s[place.url] = now_s
        known = [name.removeprefix("shard/").partition("@")[0] for name in (*self._marks.shards, *self._given_up)]
        try:
            found, problems = shards_at(place, known)
        except (TapeError, OSError) as error:
            self._marks.problems[place.url] = [str(error)]
            return
        self._marks.problems[place.url] = list(map(str, problems))
        if not (found or known or place.is_local) and place.about() is None:
            self._note(place.url, f"{place.url}: there is no run there that can be read from this process")
        for one in found:
            shard = ShardStretches(one.place, one.shard, one.manifest)
            name = self._places.name(shard)
            self._marks.problems.pop(name, None)
            try:
                yield from shard_news(shard, name)
                self._marks.shards.append(name)
            except _UNREADABLE as error:
                self._note(name, f"{shard.where}: {error}")
                self._given_up.add(name)
            finally:
                self._note(name, *map(str, shard.problems()))
                shard.close()

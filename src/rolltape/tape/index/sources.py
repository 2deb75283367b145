"""The journals and shards of a run by the names that the index gives them, and what is new in each of them."""

import contextlib
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from rolltape.errors import DamagedTapeError, TapeError
from rolltape.records.jsonable import decode_numbers
from rolltape.records.rollout import EventKind, RolloutCounts
from rolltape.tape.journal.reading import JournalSource
from rolltape.tape.rundir import RUN_FILE, Place, RunDirectory
from rolltape.tape.shards.reading import ShardSource, shards_at
from rolltape.tape.stored import Key, Problem, StoredEvent, check_shortage, is_listed

_REMOTE_LOOK_S = 2.0

Reader = JournalSource | ShardSource


class RunSources:
    """The sources of one run. For one thread at a time."""

    def __init__(self, directory: RunDirectory | None, *places: Place, remote_look_s: float = _REMOTE_LOOK_S) -> None:
        self.directory = directory
        self._own = places
        self._remote_look_s = remote_look_s  # between looks at a place that is not local, since each is a request
        self._published: dict[str, Place | None] = {}  # None: it cannot be used here
        self._looked_at_s: dict[str, float] = {}
        self._listed: dict[str, list[ShardSource]] = {}
        self._problems: dict[str, list[Problem]] = {}

    def journal_paths(self) -> list[Path]:
        """The journals that exist now."""
        return [] if self.directory is None else self.directory.journal_paths()

    def shards(self, known: set[str]) -> list[ShardSource]:
        """The complete shards at all places. The manifests of known shards are not read again."""
        return [shard for place in self.places() for shard in self.shards_at(place, known)]

    def problems(self) -> list[Problem]:
        """What is wrong with the run's directory and with the places that hold its shards."""
        found = [one for several in self._problems.values() for one in several]
        if self.directory is None:
            return found
        if not (self.directory.path / RUN_FILE).exists():
            what = "the run is no longer there; what is known of it is from before"
            found.append(Problem(str(self.directory.path), what, ""))
        try:
            self.directory.published()
        except DamagedTapeError as error:
            found.append(Problem(str(self.directory.path), str(error), "the rollouts that were published elsewhere"))
        return found

    def look_again(self) -> None:
        """Include remote places in the next look."""
        self._looked_at_s.clear()

    def open(self, name: str) -> Reader:
        """The source with this name. Raises DamagedTapeError if it is not there."""
        kind, _, rest = name.partition("/")
        if kind == "journal" and self.directory is not None:
            return JournalSource(self.directory.journals / f"{rest}.sqlite")
        shard, _, url = rest.partition("@")
        for place in self.places():
            if kind == "shard" and url == place.url:
                for found in shards_at(place)[0]:
                    if found.shard == shard:
                        return found
        raise DamagedTapeError(f"{name}: is no longer there")

    def places(self) -> list[Place]:
        """The places that hold shards of the run."""
        published: list[str] = []
        if self.directory is not None:
            with contextlib.suppress(DamagedTapeError):  # `problems` reports it
                published = self.directory.published()
        for url in published:
            if url not in self._published:
                try:
                    self._published[url] = Place(url)
                except TapeError as error:  # such as a URL whose package is not installed here
                    self._published[url] = None
                    what = f"cannot be reached: {str(error).removeprefix(f'{url}: ')}"
                    self._problems[url] = [Problem(url, what, "the rollouts that were published there")]
        return [*self._own, *(place for url in published if (place := self._published[url]) is not None)]

    def shards_at(self, place: Place, known: set[str]) -> list[ShardSource]:
        """The shards of one place. If it cannot be reached, they are those of the last look."""
        now_s = time.monotonic()
        if not place.is_local and now_s - self._looked_at_s.get(place.url, -math.inf) < self._remote_look_s:
            return self._listed.get(place.url, [])
        self._looked_at_s[place.url] = now_s
        try:
            held = {one.shard: one for one in self._listed.get(place.url, ()) if one.name in known}
            listed = place.shard_ids()
            found, problems = shards_at(place, held, listed) if listed else ([], [])
            there = set(place.shard_ids() if held and found else listed)
            if (self.directory is None or place not in self._own) and place.about() is None:
                what = "shards of this run were published there, it holds no run now"
                problems.append(Problem(place.url, what, ""))
        except (TapeError, OSError) as error:
            if isinstance(error, TapeError) and not isinstance(error.__cause__, OSError):
                raise
            check_shortage(error, place.url)
            lost = "the rollouts that were published there"
            self._problems[place.url] = [Problem(place.url, f"cannot be reached: {error}", lost)]
            return self._listed.get(place.url, [])
        replaced = {shard for one in found for shard in one.manifest.get("replaces", [])}
        kept = [one for shard, one in held.items() if shard in there and shard not in replaced]
        self._problems[place.url] = problems
        self._listed[place.url] = [*kept, *found]
        return self._listed[place.url]


class FoundRollout(msgspec.Struct, array_like=True):
    """A rollout, or a writer's part of it, as far as its own source was read."""

    row: int
    first_event: int = 0  # its events are in this range, among those of others,
    last_event: int = -1  # up to here; less than the first: none was found
    sessions: dict[int, int] = {}  # turns counted so far, by session
    sampled_tokens: int = 0
    versions: list[str] = []
    finish: StoredEvent | None = None
    score: StoredEvent | None = None  # that came with the finish

    @property
    def counts(self) -> RolloutCounts:
        return RolloutCounts(tuple(self.sessions.values()), self.sampled_tokens, tuple(self.versions))

    @counts.setter
    def counts(self, counts: RolloutCounts) -> None:
        self.sessions = dict(enumerate(counts.turns))
        self.sampled_tokens, self.versions = counts.sampled_tokens, list(counts.versions)


class Marks(msgspec.Struct):
    """How far a source was read."""

    next_rollout: int = 0
    next_event: int = 0
    open: dict[str, FoundRollout] = {}  # by rollout and try, as `mark_name` spells them
    signature: str = ""  # of the files of a journal whose writer had ended
    last_events: dict[str, int] = {}  # the number of the last event that it holds of each writer
    is_partial: bool = False  # more rollouts follow, although no more are written: they are read a piece at a time


class News:
    """What is new in one source: rollouts, summaries, and events that are not read with their rollout."""

    def __init__(self, source: Reader, marks: Marks) -> None:
        self.source = source
        self.name = source.name
        self.marks = marks
        self.first_row = marks.next_rollout  # from here on its rollouts are new
        self.last_row = marks.next_rollout - 1
        self.fresh: set[Key] = set()  # the rollouts that are new
        self.rollouts: dict[Key, FoundRollout] = {}  # those that are new, have grown, or have ended
        self.summaries: dict[Key, StoredEvent] = {}
        self.apart: list[StoredEvent] = []  # about the run, or a rollout elsewhere, or appended after the end

    @property
    def is_empty(self) -> bool:
        return self.last_row < self.first_row and not (self.rollouts or self.apart or self.summaries)

    def add_events(
        self, events: Iterable[tuple[int, StoredEvent]], own: Mapping[Key, FoundRollout], writers: Mapping[Key, str]
    ) -> None:
        """Assign each event to one of the source's own rollouts, or store it apart."""
        last: StoredEvent | None = None
        for number, stored in events:
            self.marks.next_event = number + 1
            self.marks.last_events[stored.writer] = max(stored.sequence, self.marks.last_events.get(stored.writer, -1))
            about = stored.about
            rollout = own.get(about.key) if stored.writer == writers.get(about.key) else None
            if rollout is not None and rollout.finish is None:
                rollout.first_event = rollout.first_event if rollout.last_event >= 0 else number
                rollout.last_event = number
                if about.kind == EventKind.FINISH and about.turn is None:
                    rollout.finish = stored
                elif is_listed(about):
                    self.apart.append(stored)
            elif rollout is not None and last is rollout.finish and about.kind == EventKind.SCORE and not about.turn:
                # The score that belongs to a finish follows it directly, in the same transaction.
                rollout.score, rollout.last_event = stored, number
            elif about.kind == EventKind.SUMMARY:
                self.summaries[about.key] = stored
            else:
                self.apart.append(stored)
            last = stored


def journal_news(journal: JournalSource, marks: Marks) -> News:
    """What is new in a pinned journal since `marks`, which are not changed."""
    marks = msgspec.msgpack.decode(msgspec.msgpack.encode(marks), type=Marks)
    news = News(journal, marks)
    news.last_row = journal.last_rollout()
    own = {key_named(name): one for name, one in marks.open.items()}
    for row, key in journal.keys(news.first_row) if news.last_row >= news.first_row else ():
        own[key] = FoundRollout(row, marks.next_event)
        news.fresh.add(key)
    news.add_events(journal.numbered_events(marks.next_event), own, dict.fromkeys(own, journal.writer))
    for key, rollout in own.items():
        grew = count_rollout(journal, rollout)
        if grew or rollout.finish is not None or rollout.row >= news.first_row or not journal.alive:
            news.rollouts[key] = rollout
    running = {mark_name(key): one for key, one in own.items() if one.finish is None}
    marks.open = running if journal.alive else {}
    marks.next_rollout = news.last_row + 1
    return news


def is_older(journal: JournalSource, marks: Marks) -> bool:
    """Whether a journal lacks rollouts or turns that were counted up to `marks`."""
    if journal.last_rollout() + 1 < marks.next_rollout:
        return True
    # The journal of a live writer is the one that was read: it loses nothing.
    return not journal.alive and any(_lacks_turns(journal, one) for one in marks.open.values())


def _lacks_turns(journal: JournalSource, rollout: FoundRollout) -> bool:
    counts = dict(rollout.sessions)
    earlier = journal.earlier_parts(rollout.row)
    for session, ordinal, _ in journal.sessions_of(rollout.row):
        counted = counts.pop(session, 0)
        before = earlier.turns[ordinal] if earlier and ordinal < len(earlier.turns) else 0
        if counted > before and next(journal.sampled_since(session, counted - 1), None) is None:
            return True
    return bool(counts)


def shard_news(shard: ShardSource) -> News:
    """Everything in a shard."""
    news = News(shard, Marks())
    news.last_row = shard.last_rollout()
    rows = shard.keys()
    news.fresh.update(rows)
    news.rollouts = {key: FoundRollout(row) for key, (row, _) in rows.items()}
    news.add_events(shard.numbered_events(), news.rollouts, {key: writer for key, (_, writer) in rows.items()})
    for rollout in news.rollouts.values():
        rollout.counts = shard.counts(rollout.row)
    news.marks.next_rollout, news.marks.next_event = news.last_row + 1, shard.last_event() + 1
    return news


def mark_name(key: Key) -> str:
    """A rollout and try as one text."""
    return f"{key[0]}.{key[1]}"


def key_named(name: str) -> Key:
    """The rollout and try of a `mark_name`."""
    rollout, _, try_index = name.rpartition(".")
    return rollout, int(try_index)


def count_rollout(journal: JournalSource, rollout: FoundRollout) -> bool:
    """Count a rollout by its finish, else by the turns not counted yet. Return whether there are more."""
    data = {} if rollout.finish is None else rollout.finish.event.data
    if "sampled_tokens" in data:
        versions = tuple(data.get("versions", ()))
        rollout.counts = RolloutCounts(tuple(data["turns"]), int(data["sampled_tokens"]), versions)
        return True
    grew = False
    sessions = journal.sessions_of(rollout.row)
    earlier = journal.earlier_parts(rollout.row) if sessions and not rollout.sessions else None
    if earlier is not None:
        rollout.sampled_tokens, rollout.versions = earlier.sampled_tokens, list(earlier.versions)
    for session, ordinal, _ in sessions:
        if session not in rollout.sessions:
            rollout.sessions[session] = earlier.turns[ordinal] if earlier and ordinal < len(earlier.turns) else 0
            grew = True
        for sequence, sampled, facts in journal.sampled_since(session, rollout.sessions[session]):
            rollout.sessions[session] = sequence + 1
            rollout.sampled_tokens += sampled
            rollout.versions += [one for one in _versions(facts) if one not in rollout.versions]
            grew = True
    return grew


def _versions(facts: bytes) -> list[str]:
    """The weight versions that a turn's facts name."""
    found: dict[str, None] = {}
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        for segment in decode_numbers(facts)["segments"]:
            named = (segment.get(field) for field in ("first_version", "last_version"))
            found.update({version: None for version in named if version is not None})
    return list(found)

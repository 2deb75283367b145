"""The index of a run as its readers see it: rollouts by key, step or change, events, weight versions, and progress."""

import contextlib
import functools
import itertools
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from operator import attrgetter
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from rolltape.errors import AmbiguousId, DamagedTapeError, NoSuchRollout
from rolltape.forking import call_in_child
from rolltape.records.jsonable import decode_record
from rolltape.records.messages import Message
from rolltape.records.rollout import Annotations, Event, Rollout, RolloutHead, Status
from rolltape.tape.index.database import IndexFile, is_damage, read_about, select_events
from rolltape.tape.index.follower import Follower, Stop
from rolltape.tape.index.loading import Loader, Located, PartPlace
from rolltape.tape.index.queries import (
    STATUS,
    annotations_at,
    announced_versions,
    ordered_versions,
    source_problems,
)
from rolltape.tape.index.rows import SELECT_ROWS, RolloutRow
from rolltape.tape.index.sources import RunSources
from rolltape.tape.stored import Key, Problem, StoredEvent, decoded_event

_parents: list[object] = []  # a forked child must not use what its parent opened, not even to close it

STATUS_CODES = {Status.RUNNING: 0, Status.FINISHED: 1, Status.FAILED: 2, Status.LOST: 3}
_LOCATED_AT_ONCE = 64  # rollouts
_SHOWN = 5  # ids in an error
_KEYS = "(SELECT json_extract(value, '$[0]') AS wanted, json_extract(value, '$[1]') AS wanted_try FROM json_each(?))"
RESUMED = np.dtype([("id", "S16"), ("attempt", "<u8"), ("try_index", ">u4"), ("status", "u1"), ("rewarded", "?")])


P = ParamSpec("P")
T = TypeVar("T")


def _on_sound_index(query: "Callable[Concatenate[Index, P], T]") -> "Callable[Concatenate[Index, P], T]":
    """Make the index again, and repeat the query, if the query meets damage, as a loss of power may leave it."""

    @functools.wraps(query)
    def repeated(index: "Index", /, *args: P.args, **options: P.kwargs) -> T:
        with index._lock:
            try:
                return query(index, *args, **options)
            except sqlite3.DatabaseError as error:
                if not is_damage(error) or index._file.connection().in_transaction:  # `moment` handles it
                    raise
                index._file.discard()
                index.advance()
                return query(index, *args, **options)

    return repeated


class NamedTries(NamedTuple):
    """A rollout that an id means, and its tries: all of them, or those with this foreign id."""

    id: str
    tries: list[int]  # in their order


class Index:
    """The index of one run. Threads may share it."""

    def __init__(self, sources: RunSources, file: IndexFile, location: str, stop: Stop | None = None) -> None:
        self.location = location
        self._sources = sources
        self._file = file
        self._follower = Follower(sources, file, stop)
        self._loader = Loader(sources, location)
        self._lock = threading.RLock()
        self._noticed: dict[Problem, None] = {}
        call_in_child(self, Index._forget_parents)

    def advance(self) -> bool:
        """Index what was written before this call. Return whether anything was new."""
        with self._lock:
            for _ in range(2):
                try:
                    return self._follower.advance()
                # The index itself is damaged, or the disk is full.
                except (sqlite3.DatabaseError, msgspec.MsgspecError, OSError):
                    self._file.discard()
            return self._follower.advance()

    def look_again(self) -> None:
        """Make the next look include remote places, which are usually looked at only every few seconds."""
        self._sources.look_again()

    @contextlib.contextmanager
    def moment(self) -> Iterator[None]:
        """One snapshot for several queries of one thread."""
        with self._lock:
            try:
                with self._file.reading():
                    yield
            except sqlite3.DatabaseError as error:
                if not is_damage(error):
                    raise
                self._file.discard()
                raise DamagedTapeError(
                    f"{self.location}: its index is damaged, and is made again; try again"
                ) from error

    @_on_sound_index
    def rows(
        self, *, step: int | None = None, group: str | None = None, since_revision: int = -1, rollout: str | None = None
    ) -> list[RolloutRow]:
        """The rollouts, in the order of their start."""
        wanted, values = ["revision > ?"], [since_revision]
        for column, value in (("step", step), ("grp", group), ("id", rollout)):
            if value is not None:
                wanted.append(f"{column} = ?")
                values.append(value)  # type: ignore[arg-type]
        query = f"{SELECT_ROWS} WHERE {' AND '.join(wanted)}"
        with self._asking() as connection:
            rows = [RolloutRow(*row) for row in connection.execute(query, values).fetchall()]
        # They are nearly in this order; SQLite would copy all of them to sort them.
        return sorted(rows, key=attrgetter("started_at_ns", "id", "try_index"))

    @_on_sound_index
    def find(self, name: str, run: str) -> NamedTries:
        """The rollout that a name means: its id, else a foreign id, else the beginning of its id.

        A whole foreign id comes before the beginning of an own id, because more of an own id can be given. Raises
        NoSuchRollout if there is none, and AmbiguousId if there are several. `run` is for these errors.
        """
        if tries := self.tries(name):
            return NamedTries(name, tries)
        with self._asking() as connection:
            foreign: dict[str, list[int]] = {}
            for own, try_index in connection.execute(
                "SELECT id, try_index FROM foreign_ids NATURAL JOIN rollouts WHERE foreign_id = ? ORDER BY 1, 2",
                (name,),
            ):
                foreign.setdefault(own, []).append(try_index)
            if len(foreign) == 1:
                return NamedTries(*foreign.popitem())
            if foreign:
                several = _some(foreign, len(foreign))
                raise AmbiguousId(f"run {run}: {name!r} is a foreign id of {several}; give one of these ids")
            pattern = "".join(f"[{one}]" if one in "*?[" else one for one in name) + "*"
            found = connection.execute(
                f"SELECT DISTINCT id FROM rollouts WHERE id GLOB ? ORDER BY id LIMIT {_SHOWN + 1}", (pattern,)
            ).fetchall()
            if not name or not found:
                raise NoSuchRollout(f"run {run} holds no rollout {name!r}; `rolltape ls` lists those that it has")
            if len(found) > 1:
                ((count,),) = connection.execute(
                    "SELECT count(DISTINCT id) FROM rollouts WHERE id GLOB ?", (pattern,)
                ).fetchall()
                several = _some((own for (own,) in found), count)
                raise AmbiguousId(f"run {run}: {name!r} begins the ids of {several}; give more of it")
        return NamedTries(found[0][0], self.tries(found[0][0]))

    @_on_sound_index
    def next_attempt(self, group: str) -> int:
        """The number of the next attempt in a group, or 0 if there is none so far."""
        with self._asking() as connection:
            ((last,),) = connection.execute("SELECT max(attempt) FROM rollouts WHERE grp = ?", (group,)).fetchall()
        return 0 if last is None else int(last) + 1

    @_on_sound_index
    def tries(self, rollout: str) -> list[int]:
        """The tries of a rollout, in their order."""
        with self._asking() as connection:
            rows = connection.execute("SELECT try_index FROM rollouts WHERE id = ? ORDER BY try_index", (rollout,))
            return [one for (one,) in rows]

    def load(self, key: Key, located: Located | None = None) -> Rollout:
        """A rollout with its turns. One that was moved in the meantime is found at its new place."""
        with self._lock:
            for last in (False, True):
                try:
                    rollout, problems = self._loader.load(located or self.locate(key))
                    break
                except DamagedTapeError:
                    if last:
                        raise
                    located = None
                    self._follower.advance()
            self._noticed.update(dict.fromkeys(problems))
            return rollout

    def load_each(self, keys: Sequence[Key]) -> Iterator[Rollout]:
        """Rollouts with their turns, loaded one at a time. Many are located at once, which is faster."""
        for start in range(0, len(keys), _LOCATED_AT_ONCE):
            some = keys[start : start + _LOCATED_AT_ONCE]
            located = self._locate(some)
            for key in some:
                yield self.load(key, located.get(key))

    def load_with_problems(self, key: Key) -> tuple[Rollout, list[Problem]]:
        """A rollout with its turns, and what is missing of it."""
        with self._lock:
            return self._loader.load(self.locate(key))

    def messages(self, key: Key) -> list[Message]:
        """Each message of a rollout once, as far as it can be read, without its tokens."""
        with self._lock:
            return self._loader.messages(self.locate(key))

    def locate(self, key: Key) -> Located:
        """Where a rollout lies."""
        found = self._locate([key]).get(key)
        if found is None:
            raise NoSuchRollout(f"no rollout {key[0]} with a try {key[1]}")
        return found

    @_on_sound_index
    def _locate(self, keys: Sequence[Key]) -> dict[Key, Located]:
        wanted = (msgspec.json.encode(keys).decode(),)
        with self._asking() as connection:
            rows = connection.execute(
                "SELECT id, try_index, number, place, row, first_event, last_event, writer, epoch, finish IS NULL AND "
                "place IN (SELECT name FROM sources WHERE alive) "
                f"FROM {_KEYS} CROSS JOIN rollouts ON id = wanted AND try_index = wanted_try",
                wanted,
            ).fetchall()
            numbers = msgspec.json.encode([row[2] for row in rows]).decode()
            parts: dict[int, list[dict[str, Any]]] = {}
            for number, raw in connection.execute(
                "SELECT rollout, part FROM parts WHERE rollout IN (SELECT value FROM json_each(?))", (numbers,)
            ):
                parts.setdefault(number, []).append(msgspec.msgpack.decode(raw))
            there = {name for (name,) in connection.execute("SELECT name FROM sources")} if parts else set()
            apart: dict[Key, list[StoredEvent]] = {}
            for id_, try_index, *event in connection.execute(
                f"SELECT rollout, try_index, writer, sequence, body FROM {_KEYS} "
                "CROSS JOIN events ON rollout = wanted AND try_index = wanted_try",
                wanted,
            ):
                apart.setdefault((id_, try_index), []).append(decoded_event(*event))
        found: dict[Key, Located] = {}
        for id_, try_index, number, *place, epoch, alive in rows:
            key = (id_, try_index)
            chain = _chain(PartPlace(*place), parts.get(number, ()), epoch, there)
            found[key] = Located(key, chain, tuple(apart.get(key, ())), bool(alive))
        return found

    @_on_sound_index
    def events(self, *kinds: str, since_revision: int = -1) -> list[Event]:
        """Events of some kinds, in order. Events of a turn, traces, finishes, and scores that came with a finish are
        missing: they are read with their rollout."""
        marks = ", ".join("?" * len(kinds))
        with self._asking() as connection:
            found = select_events(connection, f"kind IN ({marks}) AND revision > ?", *kinds, since_revision)
        return [one.event for one in found]

    @_on_sound_index
    def annotations(self, key: Key) -> Annotations:
        """The tags and notes of one try of a rollout, those of its turns and tokens included."""
        with self._asking() as connection:
            found = annotations_at(connection, key)
        if found is None:
            raise NoSuchRollout(f"no rollout {key[0]} with a try {key[1]}")
        return found

    @_on_sound_index
    def versions(self) -> tuple[str, ...]:
        """Weight versions, oldest first: those never announced as they first appear, then as they were announced."""
        with self._asking() as connection:
            rows = connection.execute(
                "SELECT versions, min(started_ns) FROM rollouts GROUP BY versions ORDER BY 2"
            ).fetchall()
            announced = announced_versions(connection)
        return ordered_versions([version for raw, _ in rows for version in msgspec.json.decode(raw)], announced)

    @_on_sound_index
    def resumed(self, step: int, source: str | None) -> npt.NDArray[Any]:
        """How the rollouts of a step and source stand: an array of RESUMED, a row for each try, in no order."""
        # One text for all rows: Python objects for each row take three times as long. Nearly all rows end in the same
        # way, so that ending is a constant.
        codes = " ".join(f"WHEN '{status}' THEN {code}" for status, code in STATUS_CODES.items())
        usual = f"{STATUS_CODES[Status.FINISHED] * 256 + 1:012x}"
        with self._asking() as connection:
            ((packed,),) = connection.execute(
                f"SELECT group_concat(resume || CASE WHEN try_index = 0 AND finish = '{Status.FINISHED}' AND scored "
                f"IS NOT NULL THEN '{usual}' ELSE printf('%012x', try_index * 65536 + CASE {STATUS} {codes} END * 256 "
                "+ (scored IS NOT NULL)) END, '') FROM rollouts WHERE step = ? AND source IS ?",
                (step, source),
            ).fetchall()
        return np.frombuffer(bytes.fromhex(packed or ""), RESUMED)

    @_on_sound_index
    def group_heads(self, step: int, source: str | None) -> list[RolloutHead]:
        """The head of the latest rollout of each group of a step and source."""
        with self._asking() as connection:
            rows = connection.execute(
                "SELECT raw FROM heads WHERE number IN "
                "(SELECT max(number) FROM rollouts WHERE step = ? AND source IS ? GROUP BY grp)",
                (step, source),
            ).fetchall()
        return [decode_record(raw, RolloutHead, "a rollout") for (raw,) in rows]

    @_on_sound_index
    def writers(self) -> frozenset[str]:
        """The writers whose processes were alive at the last look."""
        with self._asking() as connection:
            rows = connection.execute("SELECT name FROM sources WHERE alive").fetchall()
        return frozenset(name.partition("/")[2] for (name,) in rows)

    @_on_sound_index
    def revision(self) -> tuple[int, int]:
        """When the index was made, and its revision, which grows with every change. One made again begins anew."""
        with self._asking() as connection:
            return int(read_about(connection, "made", 0)), int(read_about(connection, "revision", 0))

    @_on_sound_index
    def problems(self) -> list[Problem]:
        """What the follower could not read, and what could not be read when rollouts were loaded here."""
        with self._asking() as connection:
            found = source_problems(connection)
        return list(dict.fromkeys([*found, *self._noticed]))

    @_on_sound_index
    def ask(self, question: Callable[[sqlite3.Connection], Any]) -> Any:
        """Query the database itself, in one snapshot."""
        with self._lock, self._file.reading() as connection:
            return question(connection)

    @property
    def file(self) -> IndexFile:
        """The file that holds it."""
        return self._file

    def close(self) -> None:
        """Close all files. A later call opens them again."""
        with self._lock:
            self._follower.close()
            self._loader.close()
            self._file.close()

    @contextlib.contextmanager
    def _asking(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            yield self._file.connection()

    def _forget_parents(self) -> None:
        """In a forked child: do not use what the parent has opened."""
        self._lock = threading.RLock()
        _parents.append((self._follower, self._loader))
        self._file.forget()
        self._follower = Follower(self._sources, self._file)
        self._loader = Loader(self._sources, self.location)


def _chain(owner: PartPlace, parts: Iterable[dict[str, Any]], epoch: int, there: Set[str]) -> tuple[PartPlace, ...]:
    """The parts of a rollout, that of its owner last; `there` are the sources that the run still has."""
    chain = [owner]
    for part in sorted((part for part in parts if part["epoch"] < epoch), key=lambda part: -part["epoch"]):
        # A shard also holds all turns before its part, but not always the events about them.
        is_needed = chain[-1].has_turns and not chain[-1].source.startswith("shard/")
        if is_needed or part["place"] in there:
            fields = (part[field] for field in ("row", "first_event", "last_event", "writer"))
            chain.append(PartPlace(part["place"], *fields)._replace(has_turns=is_needed))
    return tuple(reversed(chain))


def _some(ids: Iterable[str], count: int) -> str:
    shown = list(itertools.islice(ids, _SHOWN))
    return f"{count} rollouts ({', '.join(shown)}{', …' if count > len(shown) else ''})"

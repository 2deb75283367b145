"""Fills in, in the background, what the index lacks: summaries and words of rollouts that have ended."""

import contextlib
import fcntl
import sqlite3
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple, Self

import msgspec

from rolltape.records.messages import Message
from rolltape.records.sample import RolloutSummary
from rolltape.tape.index import search
from rolltape.tape.index.applying import store_summary
from rolltape.tape.index.database import read_about, write_about
from rolltape.tape.index.index import Index
from rolltape.tape.index.queries import ENDED
from rolltape.tape.rundir import open_private
from rolltape.tape.stored import Key, Summarize

_AT_ONCE = 64  # rollouts in a transaction

Stop = Callable[[], bool]


class _Lacking(NamedTuple):
    """A rollout and what the index lacks of it, as it was when it was looked up."""

    number: int
    key: Key
    place: str
    changed: str
    summary: bool
    words: bool
    has_turns: bool


class _Read(NamedTuple):
    lacking: _Lacking
    summary: RolloutSummary | None
    messages: Sequence[Message] | None
    problems: tuple[str, ...]


def fill(index: Index, summarize: Summarize, stop: Stop = lambda: False, *, words: bool = True) -> None:
    """Fill in all that is lacking, until `stop` returns true."""
    with Filler(index, summarize, words=words) as filler:
        filler.fill(stop)


class Filler:
    """Fills one index. Of several processes, the first begins with the newest rollouts, others with the oldest."""

    def __init__(self, index: Index, summarize: Summarize, *, words: bool = True) -> None:
        self._index = index
        self._summarize = summarize
        self._words = words
        self._lacking: list[int] = []  # numbers of rollouts, the newest last
        self._looked_at: tuple[object, int] = (None, -1)  # the file and revision of the last look
        self._lock = contextlib.ExitStack()
        self._is_first = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process be the first."""
        self._lock.close()
        self._is_first = False

    def fill(self, stop: Stop) -> bool:
        """Fill in what is lacking. Return whether everything was filled in before `stop` returned true."""
        self._is_first = self._is_first or self._locked()
        try:
            while not stop():
                self._look()
                if not self._lacking:
                    return True
                self._fill_some(stop)
        except BaseException:
            self._looked_at = (None, -1)  # look again for what was being filled in
            raise
        return False

    def _fill_some(self, stop: Stop) -> None:
        read: list[_Read] = []
        for _ in range(min(_AT_ONCE, len(self._lacking))):
            if stop():
                break
            lacking = self._still_lacking(self._lacking.pop(-1 if self._is_first else 0))
            found = None if lacking is None else self._read(lacking)
            if found is not None:
                read.append(found)
        self._store(read)

    def _locked(self) -> bool:
        handle = self._lock.enter_context(open_private(self._index.file.folder / "background.lock", "ab"))
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        self._lock.close()
        return False

    def _look(self) -> None:
        """Add the rollouts that have changed since the last look and lack something."""
        with self._index.file.reading() as connection:
            revision, path = int(read_about(connection, "revision", 0)), self._index.file.path
            if self._looked_at[0] != path:
                self._lacking.clear()
                self._looked_at = (path, -1)
            if revision != self._looked_at[1]:
                # Not in order: to order them, SQLite would read all rollouts each time.
                question = f"SELECT number FROM {_LACKING} AND revision > ?"
                rows = connection.execute(question, (self._words, self._looked_at[1])).fetchall()
                if rows:
                    self._lacking = sorted({*self._lacking, *(number for (number,) in rows)})
                self._looked_at = (path, revision)

    def _still_lacking(self, number: int) -> _Lacking | None:
        """What a rollout lacks now, or None if there is nothing to fill in."""
        columns = "id, try_index, place, changed, s.rollout IS NULL OR u.rollout IS NOT NULL, w.rollout IS NULL, pruned"
        question = f"SELECT {columns} FROM {_LACKING} AND number = ?"
        row = self._index.file.connection().execute(question, (self._words, number)).fetchone()
        if row is None:
            return None
        id_, try_index, place, changed, summary, words, pruned = row
        has_turns = "turns" not in msgspec.json.decode(pruned)
        return _Lacking(number, (id_, try_index), place, changed, bool(summary), bool(words) and self._words, has_turns)

    def _read(self, lacking: _Lacking) -> _Read | None:
        """Read a rollout, or return None if it has changed in the meantime and will be found again."""
        read = self._read_once(lacking)
        if read.problems:
            # It may have been moved, which is no damage: the index then has its new place.
            self._index.advance()
            now = self._still_lacking(lacking.number)
            if now is None or (now.place, now.changed) != (lacking.place, lacking.changed):
                return None
        return read

    def _read_once(self, lacking: _Lacking) -> _Read:
        try:
            if not lacking.summary:
                return _Read(lacking, None, self._index.messages(lacking.key) if lacking.has_turns else [], ())
            rollout, problems = self._index.load_with_problems(lacking.key)
            summary = self._summarize(rollout)
        except Exception as error:  # noqa: BLE001 - what a recorded message may hold has no end, nor the ways it can fail
            problem = f"rollout {lacking.key[0]} (try {lacking.key[1]}) cannot be read: {error}"
            return _Read(lacking, None, None, (problem,))
        messages = list(search.distinct_messages(rollout)) if lacking.words else None
        return _Read(lacking, summary, messages, tuple(map(str, problems)))

    def _store(self, read: Collection[_Read]) -> None:
        if not read:
            return
        with self._index.file.writing() as connection:
            revision = int(read_about(connection, "revision", 0)) + 1
            for one in _unchanged(connection, read):
                self._store_one(connection, one, revision)
            write_about(connection, "revision", revision)

    def _store_one(self, connection: sqlite3.Connection, read: _Read, revision: int) -> None:
        number, changed, problems = read.lacking.number, read.lacking.changed, list(read.problems)
        if read.summary is not None:
            store_summary(connection, number, read.summary, changed, problems, revision)
        if read.messages is not None and read.lacking.words:
            problems += _index_words(connection, number, read.messages)
        connection.execute("DELETE FROM unread WHERE rollout = ?", (number,))
        if problems:
            missing = msgspec.json.encode(problems).decode()
            connection.execute("INSERT INTO unread VALUES (?, ?, ?, ?)", (number, read.lacking.place, changed, missing))
            connection.execute("UPDATE rollouts SET revision = ? WHERE number = ?", (revision, number))


# What could not be read, or not in full, is read again once it has moved or changed.
_LACKING = f"""rollouts LEFT JOIN summaries s ON s.rollout = number LEFT JOIN searchable w ON w.rollout = number
    LEFT JOIN unread u ON u.rollout = number
    WHERE (s.rollout IS NULL OR (? AND w.rollout IS NULL) OR u.rollout IS NOT NULL)
    AND (u.rollout IS NULL OR at_place != place OR at_change != changed) AND {ENDED}"""


def _unchanged(connection: sqlite3.Connection, read: Collection[_Read]) -> Iterator[_Read]:
    """The rollouts that are still where they were read, and that have not changed since."""
    for one in read:
        row = connection.execute(
            "SELECT id, try_index, place, changed FROM rollouts WHERE number = ?", (one.lacking.number,)
        ).fetchone()
        if row == (*one.lacking.key, one.lacking.place, one.lacking.changed):
            yield one


def _index_words(connection: sqlite3.Connection, number: int, messages: Sequence[Message]) -> list[str]:
    """Make a rollout searchable. Return the problem if its messages cannot be searched."""
    if connection.execute("SELECT 1 FROM searchable WHERE rollout = ?", (number,)).fetchone():
        return []
    connection.execute("SAVEPOINT words")
    try:
        search.add(connection, number, messages)
    except sqlite3.Error:
        raise
    except Exception as error:  # noqa: BLE001 - as above
        connection.execute("ROLLBACK TO words")
        return [f"its messages cannot be searched: {error}"]
    connection.execute("RELEASE words")
    return []

"""The follower, the one reader that updates the index of a run from its journals and shards.

It reads each journal in one read transaction. If a process wrote while it opened them, it begins again, so that it sees
all journals at one moment. It writes what it finds in one transaction. A large source is written piece by piece: until
then the index reports how much of it is there, and each row that is there is complete.
"""

import contextlib
import fcntl
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from rolltape.errors import DamagedTapeError
from rolltape.tape.index.applying import Applier
from rolltape.tape.index.database import IndexFile, read_about, write_about
from rolltape.tape.index.sources import Marks, News, RunSources, is_older, journal_news, shard_news
from rolltape.tape.journal.file import is_alive
from rolltape.tape.journal.reading import JournalSource
from rolltape.tape.rundir import make_private_folder, open_private
from rolltape.tape.shards.reading import ShardSource
from rolltape.tape.shards.writing import MANIFEST
from rolltape.tape.stored import Problem, check_shortage, read_errors

_PIECE = 4_000  # rollouts in a transaction
_STUCK_S = 5.0  # without a sign of life from the process that holds the lock
_CUT_TRIES = 40  # to see all journals at one moment, without a write in between

Stop = Callable[[str], None]  # called between any two reads, with what comes next: for tests


class _Pinned(NamedTuple):
    """A journal as it was at one moment, and its last event then."""

    journal: JournalSource
    last_event: int


class Follower:
    """Follows one run. For one thread at a time."""

    def __init__(self, sources: RunSources, file: IndexFile, stop: Stop | None = None) -> None:
        self._sources = sources
        self._file = file
        self._stop: Stop = stop or (lambda what: None)
        self._journals: dict[Path, JournalSource] = {}  # those that are read again and again

    def advance(self) -> bool:
        """Index what was written before this call. Return whether anything was new."""
        with self._locked():
            changed = self._advance()
            if not read_about(self._file.connection(), "looked", 0):
                with self._file.writing() as connection:
                    applier = Applier(connection)
                    write_about(connection, "looked", 1)
                    applier.finish()
            return changed

    def close(self) -> None:
        """Close all files."""
        for journal in self._journals.values():
            journal.close()
        self._journals.clear()

    def _advance(self) -> bool:
        changed = False
        while True:
            marks = self._marks()
            known = {name for name in marks if name.startswith("shard/")}
            whole = {name for name in known if not marks[name].is_partial}
            pinned, shards, gone = self._cut(marks, whole)
            try:
                gone |= known - {shard.name for shard in shards}
                fresh = [shard for shard in shards if shard.name not in whole]
                if self._is_older(pinned, marks):
                    self._file.replace(keep=False)
                    continue
                taken = self._take_in(pinned, fresh, marks, gone)
            finally:
                for one in pinned:
                    one.journal.unpin()
                self._let_go(pinned)
            if taken is None:
                continue  # another follower was faster, perhaps with an earlier state
            changed = taken or changed
            if not self._misses(gone, marks):
                return changed
            self._file.replace(keep=False)  # a source was removed with rollouts or events that are nowhere else

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the follower's lock, or continue without it if its holder seems stopped: all writing is safe."""
        with contextlib.ExitStack() as held:
            try:
                make_private_folder(self._file.folder, parents=False)  # it may be deleted at any time, and the run too
                handle = held.enter_context(open_private(self._file.lock_path, "ab"))
            except OSError:  # a full disk: this process then indexes for itself
                yield
                return
            seen, since_s = None, time.monotonic()
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    signed_s = self._file.lock_path.stat().st_mtime
                    if signed_s != seen:
                        seen, since_s = signed_s, time.monotonic()
                    # By both clocks: by the first, nobody waits anew for a process that was stopped long ago.
                    if max(time.time() - signed_s, time.monotonic() - since_s) > _STUCK_S:
                        break
                    time.sleep(0.02)
            self._sign()
            yield

    def _sign(self) -> None:
        with contextlib.suppress(OSError):
            os.utime(self._file.lock_path)

    def _marks(self) -> dict[str, Marks]:
        return _read_marks(self._file.connection())

    def _cut(self, marks: dict[str, Marks], known: set[str]) -> tuple[list[_Pinned], list[ShardSource], set[str]]:
        """All journals that may hold something new, and all shards, without a write in between.

        It also returns the names of the journals that were removed.
        """
        for _ in range(_CUT_TRIES):
            paths = self._sources.journal_paths()
            gone = {name for name in marks if name.startswith("journal/")} - {f"journal/{path.stem}" for path in paths}
            if gone:
                self._sources.look_again()  # their rollouts are in shards now, perhaps at a remote place
            opened = [journal for path in paths if (journal := self._opened(path, marks))]
            pinned = []
            for journal in opened:
                self._stop(f"pin {journal.writer}")
                # First look whether the writer is alive: then all that a dead writer wrote is seen.
                journal.probe()
                try:
                    pinned.append(_Pinned(journal, journal.pin()))
                except sqlite3.DatabaseError as error:
                    if journal.path.exists():
                        check_shortage(error, journal.path)
                        problem = Problem(journal.where, str(error), "possibly everything in it")
                        self._note_problem(journal.name, problem)
            # Journals first: one that is sealed and removed in the meantime is found among the shards.
            self._stop("shards")
            shards = self._sources.shards(known)
            self._stop("cut")
            if paths == self._sources.journal_paths() and not any(one.journal.has_news() for one in pinned):
                break
        return pinned, shards, gone

    def _opened(self, path: Path, marks: dict[str, Marks]) -> JournalSource | None:
        """Open a journal, or return None if all of it is known or it cannot be read."""
        held = self._journals.get(path)
        if held is not None:
            return held
        name, mark = f"journal/{path.stem}", marks.get(f"journal/{path.stem}")
        if mark is not None and mark.signature and mark.signature == _signature(path) and not is_alive(path):
            return None
        self._stop(f"open {path.stem}")
        try:
            journal = self._journals[path] = JournalSource(path)
        except read_errors() as error:
            if path.exists():
                check_shortage(error, path)
                problem = error.args[0] if isinstance(error, DamagedTapeError) else str(error)
                self._note_problem(name, Problem(f"journal {path.name}", str(problem), "everything in it"))
            return None
        return journal

    def _note_problem(self, name: str, problem: Problem) -> None:
        held = self._file.connection().execute("SELECT problem FROM problems WHERE source = ?", (name,)).fetchall()
        if (msgspec.json.encode(problem).decode(),) in held:
            return
        with self._file.writing() as connection:
            applier = Applier(connection)
            applier.set_problems(name, [problem])
            applier.finish()

    def _take_in(
        self, pinned: list[_Pinned], shards: list[ShardSource], marks: dict[str, Marks], gone: set[str]
    ) -> bool | None:
        """Read what is new, and write it into the index. Return whether there was anything new, as `_write` does."""
        news: list[News] = []
        unreadable: dict[str, Problem] = {}
        for journal, _ in pinned:
            self._stop(f"read {journal.writer}")
            try:
                news.append(journal_news(journal, marks.get(journal.name, Marks(1))))
            except read_errors() as error:
                if journal.path.exists():  # else it was sealed and removed in the meantime
                    check_shortage(error, journal.path)
                    unreadable[journal.name] = Problem(journal.where, str(error), "everything in it")
        for shard in shards:
            self._stop(f"read {shard.shard}")
            try:
                news.append(shard_news(shard))
            except read_errors() as error:
                check_shortage(error, shard.where)
                if shard.place.read("shards", shard.shard, MANIFEST) is not None:
                    unreadable[shard.name] = Problem(shard.where, str(error), "everything in it")
                shard.close()
        self._stop("write")
        changed = self._write(news, marks, gone, unreadable)
        for shard in shards:
            shard.close()
        return changed

    def _write(
        self, news: list[News], marks: dict[str, Marks], gone: set[str], unreadable: dict[str, Problem]
    ) -> bool | None:
        """Write what is new. Return whether there was anything new, or None if another follower wrote meanwhile."""
        size = sum(one.last_row - one.first_row + 1 for one in news)
        place_problems = self._sources.problems()
        if not self._is_worth_it(news, gone, unreadable, place_problems):
            return False
        if size > _PIECE:
            after_pieces = self._write_pieces(news, gone, marks)
            if after_pieces is None:
                return None
            marks = after_pieces
        with self._file.writing() as connection:
            if _read_marks(connection) != marks:
                return None
            applier = Applier(connection, gone)
            for one in news:
                applier.add_events(one.apart)
            for one in news:
                applier.add_rollouts(one, one.source.heads(_next_row(one, marks), one.last_row))
                applier.apply(one)
                _set_source(connection, applier, one)
            for one in news:
                applier.apply_summaries(one)
            for name in gone:
                connection.execute("DELETE FROM sources WHERE name = ?", (name,))
                connection.execute("DELETE FROM problems WHERE source = ?", (name,))
            for name, problem in unreadable.items():
                applier.set_problems(name, [problem])
            applier.set_problems("run", place_problems)
            write_about(connection, "behind", 0)
            applier.finish()
        return True

    def _write_pieces(self, news: list[News], gone: set[str], marks: dict[str, Marks]) -> dict[str, Marks] | None:
        """Write most of what is new a piece at a time, so that no process waits long. `_write` writes the rest.

        Events are written before rollouts, so a row is complete as soon as it is there. Return how far each source
        counts as read then, or None if another follower wrote meanwhile.
        """
        for one in news:
            with self._file.writing() as connection:
                applier = Applier(connection, gone)
                applier.add_events(one.apart)
                applier.finish()
        known = set(self._file.connection().execute("SELECT id, try_index FROM rollouts"))
        unknown = {key for one in news for key in one.fresh} - known  # others have moved
        for one in news:
            first = _next_row(one, marks)
            while one.last_row - first >= _PIECE:
                self._stop("piece")
                self._sign()
                heads = list(one.source.heads(first, first + _PIECE - 1))
                first += _PIECE
                unknown.difference_update(found.head.key for found in heads)
                with self._file.writing() as connection:
                    if _read_marks(connection) != marks:
                        return None
                    applier = Applier(connection, gone)
                    applier.add_rollouts(one, heads)
                    held = _marks_within(one, marks.get(one.name) or Marks(), first)
                    marks = {**marks, one.name: held}
                    connection.execute(
                        "INSERT OR REPLACE INTO sources VALUES (?, ?, ?)",
                        (one.name, msgspec.msgpack.encode(held), one.source.alive),
                    )
                    write_about(connection, "behind", len(unknown))
                    applier.finish()
        return marks

    def _is_worth_it(
        self, news: list[News], gone: set[str], unreadable: dict[str, Problem], places: list[Problem]
    ) -> bool:
        """Whether there is anything to write."""
        connection = self._file.connection()
        alive = {name for (name,) in connection.execute("SELECT name FROM sources WHERE alive")}
        if gone or any(not one.is_empty or one.name not in alive or not one.source.alive for one in news):
            return True
        held: dict[str, set[str]] = {}
        for source, problem in connection.execute("SELECT source, problem FROM problems"):
            held.setdefault(source, set()).add(problem)
        wanted = {"run": places, **{name: [one] for name, one in unreadable.items()}}
        wanted |= {one.name: list(one.source.problems()) for one in news}
        return bool(read_about(connection, "behind", 0)) or any(
            held.get(name, set()) != {msgspec.json.encode(one).decode() for one in problems}
            for name, problems in wanted.items()
        )

    def _is_older(self, pinned: list[_Pinned], marks: dict[str, Marks]) -> bool:
        """Whether a journal lacks what was read from it: it was put back, or a copy of the run is not of one moment."""
        return any(
            one.last_event + 1 < marks[name].next_event or is_older(one.journal, marks[name])
            for one in pinned
            if (name := one.journal.name) in marks
        )

    def _misses(self, gone: set[str], marks: dict[str, Marks]) -> bool:
        """Whether the index has rollouts or events of a source that is gone, and no other source has them."""
        if not gone:
            return False
        there = self._marks().values()
        for name in gone:
            if self._file.connection().execute("SELECT 1 FROM rollouts WHERE place = ? LIMIT 1", (name,)).fetchone():
                return True
            for writer, last in marks[name].last_events.items():
                if last > max((one.last_events.get(writer, -1) for one in there), default=-1):
                    return True
        return False

    def _let_go(self, pinned: list[_Pinned]) -> None:
        """Close the journals of writers that have ended, and those that are gone."""
        dead = {one.journal.path for one in pinned if not one.journal.alive}
        for path in [path for path in self._journals if path in dead or not path.exists()]:
            self._journals.pop(path).close()


def _read_marks(connection: sqlite3.Connection) -> dict[str, Marks]:
    """How far each source was read, by its name."""
    rows = connection.execute("SELECT name, marks FROM sources").fetchall()
    return {name: msgspec.msgpack.decode(raw, type=Marks) for name, raw in rows}


def _next_row(news: News, marks: dict[str, Marks]) -> int:
    """The first rollout of a source that is not indexed yet."""
    return marks[news.name].next_rollout if news.name in marks else news.first_row


def _marks_within(news: News, held: Marks, next_rollout: int) -> Marks:
    """How far a source counts as read when only its rollouts before a row are indexed.

    Its events count as unread. If this is interrupted, they are read again, also those about rollouts that ran.
    """
    running = {name: one for name, one in news.marks.open.items() if news.first_row <= one.row < next_rollout}
    return msgspec.structs.replace(
        held, next_rollout=next_rollout, open=held.open | running, is_partial=not isinstance(news.source, JournalSource)
    )


def _set_source(connection: sqlite3.Connection, applier: Applier, news: News) -> None:
    """Note how far a source was read."""
    marks, source = news.marks, news.source
    if isinstance(source, JournalSource):
        marks.signature = "" if source.alive else _signature(source.path)
        applier.set_writer(news.name, source.writer, source.alive)
    connection.execute(
        "INSERT OR REPLACE INTO sources VALUES (?, ?, ?)", (news.name, msgspec.msgpack.encode(marks), source.alive)
    )
    applier.set_problems(news.name, list(source.problems()))


def _signature(path: Path) -> str:
    """The sizes and times of a journal's files, which change with every write."""
    parts = []
    for name in (path, Path(f"{path}-wal")):
        with contextlib.suppress(OSError):
            about = name.stat()
            parts.append(f"{about.st_size}:{about.st_mtime_ns}")
    return ",".join(parts) or "gone"

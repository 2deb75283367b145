"""Full-text search over the messages of rollouts that have ended: RUN/cache/search-1.sqlite, which may be deleted.

A rollout is found if each word, and each phrase in quotes, occurs somewhere in its messages. System prompts, which
thousands of rollouts share, are kept once.
"""

import contextlib
import fcntl
import json
import re
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from rolltape.records.messages import Message, Role, content_text
from rolltape.records.rollout import Rollout
from rolltape.view.reports import Key
from rolltape.view.table import Array

_FILE = "search-1.sqlite"
_TABLES = """
CREATE TABLE IF NOT EXISTS rollouts (number INTEGER PRIMARY KEY, id TEXT NOT NULL, try_index INTEGER NOT NULL,
    UNIQUE (id, try_index));
CREATE TABLE IF NOT EXISTS shared (number INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS uses (shared INTEGER NOT NULL, rollout INTEGER NOT NULL, PRIMARY KEY (shared, rollout))
    WITHOUT ROWID;
CREATE VIRTUAL TABLE IF NOT EXISTS said USING fts5(text, content='');
CREATE VIRTUAL TABLE IF NOT EXISTS said_by_many USING fts5(text, content='');
"""
_SHARED_ROLES = (Role.SYSTEM, Role.DEVELOPER)
_BETWEEN = "\n\ue000\n"  # a word of its own, so that no phrase reaches from one message into the next
# Scripts without spaces: each character is a word, and what is asked for a phrase.
_UNSPACED = re.compile("([\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff])")
_ASKED = re.compile(r'"([^"]*)"|(\S+)')


class SearchIndex:
    """The index of a run, for the one process that writes it."""

    def __init__(self, folder: Path) -> None:
        self._lock = (folder / f"{_FILE}.lock").open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise
        try:
            self._connection = _made(folder / _FILE)
        except sqlite3.DatabaseError:
            # Damaged: all of it can be made again.
            for name in (_FILE, f"{_FILE}-wal", f"{_FILE}-shm"):
                (folder / name).unlink(missing_ok=True)
            self._connection = _made(folder / _FILE)

    def add(self, rollout: Rollout) -> int:
        """Put a rollout in; its number."""
        known = self._connection.execute(
            "SELECT number FROM rollouts WHERE id = ? AND try_index = ?", rollout.key
        ).fetchone()
        if known is not None:
            return int(known[0])
        number = self._connection.execute("INSERT INTO rollouts (id, try_index) VALUES (?, ?)", rollout.key).lastrowid
        assert number is not None
        own: list[str] = []
        for message in distinct_messages(rollout):
            if message.role in _SHARED_ROLES:
                self._use(message, number)
            else:
                own.append(words_of(_text_of(message)))
        self._connection.execute("INSERT INTO said (rowid, text) VALUES (?, ?)", (number, _BETWEEN.join(own)))
        return number

    def _use(self, message: Message, number: int) -> None:
        run = self._connection.execute
        row = run("SELECT number FROM shared WHERE digest = ?", (message.digest,)).fetchone()
        if row is None:
            shared = run("INSERT INTO shared (digest) VALUES (?)", (message.digest,)).lastrowid
            run("INSERT INTO said_by_many (rowid, text) VALUES (?, ?)", (shared, words_of(_text_of(message))))
        else:
            (shared,) = row
        run("INSERT OR IGNORE INTO uses VALUES (?, ?)", (shared, number))

    def commit(self) -> None:
        """Make what was put in visible to those who search."""
        self._connection.commit()

    def close(self) -> None:
        self._connection.commit()
        self._connection.close()
        self._lock.close()


def indexed(folder: Path) -> Iterator[tuple[int, Key]]:
    """The rollouts in the index, by number."""
    with contextlib.suppress(sqlite3.Error), contextlib.closing(_opened(folder)) as connection:
        for number, rollout, try_index in connection.execute("SELECT number, id, try_index FROM rollouts"):
            yield number, (rollout, try_index)


def found(folder: Path, asked: str) -> Array:
    """The numbers of the rollouts in which all that is asked for occurs, in order."""
    numbers: Array | None = None
    with contextlib.closing(_opened(folder)) as connection:
        for term in terms_of(asked):
            has_term = _having(connection, term)
            numbers = has_term if numbers is None else np.intersect1d(numbers, has_term, assume_unique=True)
    return np.empty(0, np.int64) if numbers is None else numbers


def _having(connection: sqlite3.Connection, term: str) -> Array:
    own = connection.execute("SELECT rowid FROM said WHERE said MATCH ?", (term,))
    shared = connection.execute(
        "SELECT DISTINCT rollout FROM uses WHERE shared IN (SELECT rowid FROM said_by_many WHERE said_by_many MATCH ?)",
        (term,),
    )
    return np.unique(np.array([number for rows in (own, shared) for (number,) in rows], np.int64))


def terms_of(asked: str) -> list[str]:
    """What is asked for as terms of the index: words, and phrases in quotes; a word that ends in * as a beginning."""
    terms = []
    for phrase, word in _ASKED.findall(asked):
        text = words_of(phrase or word.rstrip("*")).replace('"', " ").replace("\0", " ")
        if any(character.isalnum() for character in text):
            terms.append(f'"{text}"' + ("*" if word.endswith("*") else ""))
    return terms


def words_of(text: str) -> str:
    """Text as the index takes it."""
    return text if text.isascii() else _UNSPACED.sub(r" \1 ", text)


def _text_of(message: Message) -> str:
    """All that a message says: its thinking, its text, and its calls."""
    value = message.to_dict()
    parts = [content_text(value.get("reasoning_content") or value.get("reasoning")), content_text(value.get("content"))]
    for call in value.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, dict) else {"name": call}
        named = (function.get(name) for name in ("name", "arguments")) if isinstance(function, dict) else ()
        parts += [one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in named]
    return "\n".join(parts)


def distinct_messages(rollout: Rollout) -> Iterable[Message]:
    """Each message of a rollout once, in the order in which they first came."""
    found: dict[bytes, Message] = {}
    for turn in rollout.turns:
        for message in turn.prompt.own:
            found.setdefault(message.digest, message)
        if turn.reply is not None:
            found.setdefault(turn.reply.digest, turn.reply)
    return found.values()


def _made(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("PRAGMA cache_size = -65536")
    connection.executescript(_TABLES)
    return connection


def _opened(folder: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{(folder / _FILE).as_uri()}?mode=ro", uri=True)
    connection.execute("PRAGMA cache_size = -32768")
    connection.execute("PRAGMA busy_timeout = 2000")
    return connection

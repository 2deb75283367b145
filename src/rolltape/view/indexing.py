"""The index for the full-text search over messages: RUN/cache/search-1.sqlite, which may be deleted.

System prompts, which thousands of rollouts share, are kept once.
"""

import contextlib
import fcntl
import json
import re
import sqlite3
from pathlib import Path

from rolltape.records.messages import Message, Role, content_text
from rolltape.records.rollout import Rollout
from rolltape.view.messages import distinct_messages

INDEX_FILE = "search-1.sqlite"
_TABLES = """
CREATE TABLE IF NOT EXISTS about (run REAL, made TEXT NOT NULL);
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


class SearchIndex:
    """The index of a run, for the one process that writes it; a BlockingIOError says that another one does."""

    def __init__(self, folder: Path, created: float | None) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._lock = (folder / f"{INDEX_FILE}.lock").open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._open(created)
        except (OSError, sqlite3.Error):
            self._lock.close()
            raise

    def _open(self, created: float | None) -> None:
        try:
            self._connection = _made(self._folder / INDEX_FILE)
            of_run, self.made = self._identity(created)
            is_other = of_run != created
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            is_other = True
        if is_other:  # damaged, or of another run that was here before: all of it can be made again
            self.remove()
            self._connection = _made(self._folder / INDEX_FILE)
            _, self.made = self._identity(created)
        self._file = (self._folder / INDEX_FILE).stat().st_ino

    def _identity(self, created: float | None) -> tuple[float | None, str]:
        """Of which run it is, and a name that tells it from one made again."""
        run = self._connection.execute
        run("INSERT INTO about SELECT ?, hex(randomblob(8)) WHERE NOT EXISTS (SELECT 1 FROM about)", (created,))
        self._connection.commit()
        of_run, made = run("SELECT run, made FROM about").fetchone()
        return of_run, str(made)

    @property
    def is_there(self) -> bool:
        """Whether the file that it writes still has its name."""
        with contextlib.suppress(OSError):
            return (self._folder / INDEX_FILE).stat().st_ino == self._file
        return False

    def remove(self) -> None:
        """Delete the files."""
        for name in (INDEX_FILE, f"{INDEX_FILE}-wal", f"{INDEX_FILE}-shm"):
            (self._folder / name).unlink(missing_ok=True)

    def add(self, rollout: Rollout) -> int:
        """Put a rollout in; its number."""
        known = self._connection.execute(
            "SELECT number FROM rollouts WHERE id = ? AND try_index = ?", rollout.key
        ).fetchone()
        if known is not None:
            return int(known[0])
        # All words before the first row is written: a message that has none to be had leaves nothing half done.
        messages = list(distinct_messages(rollout))
        shared = [one for one in messages if one.role in _SHARED_ROLES]
        new_words = {one.digest: words_of(_text_of(one)) for one in shared if self._shared(one.digest) is None}
        own = [words_of(_text_of(one)) for one in messages if one.role not in _SHARED_ROLES]
        number = self._connection.execute("INSERT INTO rollouts (id, try_index) VALUES (?, ?)", rollout.key).lastrowid
        assert number is not None
        for digest, words in new_words.items():
            self._share(digest, words)
        for message in shared:
            uses = (self._shared(message.digest), number)
            self._connection.execute("INSERT OR IGNORE INTO uses VALUES (?, ?)", uses)
        self._connection.execute("INSERT INTO said (rowid, text) VALUES (?, ?)", (number, _BETWEEN.join(own)))
        return number

    def _shared(self, digest: bytes) -> int | None:
        """The number of a message that many share; None: it is not in yet."""
        row = self._connection.execute("SELECT number FROM shared WHERE digest = ?", (digest,)).fetchone()
        return None if row is None else int(row[0])

    def _share(self, digest: bytes, words: str) -> None:
        number = self._connection.execute("INSERT INTO shared (digest) VALUES (?)", (digest,)).lastrowid
        self._connection.execute("INSERT INTO said_by_many (rowid, text) VALUES (?, ?)", (number, words))

    def commit(self) -> None:
        """Make what was put in visible to those who search."""
        self._connection.commit()

    def close(self) -> None:
        try:
            self._connection.commit()
        finally:
            self._connection.close()
            self._lock.close()


def words_of(text: str) -> str:
    """Text as the index takes it."""
    return text if text.isascii() else _UNSPACED.sub(r" \1 ", text)


def _text_of(message: Message) -> str:
    """All that a message says: its thinking, its text, and its calls."""
    value = message.to_dict()
    parts = [
        content_text(value.get("reasoning_content") or value.get("reasoning")),
        _content_words(value.get("content")),
    ]
    for call in value.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, dict) else {"name": call}
        named = (function.get(name) for name in ("name", "arguments")) if isinstance(function, dict) else ()
        parts += [one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in named]
    return "\n".join(parts)


def _content_words(content: object) -> str:
    """The text of a content field, and what else its parts say: thinking, calls and results that are parts."""
    others = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    said = [part[name] for part in others for name in ("thinking", "name", "input", "content") if part.get(name)]
    spelled = (one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in said)
    return "\n".join((content_text(content), *spelled))


def _made(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("PRAGMA cache_size = -65536")
    connection.executescript(_TABLES)
    return connection

"""Full-text search over the messages of rollouts, and the notes on them.

A rollout is found if each word, and each phrase in quotes, occurs somewhere in its messages or in a note. System
prompts, which thousands of rollouts share, are kept once. The index on disk has the messages of rollouts that have
ended. `LiveWords` has those of running rollouts, in memory. Notes are few and may change: each search gets them anew.
"""

import json
import re
import sqlite3
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rolltape.records.messages import Message, Role, call_parts, content_text, reasoning_text
from rolltape.records.rollout import Rollout

_SHARED_ROLES = (Role.SYSTEM, Role.DEVELOPER)
_BETWEEN = "\n\ue000\n"  # a separate word, so that no phrase reaches from one message into the next
# Scripts without spaces: each character is a word, and a search for several characters is a phrase.
_UNSPACED = re.compile("([\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff])")
_ASKED = re.compile(r'"([^"]*)"|(\S+)')
_WORD = r"[^\W_]"  # a letter or a digit, as the index splits words
# The index on disk does not keep the texts, which are on the tape.
TABLES = """
CREATE TABLE searchable (rollout INTEGER PRIMARY KEY);
CREATE TABLE shared_messages (number INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE);
CREATE TABLE shared_uses (shared INTEGER NOT NULL, rollout INTEGER NOT NULL, PRIMARY KEY (shared, rollout))
    WITHOUT ROWID;
CREATE VIRTUAL TABLE words USING fts5(text, content='');
CREATE VIRTUAL TABLE shared_words USING fts5(text, content='');
"""
# The index in memory keeps the texts, because a rollout's entry is replaced when it has new turns.
_LIVE_TABLES = TABLES.replace(", content=''", "")


def add(connection: sqlite3.Connection, number: int, messages: Iterable[Message]) -> None:
    """Make a rollout searchable, by its number in the index."""
    own: list[str] = []
    for message in messages:
        if message.role in _SHARED_ROLES:
            shared = (_shared_number(connection, message), number)
            connection.execute("INSERT OR IGNORE INTO shared_uses VALUES (?, ?)", shared)
        else:
            own.append(_words(searched_text(message)))
    connection.execute("INSERT INTO words (rowid, text) VALUES (?, ?)", (number, _BETWEEN.join(own)))
    connection.execute("INSERT OR IGNORE INTO searchable VALUES (?)", (number,))


def find(
    connection: sqlite3.Connection, asked: str, live: "LiveWords", notes: Mapping[int, Sequence[str]]
) -> npt.NDArray[np.int64]:
    """The numbers of the rollouts in which all search terms occur, in order. `notes` are by rollout number."""
    numbers: npt.NDArray[np.int64] | None = None
    noted = _open_notes(notes)
    places = (connection, live.connection, noted)
    for term in search_terms(asked):
        having = np.unique(np.concatenate([_having(place, term) for place in places]))
        numbers = having if numbers is None else np.intersect1d(numbers, having, assume_unique=True)
    noted.close()
    return np.empty(0, np.int64) if numbers is None else numbers


def search_terms(asked: str) -> list[str]:
    """A search as terms of the index: words, and phrases in quotes. A word that ends in * is a prefix."""
    terms = []
    for phrase, word in _ASKED.findall(asked):
        text = _words(phrase or word.rstrip("*")).replace('"', " ").replace("\0", " ")
        if any(character.isalnum() for character in text):
            terms.append(f'"{text}"' + ("*" if word.endswith("*") else ""))
    return terms


def term_patterns(asked: str) -> list[re.Pattern[str]]:
    """The same terms as regular expressions: whole words, with any separators between those of a phrase."""
    patterns = []
    for phrase, word in _ASKED.findall(asked):
        words = re.findall(f"{_WORD}+", phrase or word.rstrip("*"))
        if not words:
            continue
        begins = "" if _UNSPACED.match(words[0]) else f"(?<!{_WORD})"
        ends = "" if word.endswith("*") or _UNSPACED.match(words[-1][-1]) else f"(?!{_WORD})"
        patterns.append(re.compile(begins + r"[\W_]+".join(map(re.escape, words)) + ends, re.IGNORECASE))
    return patterns


class LiveWords:
    """The words of running rollouts, by their numbers in the index. For one thread at a time."""

    def __init__(self) -> None:
        self.connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self.connection.executescript(_LIVE_TABLES)
        self._held: dict[int, int] = {}  # number → how many turns were read

    def __len__(self) -> int:
        return len(self._held)

    def keep_only(self, numbers: Collection[int]) -> None:
        """Forget all other rollouts: they have ended, and are in the index on disk."""
        for number in [one for one in self._held if one not in numbers]:
            self._forget(number)

    def lacks(self, number: int, turns: int) -> bool:
        """Whether a rollout has more turns than were read."""
        return self._held.get(number) != turns

    def put(self, number: int, turns: int, messages: Iterable[Message]) -> None:
        """Make the messages of a rollout so far searchable."""
        self._forget(number)
        add(self.connection, number, messages)
        self._held[number] = turns

    def _forget(self, number: int) -> None:
        if self._held.pop(number, None) is not None:
            self.connection.execute("DELETE FROM words WHERE rowid = ?", (number,))
            for table in ("searchable", "shared_uses"):
                self.connection.execute(f"DELETE FROM {table} WHERE rollout = ?", (number,))


def distinct_messages(rollout: Rollout) -> Iterable[Message]:
    """Each message of a rollout once, in the order in which they first came."""
    found: dict[bytes, Message] = {}
    for turn in rollout.turns:
        for message in turn.prompt.own:
            found.setdefault(message.digest, message)
        if turn.reply is not None:
            found.setdefault(turn.reply.digest, turn.reply)
    return found.values()


def _open_notes(notes: Mapping[int, Sequence[str]]) -> sqlite3.Connection:
    """The words of notes, in memory."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.executescript(_LIVE_TABLES)
    rows = ((number, _BETWEEN.join(map(_words, texts))) for number, texts in notes.items())
    connection.executemany("INSERT INTO words (rowid, text) VALUES (?, ?)", rows)
    return connection


def _having(connection: sqlite3.Connection, term: str) -> npt.NDArray[np.int64]:
    own = connection.execute("SELECT rowid FROM words WHERE words MATCH ?", (term,))
    shared = connection.execute(
        "SELECT DISTINCT rollout FROM shared_uses WHERE shared IN "
        "(SELECT rowid FROM shared_words WHERE shared_words MATCH ?)",
        (term,),
    )
    return np.unique(np.array([number for rows in (own, shared) for (number,) in rows], np.int64))


def _shared_number(connection: sqlite3.Connection, message: Message) -> int:
    """The number of a message that rollouts share. It is assigned if there is none."""
    row = connection.execute("SELECT number FROM shared_messages WHERE digest = ?", (message.digest,)).fetchone()
    if row is not None:
        return int(row[0])
    number = connection.execute("INSERT INTO shared_messages (digest) VALUES (?)", (message.digest,)).lastrowid
    connection.execute("INSERT INTO shared_words (rowid, text) VALUES (?, ?)", (number, _words(searched_text(message))))
    assert number is not None
    return number


def _words(text: str) -> str:
    """Text in the form that is indexed."""
    return text if text.isascii() else _UNSPACED.sub(r" \1 ", text)


def searched_text(message: Message) -> str:
    """All text of a message: its thinking, its content, and its calls."""
    value = message.to_dict()
    parts = [reasoning_text(value), _content_text(value.get("content"))]
    calls = value.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        named = call_parts(call) if isinstance(call, dict) else (call,)
        parts += [_spelled(one) for one in named if one is not None]
    return "\n".join(parts)


def _content_text(content: object) -> str:
    """The text of a content field, with the thinking, calls and results that are parts of it."""
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    others = (part[name] for part in parts for name in ("thinking", "name", "input", "content") if part.get(name))
    return "\n".join((content_text(content), *map(_spelled, others)))


def _spelled(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

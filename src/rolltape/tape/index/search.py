"""Full-text search over the messages of rollouts that have ended.

A rollout is found if each word, and each phrase in quotes, occurs somewhere in its messages. System prompts, which
thousands of rollouts share, are kept once.
"""

import json
import re
import sqlite3
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from rolltape.records.messages import Message, Role, content_text
from rolltape.records.rollout import Rollout

_SHARED_ROLES = (Role.SYSTEM, Role.DEVELOPER)
_BETWEEN = "\n\ue000\n"  # a word of its own, so that no phrase reaches from one message into the next
# Scripts without spaces: each character is a word, and what is asked for a phrase.
_UNSPACED = re.compile("([\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff])")
_ASKED = re.compile(r'"([^"]*)"|(\S+)')


def add(connection: sqlite3.Connection, number: int, messages: Iterable[Message]) -> None:
    """Make a rollout searchable, by its number in the index."""
    own: list[str] = []
    for message in messages:
        if message.role in _SHARED_ROLES:
            shared = (_shared_number(connection, message), number)
            connection.execute("INSERT OR IGNORE INTO shared_uses VALUES (?, ?)", shared)
        else:
            own.append(_words(_text(message)))
    connection.execute("INSERT INTO words (rowid, text) VALUES (?, ?)", (number, _BETWEEN.join(own)))
    connection.execute("INSERT OR IGNORE INTO searchable VALUES (?)", (number,))


def find(connection: sqlite3.Connection, asked: str) -> npt.NDArray[np.int64]:
    """The numbers of the rollouts in which all that is asked for occurs, in order."""
    numbers: npt.NDArray[np.int64] | None = None
    for term in search_terms(asked):
        having = _having(connection, term)
        numbers = having if numbers is None else np.intersect1d(numbers, having, assume_unique=True)
    return np.empty(0, np.int64) if numbers is None else numbers


def search_terms(asked: str) -> list[str]:
    """A question as terms of the index: words, and phrases in quotes; a word that ends in * as a beginning."""
    terms = []
    for phrase, word in _ASKED.findall(asked):
        text = _words(phrase or word.rstrip("*")).replace('"', " ").replace("\0", " ")
        if any(character.isalnum() for character in text):
            terms.append(f'"{text}"' + ("*" if word.endswith("*") else ""))
    return terms


def distinct_messages(rollout: Rollout) -> Iterable[Message]:
    """Each message of a rollout once, in the order in which they first came."""
    found: dict[bytes, Message] = {}
    for turn in rollout.turns:
        for message in turn.prompt.own:
            found.setdefault(message.digest, message)
        if turn.reply is not None:
            found.setdefault(turn.reply.digest, turn.reply)
    return found.values()


def _having(connection: sqlite3.Connection, term: str) -> npt.NDArray[np.int64]:
    own = connection.execute("SELECT rowid FROM words WHERE words MATCH ?", (term,))
    shared = connection.execute(
        "SELECT DISTINCT rollout FROM shared_uses WHERE shared IN "
        "(SELECT rowid FROM shared_words WHERE shared_words MATCH ?)",
        (term,),
    )
    return np.unique(np.array([number for rows in (own, shared) for (number,) in rows], np.int64))


def _shared_number(connection: sqlite3.Connection, message: Message) -> int:
    """The number of a message that many rollouts share, given now if it has none."""
    row = connection.execute("SELECT number FROM shared_messages WHERE digest = ?", (message.digest,)).fetchone()
    if row is not None:
        return int(row[0])
    number = connection.execute("INSERT INTO shared_messages (digest) VALUES (?)", (message.digest,)).lastrowid
    connection.execute("INSERT INTO shared_words (rowid, text) VALUES (?, ?)", (number, _words(_text(message))))
    assert number is not None
    return number


def _words(text: str) -> str:
    """Text as the index takes it."""
    return text if text.isascii() else _UNSPACED.sub(r" \1 ", text)


def _text(message: Message) -> str:
    """All text of a message: its thinking, its content, and its calls."""
    value = message.to_dict()
    parts = [
        content_text(value.get("reasoning_content") or value.get("reasoning")),
        _content_text(value.get("content")),
    ]
    calls = value.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", call) if isinstance(call, dict) else {"name": call}
        parts += [_spelled(function.get(name)) for name in ("name", "arguments")] if isinstance(function, dict) else []
    return "\n".join(parts)


def _content_text(content: object) -> str:
    """The text of a content field, with the thinking, calls and results that are parts of it."""
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    others = (part[name] for part in parts for name in ("thinking", "name", "input", "content") if part.get(name))
    return "\n".join((content_text(content), *map(_spelled, others)))


def _spelled(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

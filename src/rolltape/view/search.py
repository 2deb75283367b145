"""Full-text search over the messages of rollouts that have ended.

A rollout is found if each word, and each phrase in quotes, occurs somewhere in its messages.
"""

import contextlib
import re
import sqlite3
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rolltape.view.indexing import INDEX_FILE, words_of
from rolltape.view.reports import Key
from rolltape.view.table import Array

_ASKED = re.compile(r'"([^"]*)"|(\S+)')


class Searched(NamedTuple):
    """What a search found."""

    made: str | None  # the index that was searched; None: there is none yet
    fresh: list[tuple[int, Key]]  # the rollouts in it that the one who asked does not know of, by number
    numbers: Array  # of the rollouts in which all that is asked for occurs, in order


def found(folder: Path, asked: str, known: str | None, known_up_to: int) -> Searched:
    """Look a text up. The one who asks knows the rollouts of an index up to a number."""
    numbers: Array | None = None
    if not (folder / INDEX_FILE).exists():
        return Searched(None, [], np.empty(0, np.int64))
    with contextlib.closing(_opened(folder)) as connection:
        connection.execute("BEGIN")  # one moment for all that is read
        made = _identity_of(connection)
        if made is None:
            return Searched(None, [], np.empty(0, np.int64))
        since = known_up_to if made == known else 0
        rows = connection.execute(
            "SELECT number, id, try_index FROM rollouts WHERE number > ? ORDER BY number", (since,)
        )
        fresh = [(number, (rollout, try_index)) for number, rollout, try_index in rows]
        for term in terms_of(asked):
            has_term = _having(connection, term)
            numbers = has_term if numbers is None else np.intersect1d(numbers, has_term, assume_unique=True)
    return Searched(made, fresh, np.empty(0, np.int64) if numbers is None else numbers)


def _identity_of(connection: sqlite3.Connection) -> str | None:
    """Which index this is; None: it is just being made."""
    try:
        row = connection.execute("SELECT made FROM about").fetchone()
    except sqlite3.OperationalError:
        return None
    return None if row is None else str(row[0])


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


def _opened(folder: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{(folder / INDEX_FILE).as_uri()}?mode=ro", uri=True)
    connection.execute("PRAGMA cache_size = -32768")
    connection.execute("PRAGMA busy_timeout = 2000")
    return connection

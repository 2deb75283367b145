"""The journal's tables, and the checksum that every row carries.

A turn's key is its session's key and its sequence number in one integer, so a session's turns lie together
without a further index. Rows refer to messages, tools and template options by key; the checksum of a turn
covers their digests, so a reference that was damaged cannot go unnoticed.

`ends` adds nothing new: the status of each rollout that has ended, and the number of its finish among the events. It
spares a reader who wants just that all other events.

`fences` names the rollouts of this journal that another writer took over; its own writer adds nothing more to them.
"""

import struct
import zlib
from collections.abc import Sequence

SEQUENCE_BITS = 24
MAX_TURNS = 1 << SEQUENCE_BITS

TABLES = """
CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE contents (pk INTEGER PRIMARY KEY, digest BLOB NOT NULL, raw BLOB NOT NULL);
CREATE TABLE rollouts (pk INTEGER PRIMARY KEY, id TEXT NOT NULL, try_index INTEGER NOT NULL, head BLOB NOT NULL,
    crc INTEGER NOT NULL, UNIQUE (id, try_index));
CREATE TABLE sessions (pk INTEGER PRIMARY KEY, rollout INTEGER NOT NULL, ordinal INTEGER NOT NULL,
    head BLOB NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE turns (pk INTEGER PRIMARY KEY, parent INTEGER, keep_tokens INTEGER NOT NULL,
    keep_messages INTEGER NOT NULL, root INTEGER NOT NULL, messages BLOB NOT NULL, reply INTEGER,
    sides INTEGER NOT NULL, dtype TEXT, sampled BLOB NOT NULL, new_ids BLOB NOT NULL, logprobs BLOB,
    facts BLOB NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE side_arrays (turn INTEGER NOT NULL, name TEXT NOT NULL, start INTEGER NOT NULL, dtype TEXT NOT NULL,
    shape TEXT NOT NULL, data BLOB NOT NULL, counts BLOB, crc INTEGER NOT NULL, PRIMARY KEY (turn, name));
CREATE TABLE events (sequence INTEGER PRIMARY KEY, body BLOB NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE ends (rollout INTEGER PRIMARY KEY, finish INTEGER NOT NULL, standing BLOB NOT NULL);
CREATE INDEX sessions_by_rollout ON sessions (rollout);
"""
FENCES = """
CREATE TABLE IF NOT EXISTS fences (rollout TEXT NOT NULL, try_index INTEGER NOT NULL, epoch INTEGER NOT NULL,
    taker TEXT NOT NULL, PRIMARY KEY (rollout, try_index)) WITHOUT ROWID;
"""
TABLES += FENCES  # separate, since a journal of 0.1.0 gets it when one of its rollouts is taken over

SELECT_TRIES = "SELECT try_index FROM rollouts WHERE id = ?"
SELECT_FINISH = (
    "SELECT sequence, body, events.crc FROM rollouts JOIN ends ON ends.rollout = rollouts.pk "
    "JOIN events ON events.sequence = ends.finish WHERE rollouts.id = ? AND rollouts.try_index = ?"
)

_NUMBERS = struct.Struct("<8q")


def turn_pk(session: int, sequence: int) -> int:
    """The key of a session's turn."""
    return session << SEQUENCE_BITS | sequence


def turn_crc(numbers: tuple[int, int, int, int, int, int, int, int], blobs: Sequence[bytes]) -> int:
    """The checksum of a turn's row: key, parent, keeps, counts, then digests and blobs; absent numbers are -1."""
    return zlib.crc32(b"".join((_NUMBERS.pack(*numbers), *blobs)))


def event_crc(sequence: int, body: bytes) -> int:
    """As `row_crc` of these two, at half the cost: a run has many events."""
    number = b"%d" % sequence
    return zlib.crc32(body, zlib.crc32(b"%d:%b%d:" % (len(number), number, len(body))))


def row_crc(*fields: int | str | bytes | None) -> int:
    """The checksum of any other row, over its fields in order, each with its length."""
    crc = 0
    for field in fields:
        data = field if isinstance(field, bytes) else repr(field).encode()
        crc = zlib.crc32(data, zlib.crc32(b"%d:" % len(data), crc))
    return crc

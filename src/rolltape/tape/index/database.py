"""The index of a run as a SQLite file: where it lies, its tables, and how it is opened, replaced and discarded.

The file is RUN/cache/index-FORMAT-GENERATION.sqlite, in the user's cache folder where the run cannot be written to. It
holds nothing that the tape does not: it may be deleted at any time. If a stopped process holds the write lock, another
process makes a new generation; `index.json` names the generation that counts.
"""

import contextlib
import hashlib
import json
import os
import secrets
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rolltape.records.fork import ForkCause
from rolltape.records.ids import digest_of
from rolltape.records.policy import PRESETS
from rolltape.records.sample import SUMMARY_RULES, BehaviorCounts, Fate, RolloutSummary
from rolltape.tape.index import search
from rolltape.tape.rundir import make_private_file, make_private_folder, user_cache, write_whole
from rolltape.tape.stored import StoredEvent, decoded_event

FORMAT = 4
FOLDER = "cache"
POINTER = "index.json"
# Summaries are fixed arrays over these, so that a hundred thousand of them are read as one array.
CAUSES = tuple(ForkCause)
FATES = tuple(Fate)
POLICIES = tuple(PRESETS)
BEHAVIOR = BehaviorCounts.__struct_fields__
# An index whose arrays are of another layout, or of other rules, is made again.
LAYOUT = digest_of(str(SUMMARY_RULES), *CAUSES, *FATES, *BEHAVIOR, *(one.key for one in PRESETS.values())).hex()
_BUSY_S = 5.0  # a transaction takes a fraction of it
# Negative: in KiB. A small cache reads all rows faster. Writes touch pages all over the file, so they need a large one.
_CACHE_TO_READ, _CACHE_TO_WRITE = -4096, -65536

TABLES = """
CREATE TABLE about (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE sources (name TEXT PRIMARY KEY, marks BLOB NOT NULL, alive INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE problems (source TEXT NOT NULL, problem TEXT NOT NULL, PRIMARY KEY (source, problem)) WITHOUT ROWID;
CREATE TABLE rollouts (number INTEGER PRIMARY KEY, id TEXT NOT NULL, try_index INTEGER NOT NULL, grp TEXT NOT NULL,
    step INTEGER NOT NULL, attempt INTEGER NOT NULL, source TEXT, task TEXT, environment TEXT, agent TEXT, model TEXT,
    head_tags TEXT NOT NULL, started_ns INTEGER NOT NULL, resume TEXT NOT NULL,
    writer TEXT NOT NULL, epoch INTEGER NOT NULL, place TEXT NOT NULL, row INTEGER NOT NULL,
    first_event INTEGER NOT NULL, last_event INTEGER NOT NULL,
    sessions INTEGER NOT NULL, turns INTEGER NOT NULL, sampled_tokens INTEGER NOT NULL, versions TEXT NOT NULL,
    finish TEXT, ended_ns INTEGER, stop_reason TEXT, reason TEXT,
    scored TEXT, reward REAL, terms TEXT, rewarded_by TEXT, filtered_at TEXT, filter TEXT,
    tags TEXT, inner_tags TEXT, notes INTEGER NOT NULL,
    pruned TEXT NOT NULL, changed TEXT NOT NULL, revision INTEGER NOT NULL, UNIQUE (id, try_index));
CREATE INDEX rollouts_by_revision ON rollouts (revision);
CREATE INDEX rollouts_by_group ON rollouts (grp);
CREATE INDEX rollouts_unfinished ON rollouts (writer) WHERE finish IS NULL;
CREATE TABLE heads (number INTEGER PRIMARY KEY, raw BLOB NOT NULL);
CREATE TABLE foreign_ids (foreign_id TEXT NOT NULL, number INTEGER NOT NULL, PRIMARY KEY (foreign_id, number))
    WITHOUT ROWID;
CREATE TABLE parts (rollout INTEGER NOT NULL, writer TEXT NOT NULL, part BLOB NOT NULL, PRIMARY KEY (rollout, writer))
    WITHOUT ROWID;
CREATE TABLE events (writer TEXT NOT NULL, sequence INTEGER NOT NULL, at_ns INTEGER NOT NULL, kind TEXT NOT NULL,
    rollout TEXT, try_index INTEGER, body BLOB NOT NULL, revision INTEGER NOT NULL, PRIMARY KEY (writer, sequence))
    WITHOUT ROWID;
CREATE INDEX events_by_rollout ON events (rollout, try_index);
CREATE INDEX events_by_revision ON events (revision);
CREATE INDEX events_by_hand ON events (rollout, try_index) WHERE kind IN ('note', 'retag');
CREATE TABLE summaries (rollout INTEGER PRIMARY KEY, covers TEXT NOT NULL, branches INTEGER NOT NULL,
    forks BLOB NOT NULL, samples BLOB NOT NULL, ledgers BLOB NOT NULL,
    behavior BLOB NOT NULL, problems TEXT NOT NULL);
CREATE TABLE unread (rollout INTEGER PRIMARY KEY, at_place TEXT NOT NULL, at_change TEXT NOT NULL,
    missing TEXT NOT NULL);
"""
TABLES += search.TABLES


class IndexFile:
    """Where the index of one run lies, and connections to it. For one thread at a time."""

    def __init__(self, run: Path | None, url: str, created: object) -> None:
        self._identity = json.dumps([FORMAT, LAYOUT, url if run is None else None, created])
        self.folder = _folder(run, url)
        self.path: Path | None = None  # the generation that is open
        self._connection: sqlite3.Connection | None = None
        self._is_in_memory = False
        self._was_discarded = False

    @property
    def lock_path(self) -> Path:
        """The file that a follower keeps locked while it works."""
        return self.folder / "index.lock"

    def connection(self) -> sqlite3.Connection:
        """A connection to the current generation, which is made if there is none."""
        if self._connection is not None and (self._is_in_memory or self._connection.in_transaction):
            return self._connection  # one snapshot, even if another generation was made in the meantime
        named = self._named()
        if self._connection is not None and named == self.path and named is not None and named.exists():
            return self._connection
        self.close()
        if named is None or not self._opened(named):
            self.replace(keep=False)
        assert self._connection is not None
        return self._connection

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction. If the write lock is held by a process that was stopped, another generation takes over."""
        connection = self.connection()
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) and "busy" not in str(error):
                raise
            self.replace(keep=True)
            connection = self.connection()
            connection.execute("BEGIN IMMEDIATE")
        try:
            connection.execute(f"PRAGMA cache_size = {_CACHE_TO_WRITE}")
            yield connection
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        finally:
            with contextlib.suppress(sqlite3.Error):  # it is damaged, and the write has failed already
                connection.execute(f"PRAGMA cache_size = {_CACHE_TO_READ}")

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """One snapshot of the index for several queries."""
        connection = self.connection()
        if connection.in_transaction:
            yield connection
            return
        connection.execute("BEGIN")
        try:
            yield connection
        finally:
            if connection.in_transaction:
                connection.execute("COMMIT")

    def replace(self, *, keep: bool) -> None:
        """Make a new generation, empty or a copy of the current one, and have all processes use it."""
        old, old_connection = self.path, self._connection
        make_private_folder(self.folder, parents=False)  # it may be deleted at any time, and the run too
        fresh = self.folder / f"index-{FORMAT}-{secrets.token_hex(6)}.sqlite"
        make_private_file(fresh)
        with contextlib.closing(sqlite3.connect(fresh, isolation_level=None)) as making:
            if keep and old_connection is not None:
                old_connection.backup(making)
            else:
                making.executescript("BEGIN;" + TABLES)
                values = {"identity": self._identity, "revision": 0, "made": time.time_ns()}
                making.executemany("INSERT INTO about VALUES (?, ?)", values.items())
                making.execute("COMMIT")
            making.execute("PRAGMA journal_mode = WAL")
        self.close()
        write_whole(self.folder / POINTER, json.dumps({"file": fresh.name}).encode())
        if not self._opened(fresh):
            raise sqlite3.DatabaseError(f"{fresh}: cannot be opened although it was just made")
        self._remove_others(old)

    def discard(self) -> None:
        """Make an empty index in place of one that is damaged or cannot be written: in memory if need be."""
        try:
            if self._is_in_memory or self._was_discarded:
                raise OSError
            self._was_discarded = True
            self.replace(keep=False)
        except (OSError, sqlite3.Error):
            self.close()
            self._connection, self._is_in_memory = (
                sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False),
                True,
            )
            self._connection.executescript("BEGIN;" + TABLES + "COMMIT;")

    def close(self) -> None:
        """Close the file."""
        if self._connection is not None:
            self._connection.close()
        self._connection, self.path = None, None

    def forget(self) -> None:
        """In a forked child: leave the parent's connection alone, and open another when it is needed."""
        _parents.append(self._connection)
        self._connection, self.path = None, None

    def _named(self) -> Path | None:
        try:
            name = str(json.loads((self.folder / POINTER).read_bytes())["file"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return self.folder / name if name.startswith(f"index-{FORMAT}-") and "/" not in name else None

    def _opened(self, path: Path) -> bool:
        if not path.exists():
            return False
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            connection.execute(f"PRAGMA busy_timeout = {int(_BUSY_S * 1000)}")
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute(f"PRAGMA cache_size = {_CACHE_TO_READ}")
            (identity,) = connection.execute("SELECT value FROM about WHERE key = 'identity'").fetchone()
        except (sqlite3.Error, TypeError):
            identity = None
        if identity != self._identity:  # damaged, or of another run that was here before
            connection.close()
            return False
        self._connection, self.path = connection, path
        return True

    def _remove_others(self, old: Path | None) -> None:
        """Remove older generations, and the caches of 0.1.0."""
        keep = {self.path.name if self.path else "", old.name if old else ""}
        stale = [*self.folder.glob("index-*.sqlite*"), *self.folder.glob("view-*.kept"), *self.folder.glob("search-1*")]
        for path in stale:
            if path.name.partition(".sqlite")[0] + ".sqlite" not in keep:
                with contextlib.suppress(OSError):
                    path.unlink()


_parents: list[sqlite3.Connection | None] = []  # connections must not be carried across a fork, not even to close them
_temporary: dict[str, tempfile.TemporaryDirectory[str]] = {}


def _folder(run: Path | None, url: str) -> Path:
    """RUN/cache; if that cannot be written, a folder in the user's cache; else a temporary folder of this process."""
    name = hashlib.sha256(url.encode("utf-8", "replace")).hexdigest()[:32]
    for folder in ([] if run is None else [run / FOLDER]) + [user_cache() / name]:
        if _is_usable(folder):
            return folder
    if name not in _temporary:
        _temporary[name] = tempfile.TemporaryDirectory(prefix="rolltape-index-")
    return Path(_temporary[name].name)


def _is_usable(folder: Path) -> bool:
    """Whether SQLite files can be kept in a folder: it is writable, and on a disk of this machine."""
    try:
        make_private_folder(folder)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK) and not _is_network(folder)


def _is_network(folder: Path) -> bool:
    """Whether a folder lies on a network file system, where SQLite's shared memory does not work."""
    kinds = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "glusterfs", "fuse.sshfs", "beegfs"}
    try:
        mounts = Path("/proc/mounts").read_text()
    except OSError:
        return False
    best, kind = "", ""
    path = str(folder.resolve())
    for line in mounts.splitlines():
        _, place, found, *_ = line.split(" ")
        place = place.encode().decode("unicode_escape")
        if (path == place or path.startswith(place.rstrip("/") + "/")) and len(place) >= len(best):
            best, kind = place, found
    return kind in kinds


def is_damage(error: sqlite3.Error) -> bool:
    """Whether an error says that the file is damaged. Other errors, as of a file in use, have types of their own."""
    return type(error) is sqlite3.DatabaseError


def pack_summary(summary: RolloutSummary) -> tuple[bytes, bytes, bytes, bytes]:
    """Forks by cause, samples by policy, sampled tokens by policy and fate, and behavior; -1 where it is not known."""
    policies = [summary.policies[name] for name in POLICIES]
    forks = np.array([summary.forks.get(cause.value, 0) for cause in CAUSES], "<i4")
    samples = np.array([one.samples for one in policies], "<i4")
    ledgers = np.array([[one.ledger.get(fate.value, 0) for fate in FATES] for one in policies], "<i8")
    behavior = np.array([getattr(summary.behavior, name, -1) for name in BEHAVIOR], "<i4")
    return forks.tobytes(), samples.tobytes(), ledgers.tobytes(), behavior.tobytes()


def select_events(connection: sqlite3.Connection, where: str, *values: object) -> list[StoredEvent]:
    """Events from the table of the index, in order. It lacks those that are read with their rollout."""
    rows = connection.execute(
        f"SELECT writer, sequence, body FROM events WHERE {where} ORDER BY at_ns, writer, sequence", values
    ).fetchall()
    return [decoded_event(*row) for row in rows]


def read_about(connection: sqlite3.Connection, key: str, default: Any = None) -> Any:
    """A value that the index stores about itself."""
    row = connection.execute("SELECT value FROM about WHERE key = ?", (key,)).fetchone()
    return default if row is None else row[0]


def write_about(connection: sqlite3.Connection, key: str, value: Any) -> None:
    """Set a value that the index stores about itself."""
    connection.execute("INSERT OR REPLACE INTO about VALUES (?, ?)", (key, value))

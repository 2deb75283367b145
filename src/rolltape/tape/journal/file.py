"""The files of a journal, and its tables.

The files are the database, its log, and the sidecar of its owner. The writing process keeps the sidecar locked, so that
readers can tell whether it is alive.

`ends` has, for each ended rollout, the number of its finish among the events, so that readers need not search for it.
`fences` names the rollouts that another writer took over from this journal; its own writer adds nothing more to them.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import socket
import sqlite3
from pathlib import Path

from rolltape.errors import TapeWriteError
from rolltape.forking import call_in_child
from rolltape.tape.rundir import SCHEMA, RunDirectory, make_private_file, private_opener, sync_directory
from rolltape.tape.stored import check_shortage

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
CREATE TABLE ends (rollout INTEGER PRIMARY KEY, finish INTEGER NOT NULL);
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
_WAIT_FOR_LOCK_S = 10.0
_PAGES_BEFORE_CHECKPOINT = 4096  # 16 MiB: a checkpoint syncs, so fewer and larger ones cost less
_TABLES_OF_ROWS = ("rollouts", "sessions", "turns", "contents", "side_arrays", "events")


def make_journal(path: Path, run: RunDirectory, writer: str, *, waits_for_disk: bool) -> sqlite3.Connection:
    """Make a journal. It gets its name when its tables exist, so no reader sees one without tables."""
    fresh = path.with_suffix(".making")
    make_private_file(fresh)
    with contextlib.closing(sqlite3.connect(fresh, isolation_level=None)) as making:
        making.executescript("PRAGMA synchronous = OFF; BEGIN;" + TABLES)
        about = {"schema": SCHEMA, "run": run.name, "writer": writer}
        making.executemany("INSERT INTO about VALUES (?, ?)", about.items())
        making.execute("COMMIT")
        making.execute("PRAGMA journal_mode = WAL")
    fresh.rename(path)
    if waits_for_disk:
        # Before SQLite opens it: closing a file drops the locks that this process has on it.
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
        sync_directory(path.parent)
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=64)
    connection.execute("PRAGMA busy_timeout = 10000")
    connection.execute(f"PRAGMA synchronous = {'FULL' if waits_for_disk else 'NORMAL'}")
    connection.execute(f"PRAGMA wal_autocheckpoint = {_PAGES_BEFORE_CHECKPOINT}")
    connection.execute("PRAGMA cache_size = -8192")  # KiB
    # From here on it has a log that is not empty, until it is closed in order. A journal without a log has lost it.
    connection.execute("INSERT INTO about VALUES ('log', 'begun')")
    return connection


def connected(path: Path, mode: str = "ro") -> sqlite3.Connection:
    """A connection to a journal that any thread may use: "ro", "rw", or "ro&immutable=1" if no process writes it."""
    uri = f"{path.as_uri()}?mode={mode}"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
    connection.execute(f"PRAGMA busy_timeout = {_WAIT_FOR_LOCK_S * 1000:.0f}")
    return connection


def try_to_open(
    path: Path, mode: str, tolerant: bool = False
) -> tuple[sqlite3.Connection | None, sqlite3.Error | None]:
    """A connection to a journal that reads, or None and the reason why there is none."""
    connection = None
    try:
        connection = connected(path, mode)
        if tolerant:
            connection.execute("PRAGMA writable_schema = ON")  # reads a file that is shorter than its header states
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        for table in _TABLES_OF_ROWS:
            connection.execute(f"SELECT * FROM {table} WHERE rowid < 0").fetchone()
    except sqlite3.OperationalError as error:
        # The tables are not found: either no journal of ours, or its first page is damaged.
        failure: sqlite3.Error = error
    except sqlite3.DatabaseError as error:
        failure = error
        if connection is not None and _schema_reads(connection):
            return connection, None
    else:
        return connection, None
    if connection is not None:
        connection.close()
    return None, failure


def _schema_reads(connection: sqlite3.Connection) -> bool:
    """Whether at least the list of tables is intact, so that the readable parts of each can be read."""
    with contextlib.suppress(sqlite3.Error):
        names = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        return set(_TABLES_OF_ROWS) <= names
    return False


def log_of(journal: Path) -> Path:
    """Where a journal's write-ahead log lies."""
    return Path(f"{journal}-wal")


def has_log(journal: Path) -> bool:
    """Whether a journal's log is there. An empty log does not count, since SQLite makes one for readers."""
    log = log_of(journal)
    return log.exists() and log.stat().st_size > 0


def writer_name() -> str:
    """A name for this process as a writer: host, process and a random part."""
    return f"{_host()}-{os.getpid()}-{secrets.token_hex(4)}"


def described(writer: str) -> str:
    """A writer in words: which process it is, and whether the process is stopped."""
    host, pid, _ = ["", "", *writer.rsplit("-", 2)][-3:]
    if not pid.isdecimal():
        return f"writer {writer}"
    return f"process {pid} on {host}" + (" (stopped)" if _is_stopped(host, pid) else "")


def _is_stopped(host: str, pid: str) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state == "T" and host == _host()


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", socket.gethostname()).strip("-") or "host"


class Owner:
    """The lock that shows that a writer is alive. It is released when the process ends in any way."""

    def __init__(self, journal: Path) -> None:
        self.path = journal.with_suffix(".owner")
        try:
            self.descriptor = private_opener(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
            fcntl.flock(self.descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise TapeWriteError(f"{self.path}: cannot be written: {error}") from error
        # flock belongs to the open file, which a fork shares: a child must not keep a dead parent "alive".
        call_in_child(self, Owner.release)

    def note_closing(self, counts: dict[str, int]) -> None:
        """Keep how many rows of each kind the journal has when it is closed in order."""
        with contextlib.suppress(OSError):  # a full disk: it then looks as if its writer died, which loses nothing
            os.pwrite(self.descriptor, json.dumps({"closed": counts}).encode(), 0)

    def release(self) -> None:
        """Release the lock. In a forked child, the parent keeps its lock."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def is_alive(journal: Path) -> bool:
    """Whether the process that writes this journal still runs."""
    try:
        descriptor = os.open(journal.with_suffix(".owner"), os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        check_shortage(error, journal)  # such a process is not dead
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def closing_counts(journal: Path) -> dict[str, int] | None:
    """How many rows of each kind the journal had when it was closed in order, or None if it was not."""
    try:
        value = json.loads(journal.with_suffix(".owner").read_bytes())
        return {str(kind): int(count) for kind, count in value["closed"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None

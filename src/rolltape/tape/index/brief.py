"""What a journal says in brief: how its rollouts stand and its remarks, without reading its events and heads."""

import sqlite3
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from rolltape.errors import DamagedTapeError
from rolltape.records.openfields import decode_record
from rolltape.records.rollout import RolloutHead, Status
from rolltape.tape.index.standing import packed, unpacked
from rolltape.tape.journal.schema import SELECT_REMARKS, event_crc, row_crc
from rolltape.tape.stored import StoredEvent, decoded_event

_AT_ONCE = 10_000
# One value instead of ten thousand: a third of the time.
_SELECT_STANDINGS = "SELECT group_concat(hex(standing), '') FROM ends WHERE rollout BETWEEN ? AND ?"


def check_counts(connection: sqlite3.Connection, closed_with: dict[str, int]) -> None:
    """Refuse a journal that says less in brief than when it was closed."""
    for table in ("ends", "remarks"):
        ((found,),) = connection.execute(f"SELECT count(*) FROM {table}").fetchall()
        if found < closed_with.get(table, 0):
            raise DamagedTapeError(f"{closed_with[table]} {table} were there when it was closed, {found} are found")


def standings_in(connection: sqlite3.Connection, alive: bool) -> Iterator[npt.NDArray[Any]]:
    """How all rollouts of a journal stand, so many at a time; raises if that is damaged, or was not written."""
    # The last one is asked for first: what is started meanwhile does not count yet.
    ((last,),) = connection.execute("SELECT coalesce(max(pk), 0) FROM rollouts").fetchall()
    for first in range(1, last + 1, _AT_ONCE):
        stop = min(first + _AT_ONCE, last + 1)
        ((standings,),) = connection.execute(_SELECT_STANDINGS, (first, stop - 1)).fetchall()
        ended = unpacked(bytes.fromhex(standings or ""))
        unended = np.setdiff1d(np.arange(first, stop), ended["row"], assume_unique=True)
        status = Status.RUNNING if alive else Status.LOST
        yield ended
        yield unpacked(b"".join(_unended(connection, row, status) for row in unended.tolist()))


def _unended(connection: sqlite3.Connection, row: int, status: Status) -> bytes:
    for id_, try_index, raw, crc in connection.execute(
        "SELECT id, try_index, head, crc FROM rollouts WHERE pk = ?", (row,)
    ):
        if row_crc(row, id_, try_index, raw) != crc:
            raise DamagedTapeError(f"row {row} of rollouts is damaged")
        return packed(decode_record(raw, RolloutHead, f"rollout {id_}"), status, rewarded=False, row=row)
    return b""


def remarks_in(connection: sqlite3.Connection, writer: str) -> list[StoredEvent]:
    """The remarks of a journal; raises if they are damaged, or were not written."""
    found = []
    for sequence, body, crc in connection.execute(SELECT_REMARKS):
        if event_crc(sequence, body) != crc:
            raise DamagedTapeError(f"event {sequence} is damaged")
        found.append(decoded_event(writer, sequence, body))
    return found

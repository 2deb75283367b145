"""`Rows`: the rollouts of a run as columns, read from its index. Each different text has a number."""

import gc
import sqlite3
from collections.abc import Hashable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from rolltape.records.jsonable import decode_numbers
from rolltape.records.rollout import Status
from rolltape.tape.index.database import BEHAVIOR, CAUSES, FATES, POLICIES
from rolltape.tape.index.queries import FILTER, REASON, STATUS

T = TypeVar("T", bound=Hashable)
Array = npt.NDArray[Any]

STATUSES = tuple(Status)
STATUS_CODE = {status: code for code, status in enumerate(STATUSES)}
FATE_CODE = {fate.value: code for code, fate in enumerate(FATES)}
CAUSE_CODE = {cause.value: code for code, cause in enumerate(CAUSES)}
BEHAVIOR_CODE = {name: code for code, name in enumerate(BEHAVIOR)}

_LEDGER_BYTES = 8 * len(FATES)
_STATUS_CASE = " ".join(f"WHEN '{status.value}' THEN {code}" for status, code in STATUS_CODE.items())


class _RowColumn(NamedTuple):
    query: str
    kind: str  # a dtype; "text" for codes of texts; "list" for codes of JSON arrays
    width: int = 1  # numbers per row; several are stored as bytes


# The columns of every rollout.
_COLUMNS = {
    "try_index": _RowColumn("try_index", "i8"),
    "step": _RowColumn("step", "i8"),
    "attempt": _RowColumn("attempt", "i8"),
    "started_ns": _RowColumn("started_ns", "i8"),
    "ended_ns": _RowColumn("coalesce(ended_ns, 0)", "i8"),  # 0 without an end
    "status": _RowColumn(f"CASE {STATUS} {_STATUS_CASE} END", "i1"),
    "reward": _RowColumn("reward", "f8"),
    "scored": _RowColumn("scored IS NOT NULL", "?"),
    "turns": _RowColumn("turns", "i8"),
    "sampled_tokens": _RowColumn("sampled_tokens", "i8"),
    "group": _RowColumn("grp", "text"),
    "source": _RowColumn("source", "text"),
    "task": _RowColumn("task", "text"),
    "environment": _RowColumn("environment", "text"),
    "agent": _RowColumn("agent", "text"),
    "model": _RowColumn("model", "text"),
    "stop_reason": _RowColumn("stop_reason", "text"),
    "reason": _RowColumn(REASON, "text"),
    "filter": _RowColumn(FILTER, "text"),
    "tags": _RowColumn("coalesce(tags, head_tags)", "list"),  # tags from the start apply until they are changed
    "inner_tags": _RowColumn("inner_tags", "list"),  # of turns and tokens
    "notes": _RowColumn("notes", "i8"),
    "versions": _RowColumn("versions", "list"),
    "branches": _RowColumn("coalesce(branches, -1)", "i4"),  # -1 without a summary
    "forks": _RowColumn(f"coalesce(forks, zeroblob({4 * len(CAUSES)}))", "<i4", len(CAUSES)),
    # All -1 without a summary, or if its turns are no longer on the tape.
    "behavior": _RowColumn(f"coalesce(behavior, x'{'ff' * 4 * len(BEHAVIOR)}')", "<i4", len(BEHAVIOR)),
    "terms": _RowColumn("terms", "text"),  # of its reward, as JSON
    "ledger": _RowColumn(  # under the default policy
        f"coalesce(substr(ledgers, {1 + POLICIES.index('exact') * _LEDGER_BYTES}, {_LEDGER_BYTES}), "
        f"zeroblob({_LEDGER_BYTES}))",
        "<i8",
        len(FATES),
    ),
}
_SELECT = (
    f"SELECT number, id, {', '.join(one.query for one in _COLUMNS.values())} FROM rollouts "
    "LEFT JOIN summaries ON summaries.rollout = number"
)


class Coded(Generic[T]):
    """The different values of a column, each with a number. Code 0 is None."""

    def __init__(self) -> None:
        self.values: list[T | None] = [None]
        self._codes: dict[T | None, int] = {None: 0}

    def codes(self, values: Sequence[T | None]) -> list[int]:
        """The codes of values; new values get new codes."""
        known = self._codes
        before = len(known)
        found = [known.setdefault(value, len(known)) for value in values]
        if len(known) > before:
            self.values = list(known)
        return found

    def known(self, value: T) -> int:
        """The code of a value, or -1 if no row has it."""
        return self._codes.get(value, -1)

    def ranks(self) -> Array:
        """The rank of each value in sorted order; None comes last."""
        values: list[Any] = self.values
        order = sorted(range(len(values)), key=lambda code: (values[code] is None, values[code]))
        ranks = np.empty(len(order), np.int64)
        ranks[order] = np.arange(len(order))
        return ranks


class Rows:
    """The columns, and the values of their codes. A rollout's row is its number in the index minus one."""

    def __init__(self) -> None:
        self.columns = {name: _empty(one) for name, one in _COLUMNS.items()}
        self.columns["changed"] = np.zeros(0, np.int64)  # the snapshot at which a row last changed
        self.texts: dict[str, Coded[str]] = {n: Coded() for n, one in _COLUMNS.items() if one.kind in ("text", "list")}
        self.ids: list[str] = []
        self.missing: dict[int, tuple[str, ...]] = {}  # by row: unreadable parts of the rollout
        self._lists: dict[str, list[tuple[str, ...] | None]] = {}
        self._terms: list[dict[str, float]] = []  # by the codes of `terms`
        self._tries: dict[str, dict[int, int]] = {}  # by rollout: the rows of its tries
        self._listed = 0  # rows that are in `_tries`

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, connection: sqlite3.Connection, since_revision: int, snapshot: int) -> int:
        """Read the rollouts that have changed since a revision of the index, and return their number."""
        where = "" if since_revision < 0 else f" WHERE revision > {since_revision}"
        gc.disable()  # a hundred thousand rows without a reference cycle
        try:
            fetched = connection.execute(f"{_SELECT}{where} ORDER BY number").fetchall()
            if fetched:
                self._store(snapshot, *zip(*fetched, strict=True))
        finally:
            gc.enable()
        missing = connection.execute("SELECT rollout, missing FROM unread").fetchall()
        self.missing = {number - 1: tuple(msgspec.json.decode(listed)) for number, listed in missing}
        return len(fetched)

    def _store(self, snapshot: int, numbers: Sequence[int], ids: Sequence[str], *columns: Sequence[Any]) -> None:
        rows: Array = np.array(numbers, np.int64) - 1
        before = len(self.ids)
        self._grow(int(rows[-1]) + 1)
        if rows[0] == before and len(rows) == len(self.ids) - before:
            self.ids[before:] = ids
        else:
            for row, id_ in zip(rows.tolist(), ids, strict=True):
                self.ids[row] = id_
        for (name, column), values in zip(_COLUMNS.items(), columns, strict=True):
            self.columns[name][rows] = self._encode(name, column, values)
        self.columns["changed"][rows] = snapshot
        self._lists.clear()

    def _encode(self, name: str, column: _RowColumn, values: Sequence[Any]) -> Any:
        if column.width > 1:
            return np.frombuffer(b"".join(values), column.kind).reshape(len(values), column.width)
        return np.array(self.texts[name].codes(values) if name in self.texts else values, _dtype(column))

    def _grow(self, size: int) -> None:
        more = size - len(self.ids)
        if more > 0:
            self.ids += [""] * more
            for name, held in self.columns.items():
                self.columns[name] = np.concatenate([held, np.zeros((more, *held.shape[1:]), held.dtype)])

    def tries(self, rollout: str) -> dict[int, int]:
        """The row of each try of a rollout; empty if there is no such rollout."""
        fresh = zip(self.ids[self._listed :], self.columns["try_index"][self._listed :].tolist(), strict=True)
        for row, (own, try_index) in enumerate(fresh, self._listed):  # a row keeps its key
            self._tries.setdefault(own, {})[try_index] = row
        self._listed = len(self)
        return self._tries.get(rollout, {})

    def get(self, name: str, row: int) -> Any:
        """One number."""
        return self.columns[name][row].item()

    def text(self, row: int, name: str) -> str | None:
        code: int = self.columns[name][row]
        return self.texts[name].values[code]

    def lists(self, name: str) -> list[tuple[str, ...] | None]:
        """The lists of a column, by code."""
        if name not in self._lists:
            stored = self.texts[name].values
            self._lists[name] = [None if one is None else tuple(msgspec.json.decode(one)) for one in stored]
        return self._lists[name]

    def decoded_terms(self) -> list[dict[str, float]]:
        """The reward terms, by the codes of their column."""
        stored = self.texts["terms"].values
        for text in stored[len(self._terms) :]:  # a code keeps its text
            self._terms.append({} if text is None else decode_numbers(text.encode()))
        return self._terms

    def key(self, row: int) -> tuple[str, int]:
        """A rollout and its try."""
        return self.ids[row], self.get("try_index", row)


def _dtype(column: _RowColumn) -> str:
    return "i4" if column.kind in ("text", "list") else column.kind


def _empty(column: _RowColumn) -> Array:
    return np.zeros(0 if column.width == 1 else (0, column.width), _dtype(column))

"""What was found out about a run, kept beside it: RUN/cache/view-POLICY-VERSION.arrow. It may be deleted at any time; a
run that cannot be written to has none."""

import json
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from rolltape.records.policy import Policy
from rolltape.view.following import Marks, RunPlaces
from rolltape.view.reports import Key, Said, Spot, TrainerFigures
from rolltape.view.rows import LISTS, NUMBERS, TEXTS
from rolltape.view.state import RunState
from rolltape.view.summary import SUMMARY_VERSION
from rolltape.view.table import Coded

FOLDER = "cache"
_CHECK_BYTES = 4
_UNREADABLE = (OSError, pa.ArrowException, msgspec.MsgspecError, ValueError, KeyError, TypeError, AttributeError)


class _Aside(msgspec.Struct):
    """What a state holds besides its columns."""

    created: float | None  # of the run: another one at the same place has another
    marks: bytes
    spots: dict[int, list[Spot]]
    early: list[tuple[Key, list[Said]]]
    announced: list[tuple[int, str, str]]
    environments: list[tuple[str | None, int, str]]
    trainer: list[TrainerFigures]
    last_activity_ns: int
    sources: list[str]


class Folder:
    """Where the cache of a run is kept: beside the run, or for this process alone where nothing can be written."""

    def __init__(self, places: RunPlaces) -> None:
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        directory = places.directory
        self.created = None if directory is None else directory.about.get("created")
        own = None if directory is None else directory.path / FOLDER
        if own is not None and _is_writable(own):
            self.path = own
        else:
            self._temporary = tempfile.TemporaryDirectory(prefix="rolltape-view-")
            self.path = Path(self._temporary.name)

    def close(self) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def cache_path(folder: Folder, policy: Policy) -> Path:
    """The file for a policy and this version of the summaries."""
    return folder.path / f"view-{policy.key}-{SUMMARY_VERSION}.arrow"


def table_of(state: RunState) -> pa.Table:
    """A state as a table, a copy that later changes do not reach."""
    rows = state.rows
    columns: dict[str, Any] = {"id": pa.array(rows.ids, pa.string())}
    for name in TEXTS:
        columns[name] = _dictionary(rows.columns[name], rows.texts[name].values)
    for name in LISTS:
        values = [None if one is None else json.dumps(one) for one in rows.lists[name].values]
        columns[name] = _dictionary(rows.columns[name], values)
    for name, (_, _, width) in NUMBERS.items():
        numbers = rows.columns[name].copy()
        flat = pa.array(numbers.reshape(-1))
        columns[name] = flat if width == 1 else pa.FixedSizeListArray.from_arrays(flat, width)
    return pa.table(columns)


def aside_of(state: RunState, created: float | None) -> bytes:
    """What goes with the table."""
    return msgspec.json.encode(
        _Aside(
            created=created,
            marks=state.marks,
            spots={row: list(spots.values()) for row, spots in state.spots.items()},
            early=list(state.early.items()),
            announced=[(at_ns, writer, version) for (at_ns, writer), version in state.announced.items()],
            environments=[(source, *said) for source, said in state.environments.items()],
            trainer=list(state.trainer.values()),
            last_activity_ns=state.last_activity_ns,
            sources=state.rows.sources.values,
        )
    )


def write_cache(path: Path, table: pa.Table, aside: bytes) -> None:
    """Write the file whole; another server that writes it at the same time does no harm."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_bytes(_stored(table.replace_schema_metadata({b"rolltape": aside})))
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def cached_state(path: Path, places: RunPlaces, created: float | None) -> RunState | None:
    """The state that was kept; None: there is none, it cannot be read, or it is of what is no longer there."""
    try:
        table = _opened(path.read_bytes())
        aside = msgspec.json.decode(table.schema.metadata[b"rolltape"], type=_Aside)
        if aside.created != created or not _is_current(msgspec.json.decode(aside.marks, type=Marks), places):
            return None
        return _revived(table, aside)
    except _UNREADABLE:
        return None


def _stored(table: pa.Table) -> bytes:
    """A table in Arrow's file format, which opens many times faster than Parquet, behind its checksum."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_table(table)
    whole = sink.getvalue().to_pybytes()
    return zlib.crc32(whole).to_bytes(_CHECK_BYTES, "big") + whole


def _opened(raw: bytes) -> pa.Table:
    whole = memoryview(raw)[_CHECK_BYTES:]
    if zlib.crc32(whole) != int.from_bytes(raw[:_CHECK_BYTES], "big"):
        raise ValueError("the cache is damaged")
    return pa.ipc.open_file(pa.py_buffer(whole)).read_all()


def _is_current(marks: Marks, places: RunPlaces) -> bool:
    """Whether each journal that was read is still there, or was sealed meanwhile into a shard that is new."""
    there = {path.stem for path in places.journal_paths()}
    known = {name.removeprefix("shard/").partition("@")[0] for name in marks.shards}
    shards = {shard for place in places.shard_places() if place.is_local for shard in place.shard_ids()}
    return (marks.journals.keys() <= there and known <= shards) or bool(shards - known)


def _revived(table: pa.Table, aside: _Aside) -> RunState:
    state = RunState()
    columns: dict[str, Any] = {}
    texts: dict[str, Coded[str | None]] = {}
    lists: dict[str, Coded[tuple[str, ...] | None]] = {}
    for name in (*TEXTS, *LISTS):
        columns[name], values = _coded(table.column(name))
        if name in TEXTS:
            texts[name] = Coded([None, *values])
        else:
            lists[name] = Coded([None, *(tuple(json.loads(one)) for one in values)])
    for name, (_, _, width) in NUMBERS.items():
        column: Any = table.column(name).combine_chunks()
        flat = column if width == 1 else column.flatten()
        numbers = flat.to_numpy(zero_copy_only=False)
        columns[name] = numbers if width == 1 else numbers.reshape(-1, width)
    ids: Any = table.column("id").to_pylist()
    state.rows.take_over(ids, columns, texts, lists, aside.sources)
    state.marks = aside.marks
    state.spots = {row: {(spot.writer, spot.sequence): spot for spot in spots} for row, spots in aside.spots.items()}
    state.early = dict(aside.early)
    state.announced = {(at_ns, writer): version for at_ns, writer, version in aside.announced}
    state.environments = {source: (at_ns, name) for source, at_ns, name in aside.environments}
    state.trainer = {figures.step: figures for figures in aside.trainer}
    state.last_activity_ns = aside.last_activity_ns
    state.snapshot, state.read_through = 1, True
    return state


def _dictionary(codes: Any, values: list[Any]) -> Any:
    """A column of texts; code 0, which is "none", as null."""
    indices = pa.array(codes.astype(np.int32) - 1, mask=codes == 0)
    return pa.DictionaryArray.from_arrays(indices, pa.array(values[1:], pa.string()))


def _coded(column: Any) -> tuple[Any, list[str]]:
    whole: Any = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    whole = whole if pa.types.is_dictionary(whole.type) else whole.dictionary_encode()
    whole = whole.chunk(0) if isinstance(whole, pa.ChunkedArray) else whole
    codes = whole.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int32) + 1
    return codes, whole.dictionary.to_pylist()

"""What was found out about a run, kept beside it: RUN/cache/view-POLICY-VERSION.kept. It may be deleted at any time; a
run that cannot be written to has none."""

import contextlib
import os
import shutil
import tempfile
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa

from rolltape.records.policy import CutPolicy
from rolltape.view.following import Marks, RunPlaces
from rolltape.view.reports import Key, Said, Spot, TrainerFigures
from rolltape.view.rows import CAUSES, FATES, LISTS, NUMBERS, STATUSES, TEXTS
from rolltape.view.state import RunState
from rolltape.view.summary import SUMMARY_VERSION
from rolltape.view.table import Coded

FOLDER = "cache"
_SUFFIX = ".kept"
_SIZE_BYTES = 8
_CHECK_BYTES = 4
_UNREADABLE = (OSError, pa.ArrowException, msgspec.MsgspecError, ValueError, KeyError, TypeError, AttributeError)
_CODES = [one.value for one in (*FATES, *CAUSES, *STATUSES)]
_KINDS = {
    **dict.fromkeys((*TEXTS, *LISTS), ("i4", 1)),
    **{name: (kind, n) for name, (kind, _, n) in NUMBERS.items()},
}


class Kept(msgspec.Struct):
    """A state as it is written down."""

    created: float | None  # of the run: another one at the same place has another
    codes: list[str]  # what numbers in columns stand for, and which widths they have
    marks: bytes
    ids: list[str]
    columns: dict[str, bytes]  # the numbers of all rows, as they lie in memory
    texts: dict[str, list[str | None]]  # what the codes in columns stand for
    lists: dict[str, list[tuple[str, ...] | None]]
    sources: list[str]
    spots: dict[int, list[Spot]]
    early: list[tuple[Key, list[Said]]]
    announced: list[tuple[int, str, str]]
    environments: list[tuple[str | None, int, str]]
    trainer: list[TrainerFigures]
    problems: tuple[str, ...]
    odd: tuple[str, ...]
    incomplete: dict[int, tuple[str, ...]]
    index_made: str | None
    index_read: int
    last_activity_ns: int


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
            if own is not None:
                _copy(own, self.path)

    def close(self) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def _copy(there: Path, here: Path) -> None:
    """Take over what somebody else keeps of the run; what is torn on the way is made again."""
    with contextlib.suppress(OSError):
        for file in there.iterdir():
            if file.suffix == _SUFFIX or ".sqlite" in file.suffixes:
                shutil.copyfile(file, here / file.name)


def cache_path(folder: Folder, policy: CutPolicy) -> Path:
    """The file for a policy and this version of the summaries."""
    return folder.path / f"view-{policy.key}-{SUMMARY_VERSION}{_SUFFIX}"


def kept_of(state: RunState, created: float | None) -> Kept:
    """A state as it is now: later changes do not reach it."""
    rows = state.rows
    return Kept(
        created=created,
        codes=_CODES,
        marks=state.marks,
        ids=list(rows.ids),
        columns={name: rows.columns[name].astype(kind).tobytes() for name, (kind, _) in _KINDS.items()},
        texts={name: list(coded.values) for name, coded in rows.texts.items()},
        lists={name: list(coded.values) for name, coded in rows.lists.items()},
        sources=list(rows.sources.values),
        spots={row: list(spots.values()) for row, spots in state.spots.items()},
        early=[(key, list(said)) for key, said in state.early.items()],
        announced=[(at_ns, writer, version) for (at_ns, writer), version in state.announced.items()],
        environments=[(source, *said) for source, said in state.environments.items()],
        trainer=list(state.trainer.values()),
        problems=state.problems,
        odd=state.odd,
        incomplete=dict(state.incomplete),
        index_made=state.index_made,
        index_read=state.index_read,
        last_activity_ns=state.last_activity_ns,
    )


def write_cache(path: Path, kept: Kept) -> None:
    """Write the file whole; another server that writes it at the same time does no harm."""
    raw = msgspec.msgpack.encode(kept)
    stored = len(raw).to_bytes(_SIZE_BYTES, "big") + pa.compress(raw, codec="lz4", asbytes=True)
    path.parent.mkdir(exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_bytes(zlib.crc32(stored).to_bytes(_CHECK_BYTES, "big") + stored)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def cached_state(path: Path, places: RunPlaces, created: float | None) -> RunState | None:
    """The state that was kept; None: there is none, it cannot be read, or it is of what is no longer there."""
    try:
        kept = _read(path.read_bytes())
        if (kept.created, kept.codes) != (created, _CODES):
            return None
        if not _is_current(msgspec.json.decode(kept.marks, type=Marks), places):
            return None
        return _revived(kept)
    except _UNREADABLE:
        return None


def _read(raw: bytes) -> Kept:
    stored = memoryview(raw)[_CHECK_BYTES:]
    if zlib.crc32(stored) != int.from_bytes(raw[:_CHECK_BYTES], "big"):
        raise ValueError("the cache is damaged")
    size = int.from_bytes(stored[:_SIZE_BYTES], "big")
    whole = pa.decompress(pa.py_buffer(stored[_SIZE_BYTES:]), decompressed_size=size, codec="lz4")
    return msgspec.msgpack.decode(whole, type=Kept)


def _is_current(marks: Marks, places: RunPlaces) -> bool:
    """Whether each journal that was read is still there, or was sealed meanwhile into a shard that is new."""
    there = {path.stem for path in places.journal_paths()}
    known = {name.removeprefix("shard/").partition("@")[0] for name in marks.shards}
    shards = {shard for place in places.shard_places() if place.is_local for shard in place.shard_ids()}
    return (marks.journals.keys() <= there and known <= shards) or bool(shards - known)


def _revived(kept: Kept) -> RunState:
    # By numpy alone: Arrow's own conversion imports pandas, which takes as long as all else that happens at the start.
    columns = {
        name: np.frombuffer(kept.columns[name], kind).reshape((len(kept.ids), width)[: 1 + (width > 1)])
        for name, (kind, width) in _KINDS.items()
    }
    state = RunState()
    state.rows.take_over(
        kept.ids,
        columns,
        {name: Coded(kept.texts[name]) for name in TEXTS},
        {name: Coded(kept.lists[name]) for name in LISTS},
        kept.sources,
    )
    state.marks, state.problems, state.incomplete = kept.marks, kept.problems, kept.incomplete
    state.odd = kept.odd
    state.index_made, state.index_read = kept.index_made, kept.index_read
    state.spots = {row: {(spot.writer, spot.sequence): spot for spot in spots} for row, spots in kept.spots.items()}
    state.early = dict(kept.early)
    state.announced = {(at_ns, writer): version for at_ns, writer, version in kept.announced}
    state.environments = {source: (at_ns, name) for source, at_ns, name in kept.environments}
    state.trainer = {figures.step: figures for figures in kept.trainer}
    state.last_activity_ns = kept.last_activity_ns
    state.snapshot, state.read_through = 1, True
    return state

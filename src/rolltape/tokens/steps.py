"""The folders and markers of a run's token records, and which steps are complete.

    RUN/tokens/exporters/rank_R.json    the current exporter of a rank, which is the latest one
    RUN/tokens/step_N/rank_R.parquet    its records; where there are many, rank_R.part_1.parquet and so on
    RUN/tokens/step_N/rank_R.done       what the rank wrote of this step, once all of it is there
    RUN/tokens/step_N/STABLE            the attempts of all ranks, once every rank is done

A file whose name begins with a dot and ends in `.partial` is not complete. JSON lines lie under `token_exports` in the
same way, with one `rank_R.jsonl` per rank.
"""

import enum
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from rolltape.errors import DamagedTapeError, RecordError

STABLE = "STABLE"

M = TypeVar("M", bound=msgspec.Struct)

_STEP = re.compile(r"step_(\d+)")
_RANK = re.compile(r"rank_(\d+)\.")


class Format(enum.StrEnum):
    """File formats of token records. Each has its own folder."""

    PARQUET = "parquet"
    JSONL = "jsonl"  # in prime-rl's schema, where prime-rl puts it

    @property
    def folder(self) -> str:
        return "tokens" if self is Format.PARQUET else "token_exports"


class TokenFile(msgspec.Struct, frozen=True):
    """One file of records, as its rank wrote it."""

    name: str
    size: int  # bytes
    records: int
    tokens: int | None  # None: not counted, as for files that prime-rl itself wrote


class RankDone(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank wrote of a step in one attempt at it."""

    rank: int
    world_size: int
    writers: int  # how many ranks write
    exporter: str
    attempt: str
    files: tuple[TokenFile, ...]
    dropped_records: int = 0  # the queue was full
    lost_records: int = 0  # they could not be written
    sample_fraction: float = 1.0  # the share of sequences that was to be written
    written_at_ns: int | None = None  # None: written by 0.1, which did not store it, or by prime-rl

    @property
    def records(self) -> int:
        return sum(file.records for file in self.files)


class Stable(msgspec.Struct, frozen=True):
    """The content of STABLE: the attempt of every rank that writes."""

    attempts: dict[int, str]


class Announced(msgspec.Struct, frozen=True):
    """The content of `exporters/rank_R.json`: the current exporter of a rank."""

    exporter: str


class TokenStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step's token records: the ranks that are done, and whether that is all of them."""

    step: int
    file_format: Format
    folder: Path
    ranks: tuple[RankDone, ...]
    writers: int
    stable: bool
    partial_ranks: tuple[int, ...]  # ranks with files that are not complete

    def paths(self, rank: int | None = None) -> Iterator[Path]:
        """The files of the step, or of one rank. A file with another size than was written raises DamagedTapeError."""
        for done in self.ranks:
            for file in done.files if rank in (None, done.rank) else ():
                path = self.folder / file.name
                try:
                    size = path.stat().st_size
                except OSError as error:
                    raise DamagedTapeError(f"{path}: cannot be read: {error.strerror}") from None
                if size != file.size:
                    raise DamagedTapeError(f"{path}: has {size} bytes, but {file.size} were written; copy it again")
                yield path


def list_steps(run: str | Path) -> list[TokenStep]:
    """The steps of a run that have token records, in order; of one in two formats, the stable one first."""
    found = []
    for file_format in Format:
        root = Path(run) / file_format.folder
        for folder in root.glob("step_*"):
            named = _STEP.fullmatch(folder.name)
            if named and folder.is_dir():
                found.append(_load_step(root, folder, int(named[1]), file_format))
    return sorted(found, key=lambda step: (step.step, not step.stable, step.file_format))


def token_folder(run: str | os.PathLike[str], file_format: Format) -> Path:
    """Where the token records of a run are written."""
    if "://" in os.fspath(run):
        raise RecordError(f"run {os.fspath(run)}: token records are written to a path, not to a URL; give a path")
    return Path(run).expanduser().absolute() / file_format.folder


def step_folder(root: Path, step: int) -> Path:
    return root / f"step_{step}"


def part_name(rank: int, part: int, file_format: Format) -> str:
    return f"rank_{rank}{f'.part_{part}' if part else ''}.{file_format}"


def announcement_path(root: Path, rank: int) -> Path:
    return root / "exporters" / f"rank_{rank}.json"


def current_exporter(root: Path, rank: int) -> str | None:
    """The exporter that was made last for a rank, or None if there was none."""
    found = _read_marker(announcement_path(root, rank), Announced)
    return None if found is None else found.exporter


def ranks_with_files(folder: Path) -> set[int]:
    """The ranks that have a file in a step's folder, complete or not."""
    return {int(named[1]) for path in folder.iterdir() if (named := _RANK.match(path.name.removeprefix(".")))}


def done_ranks(folder: Path) -> dict[int, RankDone]:
    """The markers of the ranks that have written a step."""
    markers = (_read_marker(path, RankDone) for path in folder.glob("rank_*.done"))
    return {done.rank: done for done in sorted(filter(None, markers), key=lambda done: done.rank)}


def current_ranks(root: Path, folder: Path) -> dict[int, RankDone]:
    """The markers whose exporter is still the current one of its rank; the other ranks may write the step again."""
    return {rank: done for rank, done in done_ranks(folder).items() if current_exporter(root, rank) == done.exporter}


def _read_marker(path: Path, kind: type[M]) -> M | None:
    """The content of a marker, or None if there is none or Rolltape did not write it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None


def _load_step(root: Path, folder: Path, step: int, file_format: Format) -> TokenStep:
    done = done_ranks(folder)
    stable = _read_marker(folder / STABLE, Stable)
    is_stable = stable is not None and stable.attempts == {rank: one.attempt for rank, one in done.items()}
    if not is_stable:
        # Ranks of an earlier attempt are not shown beside those of a later one.
        done = current_ranks(root, folder) or done
    if not done and file_format is Format.JSONL:
        done = _written_by_primerl(folder)
        is_stable = bool(done) and (folder / STABLE).exists()
    partial = {int(named[1]) for path in folder.glob(".rank_*.partial") if (named := _RANK.match(path.name[1:]))}
    return TokenStep(
        step=step,
        file_format=file_format,
        folder=folder,
        ranks=tuple(done.values()),
        writers=max((one.writers for one in done.values()), default=0),
        stable=is_stable,
        partial_ranks=tuple(sorted(partial)),
    )


def _written_by_primerl(folder: Path) -> dict[int, RankDone]:
    """The ranks of a folder that prime-rl itself wrote; it writes no markers for them."""
    found = {}
    paths = list(folder.glob("rank_*.jsonl"))
    for path in paths:
        if named := _RANK.match(path.name):
            rank = int(named[1])
            file = TokenFile(path.name, path.stat().st_size, _count_lines(path), None)
            found[rank] = RankDone(
                rank=rank, world_size=len(paths), writers=len(paths), exporter="", attempt="", files=(file,)
            )
    return dict(sorted(found.items()))


def _count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))

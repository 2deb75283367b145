"""Where token records lie in a run, and which steps of them are whole.

    RUN/tokens/exporters/rank_R.json    the exporter that speaks for a rank: the one that was made last
    RUN/tokens/step_N/rank_R.parquet    its records; where there are many, rank_R.part_1.parquet and so on
    RUN/tokens/step_N/rank_R.done       what the rank wrote of this step, written when all of it is there
    RUN/tokens/step_N/STABLE            every rank is done, and with which attempt

A name that begins with a dot and ends in `.partial` is of a file whose rank has not got done. JSON lines lie under
`token_exports` in the same way, in one `rank_R.jsonl` a rank.
"""

import enum
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from rolltape.errors import DamagedTapeError

STABLE = "STABLE"

M = TypeVar("M", bound=msgspec.Struct)

_STEP = re.compile(r"step_(\d+)")
_RANK = re.compile(r"rank_(\d+)\.")


class Format(enum.StrEnum):
    """How token records are written; each in a folder of its own."""

    PARQUET = "parquet"
    JSONL = "jsonl"  # in prime-rl's schema, where prime-rl puts it

    @property
    def folder(self) -> str:
        return "tokens" if self is Format.PARQUET else "token_exports"


class TokenFile(msgspec.Struct, frozen=True):
    """A file of records."""

    name: str
    size: int  # bytes
    records: int
    tokens: int


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

    @property
    def records(self) -> int:
        return sum(file.records for file in self.files)


class Stable(msgspec.Struct, frozen=True):
    """What STABLE says: the attempt of every rank that writes."""

    attempts: dict[int, str]


class Announced(msgspec.Struct, frozen=True):
    """Which exporter speaks for a rank."""

    exporter: str


class TokenStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step's token records: the ranks that are done, and whether that is all of them."""

    step: int
    file_format: Format
    folder: Path
    ranks: tuple[RankDone, ...]
    writers: int
    stable: bool
    partial_ranks: tuple[int, ...]  # ranks with files that are half-written

    def paths(self, rank: int | None = None) -> Iterator[Path]:
        """The files of the step, or of one rank; one that has another size than was written is damaged."""
        for done in self.ranks:
            for file in done.files if rank in (None, done.rank) else ():
                path = self.folder / file.name
                try:
                    size = path.stat().st_size
                except OSError as error:
                    raise DamagedTapeError(f"{path}: cannot be read: {error.strerror}") from None
                if size != file.size:
                    raise DamagedTapeError(f"{path}: has {size} bytes, but {file.size} were written")
                yield path


def steps_of(run: str | Path) -> list[TokenStep]:
    """The steps of a run that have token records, in order."""
    found = []
    for file_format in Format:
        root = Path(run) / file_format.folder
        for folder in root.glob("step_*"):
            named = _STEP.fullmatch(folder.name)
            if named and folder.is_dir():
                found.append(_step(root, folder, int(named[1]), file_format))
    return sorted(found, key=lambda step: (step.step, step.file_format))


def folder_of(root: Path, step: int) -> Path:
    return root / f"step_{step}"


def announcement(root: Path, rank: int) -> Path:
    return root / "exporters" / f"rank_{rank}.json"


def announced(root: Path, rank: int) -> str | None:
    """The exporter that speaks for a rank; None: none was ever made."""
    said = read_marker(announcement(root, rank), Announced)
    return None if said is None else said.exporter


def ranks_in(folder: Path) -> set[int]:
    """The ranks of which there is a file, whole or not."""
    return {int(named[1]) for path in folder.iterdir() if (named := _RANK.match(path.name.removeprefix(".")))}


def done_ranks(folder: Path) -> dict[int, RankDone]:
    """What each rank says to have written of a step."""
    markers = (read_marker(path, RankDone) for path in folder.glob("rank_*.done"))
    return {done.rank: done for done in sorted(filter(None, markers), key=lambda done: done.rank)}


def current_ranks(root: Path, folder: Path) -> dict[int, RankDone]:
    """Of these, those whose exporter still speaks for the rank: the others may be about to write the step again."""
    return {rank: done for rank, done in done_ranks(folder).items() if announced(root, rank) == done.exporter}


def read_marker(path: Path, kind: type[M]) -> M | None:
    """What a marker says; None: there is none, or it is not one of ours."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None


def _step(root: Path, folder: Path, step: int, file_format: Format) -> TokenStep:
    done = done_ranks(folder)
    stable = read_marker(folder / STABLE, Stable)
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
    """The ranks of a folder that prime-rl itself wrote, which has no marker for each."""
    found = {}
    paths = list(folder.glob("rank_*.jsonl"))
    for path in paths:
        if named := _RANK.match(path.name):
            rank = int(named[1])
            file = TokenFile(path.name, path.stat().st_size, _lines_in(path), 0)
            found[rank] = RankDone(
                rank=rank, world_size=len(paths), writers=len(paths), exporter="", attempt="", files=(file,)
            )
    return dict(sorted(found.items()))


def _lines_in(path: Path) -> int:
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))

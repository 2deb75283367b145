"""Writes one rank's files of a step, and marks the step when every rank is done.

There is no barrier between ranks. Each writes a marker when it is done, and the rank that finds all markers writes
STABLE. A marker counts only while the exporter that wrote it is the current one of its rank. If the whole job is
started again, every rank announces a new exporter before any rank can finish a step, so markers of the earlier attempt
cannot make a step stable. If only one rank is started again, the others' markers stay valid.
"""

import contextlib
import fcntl
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from rolltape.errors import TapeWriteError
from rolltape.tape.rundir import make_private_folder, open_private, write_whole
from rolltape.tokens.steps import (
    STABLE,
    Announced,
    Format,
    RankDone,
    Stable,
    TokenFile,
    announcement_path,
    current_exporter,
    current_ranks,
    done_ranks,
    part_name,
    ranks_with_files,
    step_folder,
)


class RankFiles:
    """The files of one rank in a run's token records."""

    def __init__(
        self, root: Path, file_format: Format, *, rank: int, world_size: int, writers: int, fraction: float = 1.0
    ) -> None:
        self._root = root
        self._format = file_format
        self.rank = rank
        self._world_size = world_size
        self._writers = writers
        self.fraction = fraction
        self._exporter = uuid.uuid4().hex
        self._announced = False

    def announce(self) -> None:
        """Make this exporter the current one of its rank, in place of any earlier one."""
        path = announcement_path(self._root, self.rank)
        make_private_folder(path.parent)
        with self._locked():
            write_whole(path, msgspec.json.encode(Announced(self._exporter)))
        self._announced = True

    def begin(self, step: int) -> str:
        """Start an attempt at a step and return its name. Earlier files of this rank for the step are removed."""
        if not self._announced:
            self.announce()
        folder = step_folder(self._root, step)
        with self._locked():
            if not self._is_own():
                raise self._replaced()
            make_private_folder(folder)
            # The marker is removed before STABLE, so that no rank can write STABLE again in between.
            (folder / f"rank_{self.rank}.done").unlink(missing_ok=True)
            (folder / STABLE).unlink(missing_ok=True)
            _remove(folder, f"rank_{self.rank}.*", f".rank_{self.rank}.*")
        return uuid.uuid4().hex[:12]

    def partial(self, step: int, attempt: str, part: int) -> Path:
        """The path that a part is written to."""
        return step_folder(self._root, step) / f".rank_{self.rank}.{attempt}.{part}.partial"

    def finish(
        self, step: int, attempt: str, parts: Sequence[TokenFile], *, dropped_records: int, lost_records: int
    ) -> bool:
        """Rename the parts to their final names and mark the rank as done. Return whether the step is stable now."""
        folder = step_folder(self._root, step)
        if self._format is Format.JSONL:
            parts = [_join_parts(folder, parts, self.partial(step, attempt, 0))]
        with self._locked():
            if not self._is_own():
                _remove(folder, f".rank_{self.rank}.{attempt}.*")
                raise self._replaced()
            done = RankDone(
                rank=self.rank,
                world_size=self._world_size,
                writers=self._writers,
                exporter=self._exporter,
                attempt=attempt,
                files=self._named(folder, parts),
                dropped_records=dropped_records,
                lost_records=lost_records,
                sample_fraction=self.fraction,
                written_at_ns=time.time_ns(),
            )
            others = self._others(folder)
            write_whole(folder / f"rank_{self.rank}.done", msgspec.json.encode(done))
            return self._mark_stable(folder, {**others, self.rank: done})

    def _others(self, folder: Path) -> dict[int, RankDone]:
        """The markers of the other ranks of this job, or none while some are missing. Older markers are removed."""
        if len(list(folder.glob("rank_*.done"))) < self._writers - 1:
            return {}  # the common case: no need to read the markers
        job = (self._world_size, self._writers)
        current = {
            rank: done
            for rank, done in current_ranks(self._root, folder).items()
            if (done.world_size, done.writers) == job
        }
        for rank in done_ranks(folder).keys() - current.keys():
            # Of an earlier attempt. Its files are removed when the rank writes the step again, or all others have.
            (folder / f"rank_{rank}.done").unlink(missing_ok=True)
        return current

    def _mark_stable(self, folder: Path, done: Mapping[int, RankDone]) -> bool:
        if len(done) < self._writers:
            return False
        for rank in ranks_with_files(folder) - done.keys():
            # An earlier start of the job had more ranks.
            _remove(folder, f"rank_{rank}.*", f".rank_{rank}.*")
        attempts = {rank: one.attempt for rank, one in done.items()}
        write_whole(folder / STABLE, msgspec.json.encode(Stable(attempts)))
        return True

    def _named(self, folder: Path, parts: Sequence[TokenFile]) -> tuple[TokenFile, ...]:
        files = []
        for number, part in enumerate(parts):
            name = part_name(self.rank, number, self._format)
            (folder / part.name).replace(folder / name)
            files.append(msgspec.structs.replace(part, name=name))
        return tuple(files)

    def _is_own(self) -> bool:
        return current_exporter(self._root, self.rank) == self._exporter

    def _replaced(self) -> TapeWriteError:
        return TapeWriteError(
            f"{self._root}: a later exporter was made for rank {self.rank}, and this one writes no more; "
            "give each process its own rank"
        )

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with open_private(self._root / ".lock", "ab") as handle:
            # If the file system has no locks, a reader still recognizes an outdated STABLE, which names the attempts.
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
            try:
                yield
            finally:
                # Closing it is not enough: a process that was forked in the meantime has it open too.
                with contextlib.suppress(OSError):
                    fcntl.flock(handle, fcntl.LOCK_UN)


def _remove(folder: Path, *patterns: str) -> None:
    for pattern in patterns:
        for path in folder.glob(pattern):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()


def _join_parts(folder: Path, parts: Sequence[TokenFile], empty: Path) -> TokenFile:
    """Append the parts to the first of them; without any, create the file `empty`."""
    whole = folder / parts[0].name if parts else empty
    with open_private(whole, "ab") as out:
        for part in parts[1:]:
            path = folder / part.name
            with path.open("rb") as lines:
                shutil.copyfileobj(lines, out, 1 << 20)
            path.unlink()
    records, tokens = sum(part.records for part in parts), sum(part.tokens or 0 for part in parts)
    return TokenFile(whole.name, whole.stat().st_size, records, tokens)

"""Reads the token records of a run, and writes records that were made without a trainer."""

import os
import tempfile
import time
import uuid
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rolltape.errors import MisalignedError, RecordError, TapeWriteError
from rolltape.records.sample import Sample
from rolltape.records.token_record import FACT_COLUMNS, TOKEN_COLUMNS, StepFiles, TokenColumn, TokenRecord
from rolltape.tape.rundir import make_private_folder, write_whole
from rolltape.tokens.primerl import read_lines, write_lines
from rolltape.tokens.sequences import PART_TOKENS, Sequences, is_in_fraction
from rolltape.tokens.steps import (
    STABLE,
    Format,
    RankDone,
    Stable,
    TokenFile,
    TokenStep,
    done_ranks,
    list_steps,
    part_name,
    step_folder,
    token_folder,
)

_OWN = "scored"  # stands for the exporter in markers that are written here


def read_tokens(
    run: str | Path,
    *,
    step: int | None = None,
    rank: int | None = None,
    columns: Collection[str] | None = None,
    stable_only: bool = False,
) -> Iterator[TokenRecord]:
    """Read the token records of a run, or of one step or rank.

    `columns` limits which of the optional per-token columns are read. Finished ranks are read even if other ranks of
    the step are not finished. With `stable_only`, only steps that all ranks have written are read.

        for record in read_tokens("runs/exp1", step=12, columns=["ratio"]):
            print(record.place, record.ratio[record.trained_mask].max())
    """
    for found in list_steps(run):
        if step in (None, found.step) and (found.stable or not stable_only):
            yield from read_step(found, rank, columns)


def read_step(
    step: TokenStep, rank: int | None = None, columns: Collection[str] | None = None
) -> Iterator[TokenRecord]:
    """Read the records of one step, rank by rank."""
    for path in step.paths(rank):
        if step.file_format is Format.PARQUET:
            from rolltape.tokens.parquet import read_parquet

            yield from read_parquet(path, columns)
        else:
            yield from read_lines(path)


def describe_files(step: TokenStep, steps: Iterable[TokenStep]) -> StepFiles:
    """The facts about a step's files. `steps` are all steps of its run."""
    written_by = {done.exporter for done in step.ranks}
    missing = sum(done.dropped_records + done.lost_records for done in step.ranks)
    fraction = min((done.sample_fraction for done in step.ranks), default=0.0)
    return StepFiles(
        complete=step.stable and not missing and written_by != {_OWN},
        includes=lambda sample: is_in_fraction(sample, fraction),
        elsewhere=lambda: {name for other in steps if other.step != step.step for name in read_sample_ids(other)},
        written_at_ns=_written_at_ns(step),
    )


def _written_at_ns(step: TokenStep) -> int | None:
    """When the last rank was done. If markers lack the time (0.1, prime-rl), the times of the files count."""
    times = [done.written_at_ns for done in step.ranks]
    if None in times:
        times = [path.stat().st_mtime_ns for path in step.folder.iterdir()]
    return max((time for time in times if time is not None), default=None)


def read_sample_ids(step: TokenStep) -> set[str]:
    """The samples that the records of a step name."""
    return {name for path in step.paths() for name in file_sample_ids(step.file_format, path) if name is not None}


def file_sample_ids(file_format: Format, path: Path) -> list[str | None]:
    """The samples that the records of a file name, in their order."""
    if file_format is Format.PARQUET:
        from rolltape.tokens.parquet import read_column

        return read_column(path, "sample")
    return [record.sample for record in read_lines(path)]


def score_sample(sample: Sample, logprobs: npt.ArrayLike) -> TokenRecord:
    """Pair a sample with another model's logprobs of its tokens, and compute how far they are apart.

    `logprobs` has a value for each id, conditioned on all ids before it, or NaN if there is none, as for the first id.
    """
    theirs = np.asarray(logprobs, np.float32)
    if theirs.shape != sample.ids.shape:
        raise MisalignedError(
            f"sample {sample.id}: {len(sample.ids)} ids, but logprobs of shape {theirs.shape}; give one per id"
        )
    ours = sample.logprobs.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # values that are not finite are reported
        log_ratio = theirs - ours
        ratio, mismatch_kl = np.exp(log_ratio), np.expm1(log_ratio) - log_ratio
        prob_delta = np.exp(theirs) - np.exp(ours)
    return TokenRecord(
        step=sample.step,
        rank=0,
        micro_step=0,
        micro_sequence=0,
        sequence=0,
        sample=sample.id,
        rollout=sample.rollout,
        group=sample.group,
        versions=tuple(dict.fromkeys(last for _, last in sample.versions)),
        reward=sample.reward,
        loss_weight=sample.loss_weight,
        ids=sample.ids,
        position_ids=np.arange(len(theirs), dtype=np.int32),
        trained_mask=sample.trained_mask,
        advantages=None if sample.advantage is None else np.full(len(theirs), sample.advantage, np.float32),
        inference_logprobs=ours,
        trainer_logprobs=theirs,
        log_ratio=log_ratio,
        ratio=ratio,
        mismatch_kl=mismatch_kl,
        prob_delta=prob_delta,
    )


def write_tokens(
    run: str | os.PathLike[str],
    step: int,
    records: Iterable[TokenRecord],
    *,
    file_format: Format = Format.PARQUET,
) -> int:
    """Write the records of a step, replacing those that an earlier call wrote. Return how many.

    This is for one process with its records on the host. A trainer's ranks use `TokenExporter`; a step that they wrote
    is not replaced.
    """
    if step < 0:
        raise RecordError(f"step is {step}; give 0 or more")
    root = token_folder(run, file_format)
    folder = step_folder(root, step)
    _check_own(folder)
    make_private_folder(root)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=root) as aside:
        made = Path(aside) / folder.name
        make_private_folder(made)
        files = _write_files(made, step, records, file_format)
        done = RankDone(
            rank=0,
            world_size=1,
            writers=1,
            exporter=_OWN,
            attempt=uuid.uuid4().hex[:12],
            files=files,
            written_at_ns=time.time_ns(),
        )
        write_whole(made / "rank_0.done", msgspec.json.encode(done))
        write_whole(made / STABLE, msgspec.json.encode(Stable({0: done.attempt})))
        _check_own(folder)
        if folder.exists():
            folder.rename(Path(aside) / "before")
        made.rename(folder)  # so that the step appears whole, or not at all
    return done.records


def _check_own(folder: Path) -> None:
    """Refuse a step with records that were not written here."""
    if folder.exists() and {done.exporter for done in done_ranks(folder).values()} != {_OWN}:
        raise TapeWriteError(f"{folder}: holds a trainer's token records; choose another step, or another run")


def _write_files(folder: Path, step: int, records: Iterable[TokenRecord], file_format: Format) -> tuple[TokenFile, ...]:
    parquet = file_format is Format.PARQUET
    write = write_lines
    if parquet:
        from rolltape.tokens.parquet import write_parquet

        write = write_parquet
    files: list[TokenFile] = []
    count = 0
    for held in _parts(records) if parquet else [list(map(_sequences, records))]:  # JSON lines are one file
        path = folder / part_name(0, len(files), file_format)
        write(path, step, 0, count, held)
        files.append(TokenFile(path.name, path.stat().st_size, len(held), sum(one.tokens for one in held)))
        count += len(held)
    return tuple(files)


def _parts(records: Iterable[TokenRecord]) -> Iterator[list[Sequences]]:
    """Split records into the parts that become one file each."""
    held: list[Sequences] = []
    tokens = 0
    for one in map(_sequences, records):
        if held and tokens + one.tokens > PART_TOKENS:
            yield held
            held, tokens = [], 0
        held.append(one)
        tokens += one.tokens
    if held:
        yield held


def _sequences(record: TokenRecord) -> Sequences:
    return Sequences(
        lengths=np.array([len(record)], np.int64),
        columns={name: _as_stored(record, TOKEN_COLUMNS[name], values) for name, values in record.columns().items()},
        facts={name: [getattr(record, name)] for name in FACT_COLUMNS},
    )


def _as_stored(record: TokenRecord, column: TokenColumn, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A column in the type that files hold it in."""
    stored = np.asarray(values, column.dtype)
    if column.dtype is np.int32 and not np.array_equal(stored, values):
        raise RecordError(
            f"token record of sample {record.sample}: {column.name} are not all 32-bit integers; give smaller ones"
        )
    return stored

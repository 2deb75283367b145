"""Token records without a trainer: samples that something else scored, an engine with other weights or kernels, say."""

import os
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rolltape.errors import MisalignedError, RecordError, TapeWriteError
from rolltape.records.sample import Sample
from rolltape.records.token_record import FLAG_COLUMNS, ID_COLUMNS, TOKEN_COLUMNS, TokenRecord
from rolltape.tape.rundir import write_whole
from rolltape.tokens.parquet import write_parquet
from rolltape.tokens.sequences import PART_TOKENS, Sequences
from rolltape.tokens.steps import STABLE, Format, RankDone, Stable, TokenFile, done_ranks, folder_of

_OWN = "scored"  # what stands for the exporter in markers that were written here
_NOT_FACTS = ("step", "rank", "sequence", *TOKEN_COLUMNS)  # the first three are where it is written


def scored(sample: Sample, logprobs: npt.ArrayLike) -> TokenRecord:
    """A sample beside the logprobs that another model gave its tokens, and how far they are from the engine's.

    `logprobs` has a value for each id, given all the ids before it; NaN where there is none, as for the first.
    """
    theirs = np.asarray(logprobs, np.float32)
    if theirs.shape != sample.ids.shape:
        raise MisalignedError(f"sample {sample.id}: {len(sample.ids)} ids, but logprobs of the shape {theirs.shape}")
    ours = sample.logprobs.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # a value that is not finite is one that people look for
        log_ratio = theirs - ours
        ratio, mismatch_kl = np.exp(log_ratio), np.expm1(log_ratio) - log_ratio
        prob_delta = np.exp(theirs) - np.exp(ours)
    advantage = None if sample.advantage is None else np.full(len(theirs), sample.advantage, np.float32)
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
        ids=sample.ids,
        position_ids=np.arange(len(theirs), dtype=np.int32),
        trained_mask=sample.trained_mask,
        advantages=advantage,
        inference_logprobs=ours,
        trainer_logprobs=theirs,
        log_ratio=log_ratio,
        ratio=ratio,
        mismatch_kl=mismatch_kl,
        prob_delta=prob_delta,
    )


def write_tokens(run: str | os.PathLike[str], step: int, records: Iterable[TokenRecord]) -> int:
    """Write all the records of a step, in place of those that it was given so before; gives how many.

    For a process that is alone and has its records on the host; a trainer's ranks use `TokenExporter`, and what they
    wrote of a step stays.
    """
    if "://" in os.fspath(run):
        raise RecordError(f"run {os.fspath(run)}: token records are written to a path, not to a URL")
    if step < 0:
        raise RecordError(f"step is {step}; give 0 or more")
    root = Path(run).expanduser().absolute() / Format.PARQUET.folder
    folder = folder_of(root, step)
    _check_own(folder)
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=root) as aside:
        made = Path(aside) / folder.name
        made.mkdir()
        files = _written(made, step, records)
        done = RankDone(rank=0, world_size=1, writers=1, exporter=_OWN, attempt=uuid.uuid4().hex[:12], files=files)
        write_whole(made / "rank_0.done", msgspec.json.encode(done))
        write_whole(made / STABLE, msgspec.json.encode(Stable({0: done.attempt})))
        _check_own(folder)
        if folder.exists():
            folder.rename(Path(aside) / "before")
        made.rename(folder)  # so that the step appears whole, or not at all
    return done.records


def _check_own(folder: Path) -> None:
    """Refuse a step that has records which were not written here."""
    if folder.exists() and {done.exporter for done in done_ranks(folder).values()} != {_OWN}:
        raise TapeWriteError(f"{folder}: a trainer has written token records there; take another step, or another run")


def _written(folder: Path, step: int, records: Iterable[TokenRecord]) -> tuple[TokenFile, ...]:
    files: list[TokenFile] = []
    count = 0
    for held in _parts(records):
        path = folder / f"rank_0{f'.part_{len(files)}' if files else ''}.parquet"
        write_parquet(path, step, 0, count, held)
        files.append(TokenFile(path.name, path.stat().st_size, len(held), sum(one.tokens for one in held)))
        count += len(held)
    return tuple(files)


def _parts(records: Iterable[TokenRecord]) -> Iterator[list[Sequences]]:
    """The records in stretches of a file's worth."""
    held: list[Sequences] = []
    tokens = 0
    for one in map(_alone, records):
        if held and tokens + one.tokens > PART_TOKENS:
            yield held
            held, tokens = [], 0
        held.append(one)
        tokens += one.tokens
    if held:
        yield held


def _alone(record: TokenRecord) -> Sequences:
    facts = msgspec.structs.asdict(record)
    return Sequences(
        lengths=np.array([len(record)], np.int64),
        columns={name: _as_stored(record, name, values) for name, values in record.columns().items()},
        facts={name: [value] for name, value in facts.items() if name not in _NOT_FACTS},
    )


def _as_stored(record: TokenRecord, name: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A column in the type that files have it in."""
    if name in FLAG_COLUMNS:
        return np.asarray(values, np.bool_)
    if name not in ID_COLUMNS:
        return np.asarray(values, np.float32)
    stored = np.asarray(values, np.int32)
    if not np.array_equal(stored, values):
        raise RecordError(f"token record of sample {record.sample}: {name} are not all whole numbers of 32 bits")
    return stored

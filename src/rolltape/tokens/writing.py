"""Token records without a trainer: samples that something else scored, an engine with other weights or kernels, say."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from rolltape.errors import MisalignedError, RecordError
from rolltape.records.sample import Sample
from rolltape.records.token_record import TOKEN_COLUMNS, TokenRecord
from rolltape.tokens.parquet import write_parquet
from rolltape.tokens.rankfiles import RankFiles
from rolltape.tokens.sequences import Sequences
from rolltape.tokens.steps import Format, TokenFile

_NOT_FACTS = ("step", "rank", "sequence", *TOKEN_COLUMNS)  # the first three are where it is written


def scored(sample: Sample, logprobs: npt.ArrayLike) -> TokenRecord:
    """A sample beside the logprobs that another model gave its tokens, and how far they are from the engine's.

    `logprobs` has a value for each id, given all the ids before it; NaN where there is none, as for the first.
    """
    theirs = np.asarray(logprobs, np.float32)
    if theirs.shape != sample.ids.shape:
        raise MisalignedError(f"sample {sample.id}: {len(sample.ids)} ids, but logprobs of the shape {theirs.shape}")
    ours = sample.logprobs.astype(np.float32)
    log_ratio = theirs - ours
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
        ratio=np.exp(log_ratio),
        mismatch_kl=np.expm1(log_ratio) - log_ratio,
        prob_delta=np.exp(theirs) - np.exp(ours),
    )


def write_tokens(run: str | os.PathLike[str], step: int, records: Iterable[TokenRecord]) -> int:
    """Write all the records of a step, in place of those that it may have had; gives how many.

    For a process that is alone and has its records on the host; a trainer's ranks use `TokenExporter`.
    """
    if "://" in os.fspath(run):
        raise RecordError(f"run {os.fspath(run)}: token records are written to a path, not to a URL")
    held = [_alone(record) for record in records]
    root = Path(run).expanduser().absolute() / Format.PARQUET.folder
    files = RankFiles(root, Format.PARQUET, rank=0, world_size=1, writers=1)
    files.announce()
    attempt = files.begin(step)
    path = files.partial(step, attempt, 0)
    write_parquet(path, step, 0, 0, held)
    written = TokenFile(path.name, path.stat().st_size, len(held), sum(one.tokens for one in held))
    files.finish(step, attempt, [written], dropped_records=0, lost_records=0)
    return len(held)


def _alone(record: TokenRecord) -> Sequences:
    facts = msgspec.structs.asdict(record)
    return Sequences(
        lengths=np.array([len(record)], np.int64),
        columns=record.columns(),
        facts={name: [value] for name, value in facts.items() if name not in _NOT_FACTS},
    )

"""Sequences on the host that are ready to be encoded: cut out of a micro-batch, or taken from records."""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from rolltape.errors import MisalignedError, RecordError
from rolltape.records.token_record import TOKEN_COLUMNS

if TYPE_CHECKING:
    from rolltape.tokens.micro_batch import MicroBatch

Array = npt.NDArray[Any]

PART_TOKENS = 1 << 19  # per file: enough to compress well, few enough that several threads share a step
_HASHED_BITS = 64


class Sequences(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Sequences of one step. The per-token columns hold them end to end."""

    lengths: npt.NDArray[np.int64]
    columns: dict[str, Array]
    facts: dict[str, list[Any]]  # per sequence: micro_step, micro_sequence, sample, …

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def nbytes(self) -> int:
        return sum(values.nbytes for values in self.columns.values())

    def parts(self, max_tokens: int) -> "Iterator[Sequences]":
        """Split into parts of at most `max_tokens`; a longer sequence is a part by itself."""
        ends = self.lengths.cumsum()
        first, begin = 0, 0
        while first < len(self):
            last = max(int(np.searchsorted(ends, begin + max_tokens, side="right")), first + 1)
            end = int(ends[last - 1])
            yield Sequences(
                lengths=self.lengths[first:last],
                columns={name: values[begin:end] for name, values in self.columns.items()},
                facts={name: values[first:last] for name, values in self.facts.items()},
            )
            first, begin = last, end


class CutBatch(msgspec.Struct, frozen=True, eq=False):
    """The sequences of a micro-batch that are written, and how many are not."""

    kept: Sequences
    untrained: int  # without a trained token
    not_sampled: int  # left out by the sample fraction


def cut_sequences(batch: "MicroBatch", columns: Mapping[str, Array], *, fraction: float, loss: str | None) -> CutBatch:
    """Copy the sequences to write out of `columns`, without their padding."""
    lengths = columns["lengths"] if batch.lengths is None else batch.lengths
    check_lengths(lengths, batch.tokens, batch.where)
    bounds = np.concatenate([[0], lengths.cumsum()])
    real, env = _real_tokens(batch, columns, bounds)
    trained = columns["trained_mask"]
    if real is not None and np.any(trained & ~real):
        count = int(np.count_nonzero(trained & ~real))
        raise RecordError(f"{batch.where}: {count} trained tokens lie in padding; correct attention_mask or the mask")
    _check_weights(batch, columns)
    if batch.positions_tell or batch.context_parallel_size > 1:
        _check_positions(batch, columns, real, bounds)
    trains = _counts(_with_weights(trained, columns, real), bounds) > 0
    chosen = trains & _in_fraction(batch, fraction)
    at = np.flatnonzero(chosen).tolist()
    own_lengths = (lengths if real is None else _counts(real, bounds))[at]
    wanted = real
    if not chosen.all():
        wanted = np.repeat(chosen, lengths)
        wanted = wanted if real is None else wanted & real
    kept = {
        name: values.copy() if wanted is None else values[wanted]
        for name, values in columns.items()
        if name in TOKEN_COLUMNS
    }
    kept.setdefault("position_ids", _positions(own_lengths))
    facts = {name: [values[place] for place in at] for name, values in {**batch.facts, **env}.items()}
    facts |= {name: columns[name][at].tolist() for name in ("reward", "loss_weight") if name in columns}
    facts |= {"micro_step": [batch.micro_step] * len(at), "micro_sequence": at, "loss": [loss] * len(at)}
    facts["epoch"] = [batch.epoch] * len(at)
    return CutBatch(
        Sequences(lengths=own_lengths, columns=kept, facts=facts),
        untrained=int(np.count_nonzero(~trains)),
        not_sampled=int(np.count_nonzero(trains & ~chosen)),
    )


def check_lengths(lengths: npt.NDArray[np.int64], tokens: int, where: str) -> None:
    """Raise MisalignedError unless the lengths add up to `tokens`."""
    if len(lengths) and lengths.min() < 0:
        raise MisalignedError(f"{where}: a sequence has the length {lengths.min()}; lengths are 0 or more")
    if lengths.sum() != tokens:
        raise MisalignedError(
            f"{where}: the lengths of {len(lengths)} sequences add up to {lengths.sum()} tokens, but the columns have "
            f"{tokens}; count padding to the last sequence, and mark it in attention_mask"
        )


def _real_tokens(
    batch: "MicroBatch", columns: Mapping[str, Array], bounds: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.bool_] | None, dict[str, Sequence[str | None]]]:
    """Which tokens are not padding (None: all are real), and each sequence's environment if it was given per token."""
    mask = columns.get("attention_mask")
    names = batch.facts.get("env", ())
    if len(names) in (0, batch.sequences):
        return mask, {}
    # One name per token: padding at the end of a sequence has an empty one.
    real = np.ones(batch.tokens, np.bool_) if mask is None else mask.copy()
    trained = columns["trained_mask"]
    envs: list[str | None] = []
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        envs.append(next((str(name) for name in names[start:stop] if name), None))
        while stop > start and not names[stop - 1] and not trained[stop - 1]:
            stop -= 1
            real[stop] = False
    return real, {"env": envs}


def _check_weights(batch: "MicroBatch", columns: Mapping[str, Array]) -> None:
    """Raise RecordError if a token has a weight of a loss for which the batch lacks a column."""
    for name, lacking in batch.zero_weights.items():
        count = int(np.count_nonzero(columns[name]))
        if count:
            raise RecordError(
                f"{batch.where}: {count} tokens have {name} that are not zero, but the batch has no {lacking}; give it"
            )


def _check_positions(
    batch: "MicroBatch",
    columns: Mapping[str, Array],
    real: npt.NDArray[np.bool_] | None,
    bounds: npt.NDArray[np.int64],
) -> None:
    """Raise MisalignedError if positions show that a row is several sequences, or the shard of one.

    With packed sequences, positions begin anew within the row. The shard of a context-parallel rank leaves out tokens.
    """
    positions = columns.get("position_ids")
    if positions is None:
        return
    own = np.ones(batch.tokens, np.bool_) if real is None else real.copy()
    own[1:] &= own[:-1]
    own[bounds[:-1][bounds[:-1] < batch.tokens]] = False  # the first token of a sequence has no predecessor
    steps = np.diff(positions, prepend=positions[:1])
    begun = np.flatnonzero(own & (steps <= 0))
    if batch.positions_tell and len(begun):
        raise MisalignedError(
            f"{batch.where}: position_ids start over within a row, first at token {begun[0]}, so it is several "
            "sequences; give lengths or cu_seqlens, or attention_mask if the rest is padding"
        )
    gaps = np.flatnonzero(own & (steps > 1))
    if batch.context_parallel_size > 1 and len(gaps):
        at = int(gaps[0])
        raise MisalignedError(
            f"{batch.where}: position_ids go from {positions[at - 1]} to {positions[at]}, so this is the shard of one "
            f"of {batch.context_parallel_size} context-parallel ranks; gather whole sequences first"
        )


def _with_weights(
    trained: npt.NDArray[np.bool_], columns: Mapping[str, Array], real: npt.NDArray[np.bool_] | None
) -> npt.NDArray[np.bool_]:
    """The trained tokens, and those outside the mask that train by a weight of cross-entropy or distillation."""
    for name in ("ce_weights", "ref_kl_weights"):
        if name in columns:
            trained = trained | (columns[name] != 0)
    return trained if real is None else trained & real


def _counts(flags: npt.NDArray[np.bool_], bounds: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many flags are set in each sequence."""
    return np.diff(np.concatenate([[0], flags.cumsum()])[bounds])


def _positions(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    starts = lengths.cumsum() - lengths
    return (np.arange(lengths.sum()) - np.repeat(starts, lengths)).astype(np.int32)


def _in_fraction(batch: "MicroBatch", fraction: float) -> npt.NDArray[np.bool_]:
    """Which sequences belong to the fraction. A hash of the sample id decides, so all ranks choose the same."""
    if fraction >= 1:
        return np.ones(batch.sequences, np.bool_)
    names = batch.facts.get("sample") or (None,) * batch.sequences
    keys = [name or f"{batch.step}.{batch.micro_step}.{place}" for place, name in enumerate(names)]
    return np.array([is_in_fraction(key, fraction) for key in keys], np.bool_)


def is_in_fraction(sample: str, fraction: float) -> bool:
    """Whether a sample is in the share of sequences that is written."""
    return fraction >= 1 or _hash(sample) < fraction


def _hash(key: str) -> float:
    """A number in [0, 1) that depends on the key alone."""
    digest = blake2b(key.encode("utf-8", "surrogatepass"), digest_size=_HASHED_BITS // 8).digest()
    return int.from_bytes(digest, "big") / float(1 << _HASHED_BITS)

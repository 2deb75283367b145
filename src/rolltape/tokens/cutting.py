"""A micro-batch on the host → the sequences in it that trained, end to end, with padding cut away."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b

import msgspec
import numpy as np
import numpy.typing as npt

from rolltape.errors import RecordError
from rolltape.tokens.intake import Intake, check_sum
from rolltape.tokens.sequences import Array, Sequences

_NOT_COLUMNS = ("attention_mask", "lengths", "reward", "each_advantage")
_HASHED_BITS = 64


class Cut(msgspec.Struct, frozen=True, eq=False):
    """What was cut out of a micro-batch, and how many of its sequences were left out."""

    kept: Sequences
    untrained: int  # not one of their tokens trains, or there is none
    not_sampled: int  # left out by the fraction asked for


def cut(intake: Intake, columns: Mapping[str, Array], *, fraction: float, loss: str | None) -> Cut:
    """The sequences to write, copied out of `columns`."""
    lengths = columns["lengths"] if intake.lengths is None else intake.lengths
    check_sum(lengths, intake.tokens, intake.where)
    bounds = np.concatenate([[0], lengths.cumsum()])
    keep, env = _real(intake, columns, bounds)
    trained = columns["trained_mask"]
    if keep is not None and np.any(trained & ~keep):
        count = int(np.count_nonzero(trained & ~keep))
        raise RecordError(f"{intake.where}: {count} trained tokens lie in padding; correct attention_mask or the mask")
    trains = _counts(trained, bounds) > 0
    chosen = trains & _sampled(intake, fraction)
    at = np.flatnonzero(chosen).tolist()
    own_lengths = lengths if keep is None else _counts(keep, bounds)
    wanted = keep
    if not chosen.all():
        wanted = np.repeat(chosen, lengths)
        wanted = wanted if keep is None else wanted & keep
    cut_out = {
        name: values.copy() if wanted is None else values[wanted]
        for name, values in columns.items()
        if name not in _NOT_COLUMNS
    }
    cut_out.setdefault("position_ids", _places(own_lengths[at]))
    facts = {name: [values[place] for place in at] for name, values in {**intake.facts, **env}.items()}
    if "reward" in columns:
        facts["reward"] = columns["reward"][at].tolist()
    facts |= {"micro_step": [intake.micro_step] * len(at), "micro_sequence": at, "loss": [loss] * len(at)}
    return Cut(
        Sequences(lengths=own_lengths[at], columns=cut_out, facts=facts),
        untrained=int(np.count_nonzero(~trains)),
        not_sampled=int(np.count_nonzero(trains & ~chosen)),
    )


def _real(
    intake: Intake, columns: Mapping[str, Array], bounds: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.bool_] | None, dict[str, Sequence[str | None]]]:
    """Which tokens are no padding (None: all), and the environment of each sequence if that came per token."""
    keep = columns.get("attention_mask")
    names = intake.facts.get("env", ())
    if len(names) in (0, intake.sequences):
        return keep, {}
    # One name per token: padding at the end of a sequence has an empty one.
    real = np.ones(intake.tokens, np.bool_) if keep is None else keep.copy()
    trained = columns["trained_mask"]
    envs: list[str | None] = []
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        envs.append(next((str(name) for name in names[start:stop] if name), None))
        while stop > start and not names[stop - 1] and not trained[stop - 1]:
            stop -= 1
            real[stop] = False
    return real, {"env": envs}


def _counts(flags: npt.NDArray[np.bool_], bounds: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many are set in each sequence."""
    return np.diff(np.concatenate([[0], flags.cumsum()])[bounds])


def _places(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    starts = lengths.cumsum() - lengths
    return (np.arange(lengths.sum()) - np.repeat(starts, lengths)).astype(np.int32)


def _sampled(intake: Intake, fraction: float) -> npt.NDArray[np.bool_]:
    """Which sequences are among the fraction: by sample id, so that every rank, and every run, chooses the same."""
    if fraction >= 1:
        return np.ones(intake.sequences, np.bool_)
    names = intake.facts.get("sample") or (None,) * intake.sequences
    keys = [name or f"{intake.step}.{intake.micro_step}.{place}" for place, name in enumerate(names)]
    return np.array([_hashed(key) < fraction for key in keys], np.bool_)


def _hashed(key: str) -> float:
    """A number in [0, 1) that depends on the key alone."""
    digest = blake2b(key.encode("utf-8", "surrogatepass"), digest_size=_HASHED_BITS // 8).digest()
    return int.from_bytes(digest, "big") / float(1 << _HASHED_BITS)

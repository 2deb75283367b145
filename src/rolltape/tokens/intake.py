"""What a trainer hands over for one micro-batch: found under its names, checked for length, not yet copied."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rolltape.errors import MisalignedError, RecordError
from rolltape.tokens.facts import facts_of, has_gaps
from rolltape.tokens.losses import LossSpec

# The names under which a column may come.
_BATCH_COLUMNS: dict[str, tuple[str, ...]] = {
    "ids": ("input_ids", "ids"),
    "position_ids": ("position_ids",),
    "trained_mask": ("trained_mask", "loss_mask"),
    "attention_mask": ("attention_mask",),
    "advantages": ("advantages",),
    "rewards": ("rewards",),
    "inference_logprobs": ("inference_logprobs",),
    "old_logprobs": ("old_logprobs",),
    "reference_logprobs": ("reference_logprobs", "ref_logprobs"),
    "rl_weights": ("rl_weights",),
    "ce_weights": ("ce_weights",),
    "ref_kl_weights": ("ref_kl_weights",),
}
_OUTPUT_COLUMNS: dict[str, tuple[str, ...]] = {
    "trainer_logprobs": ("logprobs", "trainer_logprobs"),
    "entropy": ("entropy",),
    "masked": ("masked",),
    "masked_high": ("masked_high",),
    "masked_low": ("masked_low",),
}
_NEEDED = ("ids", "trained_mask", "trainer_logprobs")
_OWN_MASKS = ("masked", "masked_high", "masked_low")  # with any of them, none is computed
# What may also come as one value for all the tokens of a sequence, and what that is called then.
_PER_SEQUENCE = {"advantages": "each_advantage", "rewards": "reward"}


class Intake(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A micro-batch whose columns are known to be aligned. Nothing in it has been read from a device.

    Lengths that lie on a device can only be checked by whoever copies them. An `each_advantage` stands for all the
    tokens of its sequence, for which the column `advantages` has yet to be made.
    """

    step: int
    micro_step: int
    where: str
    loss: LossSpec | None
    columns: dict[str, Tensor]  # a value per token; `attention_mask`, if there, says which are no padding
    per_sequence: dict[str, Tensor]  # a value per sequence: `reward`, `each_advantage`, `lengths`
    lengths: npt.NDArray[np.int64] | None  # None: they lie on a device
    facts: dict[str, tuple[Any, ...]]  # per sequence; `env` may be per token
    sequences: int
    tokens: int
    device: torch.device


def taken(
    step: int, micro_step: int, batch: Mapping[str, Any], outputs: Mapping[str, Any], loss: LossSpec | None
) -> Intake:
    """The micro-batch, if its columns are there and of one length."""
    where = f"step {step}, micro step {micro_step}"
    tensors = {**batch, "rewards": None} if has_gaps(batch.get("rewards")) else batch
    columns = {
        **_found(tensors, _BATCH_COLUMNS, where, "batch"),
        **_found(outputs, _OUTPUT_COLUMNS, where, "outputs"),
    }
    loss = None if any(name in columns for name in _OWN_MASKS) else loss
    _check_needs(columns, loss, where)
    ids = columns["ids"]
    lengths, real = _lengths(batch, ids, where)
    if real is not None:
        columns.setdefault("attention_mask", real)
    sequences = len(lengths)
    per_sequence = {
        per: columns.pop(name).reshape(-1)
        for name, per in _PER_SEQUENCE.items()
        if name in columns and _is_per_sequence(columns[name], sequences, ids)
    }
    _check_shapes(columns, where)
    if isinstance(lengths, Tensor):
        per_sequence["lengths"] = lengths
    elif "each_advantage" in per_sequence:
        per_sequence["lengths"] = torch.from_numpy(lengths)
    return Intake(
        step=step,
        micro_step=micro_step,
        where=where,
        loss=loss,
        columns={name: column.reshape(-1) for name, column in columns.items()},
        per_sequence=per_sequence,
        lengths=None if isinstance(lengths, Tensor) else lengths,
        facts=facts_of(batch, sequences, ids.numel(), where),
        sequences=sequences,
        tokens=ids.numel(),
        device=columns["trainer_logprobs"].device,
    )


def check_sum(lengths: npt.NDArray[np.int64], tokens: int, where: str) -> None:
    """Refuse lengths that do not add up to the tokens that there are."""
    if len(lengths) and lengths.min() < 0:
        raise MisalignedError(f"{where}: a sequence has the length {lengths.min()}; lengths are 0 or more")
    if lengths.sum() != tokens:
        raise MisalignedError(
            f"{where}: {len(lengths)} sequences have {lengths.sum()} tokens by their lengths, the columns {tokens}; "
            "count padding to the last sequence, and mark it in attention_mask"
        )


def _found(given: Mapping[str, Any], known: Mapping[str, tuple[str, ...]], where: str, what: str) -> dict[str, Tensor]:
    found = {}
    for column, names in known.items():
        present = [name for name in names if given.get(name) is not None]
        if len(present) > 1:
            raise RecordError(f"{where}: {what} has both {present[0]} and {present[1]}; give one of them")
        if present:
            found[column] = _tensor(given[present[0]], f"{where}: {present[0]}")
        elif column in _NEEDED:
            raise RecordError(f"{where}: {what} has no {names[0]}; give it")
    return found


def _check_needs(columns: Mapping[str, Tensor], loss: LossSpec | None, where: str) -> None:
    missing = [] if loss is None else loss.missing(columns)
    if missing:
        raise RecordError(
            f"{where}: {type(loss).__name__} looks at {', '.join(missing)}, which the batch has not; "
            "give it, or loss=None if this micro-batch trains with another loss"
        )


def _lengths(batch: Mapping[str, Any], ids: Tensor, where: str) -> tuple[npt.NDArray[np.int64] | Tensor, Tensor | None]:
    """How many tokens each sequence has, padding included; each row is a sequence if nothing else is said.

    Lengths of several rows, one for each, say what is padding in them: the tokens of a mask that is given then too.
    """
    given = [name for name in ("lengths", "cu_seqlens") if batch.get(name) is not None]
    if len(given) > 1:
        raise RecordError(f"{where}: batch has both lengths and cu_seqlens; give one of them")
    rows = ids.shape[0] if ids.dim() > 1 else 1
    whole = np.full(rows, ids.numel() // max(rows, 1), dtype=np.int64)
    if not given:
        return whole, None
    bounds = _tensor(batch[given[0]], f"{where}: {given[0]}").reshape(-1)
    on_host = bounds.device.type == "cpu"
    if given == ["cu_seqlens"]:
        if not len(bounds) or (on_host and int(bounds[0])):
            raise MisalignedError(f"{where}: cu_seqlens does not begin with 0; give the bounds of all sequences")
        bounds = bounds.diff()
    elif len(bounds) == rows > 1:
        return whole, _real(bounds, ids, where)
    if not on_host:
        if not len(bounds) and ids.numel():
            raise MisalignedError(f"{where}: no sequence by {given[0]}, but {ids.numel()} tokens")
        return bounds, None
    lengths = bounds.numpy().astype(np.int64)
    check_sum(lengths, ids.numel(), where)
    return lengths, None


def _real(lengths: Tensor, ids: Tensor, where: str) -> Tensor:
    """Which tokens of padded rows are no padding: as many as a row's length says, from its first."""
    width = ids.numel() // len(lengths)
    if lengths.device.type == "cpu" and not 0 <= int(lengths.min()) <= int(lengths.max()) <= width:
        told = ", ".join(map(str, lengths.tolist()))
        raise MisalignedError(f"{where}: rows of {width} tokens have the lengths {told}; give 0 to {width} for each")
    return (torch.arange(width, device=lengths.device) < lengths[:, None]).reshape(ids.shape)


def _is_per_sequence(column: Tensor, sequences: int, ids: Tensor) -> bool:
    return _plain(column.shape) == _plain((sequences,)) != _plain(ids.shape)


def _tensor(values: Any, where: str) -> Tensor:
    try:
        if isinstance(values, Tensor):
            return values.detach()
        # By way of numpy: torch alone would make floats float32, and take a list to its default device.
        held = np.asarray(values)
        if not (held.flags.writeable and held.flags.c_contiguous):
            held = held.copy()  # torch takes no others, or not without a warning
        return torch.from_numpy(held)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RecordError(f"{where} cannot be a tensor: {error}") from None


def _check_shapes(columns: Mapping[str, Tensor], where: str) -> None:
    if len({_plain(column.shape) for column in columns.values()}) > 1:
        told = ", ".join(f"{name} {'×'.join(map(str, column.shape)) or 1}" for name, column in columns.items())
        raise MisalignedError(f"{where}: columns differ in length: {told}; give each of them one value per token")


def _plain(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape without the dimensions that hold one thing, so that [1, T] and [T] are the same."""
    return tuple(size for size in shape if size != 1)

"""What a trainer hands over for one micro-batch: found under its names, checked for length, not yet copied."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rolltape.errors import MisalignedError, RecordError
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
# What may also come as one value for all the tokens of a sequence, and what that is called then.
_PER_SEQUENCE = {"advantages": "each_advantage", "rewards": "reward"}
_FACTS = {
    "sample_ids": "sample",
    "rollout_ids": "rollout",
    "groups": "group",
    "env_names": "env",
    "weight_versions": "versions",
}


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
    columns = {
        **_found(batch, _BATCH_COLUMNS, where, "batch"),
        **_found(outputs, _OUTPUT_COLUMNS, where, "outputs"),
    }
    _check_needs(columns, loss, where)
    ids = columns["ids"]
    lengths = _lengths(batch, ids, where)
    sequences = len(lengths)
    per_sequence = {
        per: columns.pop(name).reshape(-1)
        for name, per in _PER_SEQUENCE.items()
        if name in columns and _is_per_sequence(columns[name], sequences, ids)
    }
    _check_shapes(columns, where)
    if "each_advantage" in per_sequence or isinstance(lengths, Tensor):
        per_sequence["lengths"] = torch.as_tensor(lengths)
    return Intake(
        step=step,
        micro_step=micro_step,
        where=where,
        loss=None if "masked" in columns else loss,
        columns={name: column.reshape(-1) for name, column in columns.items()},
        per_sequence=per_sequence,
        lengths=None if isinstance(lengths, Tensor) else lengths,
        facts=_facts(batch, sequences, ids.numel(), where),
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
    missing = [] if loss is None or "masked" in columns else [name for name in loss.needs if name not in columns]
    if missing:
        raise RecordError(
            f"{where}: {type(loss).__name__} looks at {', '.join(missing)}, which the batch has not; "
            "give it, or loss=None if this micro-batch trains with another loss"
        )


def _lengths(batch: Mapping[str, Any], ids: Tensor, where: str) -> npt.NDArray[np.int64] | Tensor:
    """How many tokens each sequence has, padding included; each row is a sequence if nothing else is said."""
    given = [name for name in ("lengths", "cu_seqlens") if batch.get(name) is not None]
    if len(given) > 1:
        raise RecordError(f"{where}: batch has both lengths and cu_seqlens; give one of them")
    if not given:
        rows = ids.shape[0] if ids.dim() > 1 else 1
        return np.full(rows, ids.numel() // max(rows, 1), dtype=np.int64)
    bounds = _tensor(batch[given[0]], f"{where}: {given[0]}").reshape(-1)
    on_host = bounds.device.type == "cpu"
    if given == ["cu_seqlens"]:
        if not len(bounds) or (on_host and int(bounds[0])):
            raise MisalignedError(f"{where}: cu_seqlens does not begin with 0; give the bounds of all sequences")
        bounds = bounds.diff()
    if not on_host:
        if not len(bounds) and ids.numel():
            raise MisalignedError(f"{where}: no sequence by {given[0]}, but {ids.numel()} tokens")
        return bounds
    lengths = bounds.numpy().astype(np.int64)
    check_sum(lengths, ids.numel(), where)
    return lengths


def _is_per_sequence(column: Tensor, sequences: int, ids: Tensor) -> bool:
    return _plain(column.shape) == _plain((sequences,)) != _plain(ids.shape)


def _tensor(values: Any, where: str) -> Tensor:
    try:
        # A list of floats would become float32 by way of torch alone.
        return torch.as_tensor(np.asarray(values) if isinstance(values, list | tuple) else values).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise RecordError(f"{where} cannot be a tensor: {error}") from None


def _check_shapes(columns: Mapping[str, Tensor], where: str) -> None:
    if len({_plain(column.shape) for column in columns.values()}) > 1:
        told = ", ".join(f"{name} {'×'.join(map(str, column.shape)) or 1}" for name, column in columns.items())
        raise MisalignedError(f"{where}: columns differ in length: {told}; give each of them one value per token")


def _plain(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape without the dimensions that hold one thing, so that [1, T] and [T] are the same."""
    return tuple(size for size in shape if size != 1)


def _facts(batch: Mapping[str, Any], sequences: int, tokens: int, where: str) -> dict[str, tuple[Any, ...]]:
    """What is said of each sequence, copied."""
    given = {name: tuple(batch[name]) for name in _FACTS if batch.get(name) is not None}
    for name, values in given.items():
        if len(values) != sequences and (name != "env_names" or len(values) != tokens):
            told = ", ".join(f"{other} {len(held)}" for other, held in given.items())
            raise MisalignedError(f"{where}: there are {sequences} sequences, but {told}; give one entry for each")
    return {
        _FACTS[name]: tuple(map(_versions if name == "weight_versions" else _text, values))
        for name, values in given.items()
    }


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _versions(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    return tuple(map(str, value)) if isinstance(value, list | tuple) else (str(value),)

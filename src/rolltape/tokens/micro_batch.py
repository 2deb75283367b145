"""Parses a trainer's micro-batch: finds its columns and checks their lengths. It copies nothing yet."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rolltape.errors import MisalignedError, RecordError
from rolltape.records.token_record import TOKEN_COLUMNS
from rolltape.tokens.derive import MASK_COLUMNS, MISMATCH_COLUMNS
from rolltape.tokens.losses import LossSpec
from rolltape.tokens.sequences import check_lengths

_OUTPUT_COLUMNS = ("trainer_logprobs", "entropy", *MASK_COLUMNS)
_BATCH_COLUMNS = (
    *(name for name in TOKEN_COLUMNS if name not in (*_OUTPUT_COLUMNS, *MISMATCH_COLUMNS)),
    "attention_mask",
    "loss_weights",
)
# The names under which a trainer may give a column, if that is not only its own name.
_ALIASES = {
    "ids": ("input_ids", "ids"),
    "trained_mask": ("trained_mask", "loss_mask"),
    "reference_logprobs": ("reference_logprobs", "ref_logprobs"),
    "trainer_logprobs": ("logprobs", "trainer_logprobs"),
}
# Columns that losses read, and that other columns are derived from.
_LOSS_COLUMNS = (
    *("trained_mask", "advantages", "inference_logprobs", "trainer_logprobs", "old_logprobs", "reference_logprobs"),
    *("rl_weights", "ce_weights", "ref_kl_weights"),
)
_HALF = (torch.bfloat16, torch.float16)
_LENGTHS = ("lengths", "sequence_lengths", "cu_seqlens")  # these define the sequences of a row
_NEEDED = ("ids", "trained_mask", "trainer_logprobs")
# Columns that may also come as one value per sequence, and their names then.
_PER_SEQUENCE = {"advantages": "each_advantage", "rewards": "reward"}
# A batch's names for the facts about each sequence.
_FACTS = {
    "sample_ids": "sample",
    "rollout_ids": "rollout",
    "groups": "group",
    "env_names": "env",
    "weight_versions": "versions",
}


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A micro-batch whose columns are known to be aligned. Nothing in it has been read from a device.

    Lengths on a device are checked later, when they are copied. An `each_advantage` applies to all tokens of its
    sequence; the column `advantages` is computed from it later.
    """

    step: int
    micro_step: int
    epoch: int
    where: str
    loss: LossSpec | None
    losses: tuple[LossSpec, ...] | None  # `loss`, and others by their weights; None: no masks are computed
    zero_weights: dict[str, str]  # columns of weights that must be all zero, and the column that their loss lacks
    precision: dict[str, torch.dtype]  # of the columns that were given in half precision
    context_parallel_size: int
    positions_tell: bool  # no lengths were given: only positions show whether each row is one sequence
    columns: dict[str, Tensor]  # a value per token; `attention_mask`, if there, marks the tokens that are not padding
    per_sequence: dict[str, Tensor]  # a value per sequence: `reward`, `loss_weight`, `each_advantage`, `lengths`
    lengths: npt.NDArray[np.int64] | None  # None: they lie on a device
    facts: dict[str, tuple[Any, ...]]  # per sequence; `env` may be per token
    sequences: int
    tokens: int
    device: torch.device


def parse_micro_batch(
    step: int,
    micro_step: int,
    batch: Mapping[str, Any],
    outputs: Mapping[str, Any],
    loss: LossSpec | None,
    *,
    epoch: int = 0,
    context_parallel_size: int = 1,
) -> MicroBatch:
    """Find the columns of a micro-batch and check that they have one length."""
    where = f"step {step}, micro step {micro_step}"
    tensors = {**batch, "rewards": None} if _has_gaps(batch.get("rewards")) else batch
    columns = {
        **_find_columns(tensors, _BATCH_COLUMNS, f"{where}: batch"),
        **_find_columns(outputs, _OUTPUT_COLUMNS, f"{where}: outputs"),
    }
    loss = None if any(name in columns for name in MASK_COLUMNS) else loss  # the trainer's own masks count
    losses, zero_weights = (None, {}) if loss is None else _losses(columns, loss, where)
    ids = columns["ids"]
    lengths, real = _lengths(batch, columns, where)
    if real is not None:
        columns.setdefault("attention_mask", real)
    sequences = len(lengths)
    per_sequence = {
        per: columns.pop(name).reshape(-1)
        for name, per in _PER_SEQUENCE.items()
        if name in columns and _is_per_sequence(columns[name], sequences, ids)
    }
    if (weights := columns.pop("loss_weights", None)) is not None:
        if weights.numel() != sequences:
            found = f"there are {sequences} sequences, but {weights.numel()} loss_weights"
            raise MisalignedError(f"{where}: {found}; give one for each")
        per_sequence["loss_weight"] = weights.reshape(-1)
    _check_shapes(columns, where, context_parallel_size)
    given = {**columns, **({"advantages": per_sequence["each_advantage"]} if "each_advantage" in per_sequence else {})}
    if isinstance(lengths, Tensor):
        per_sequence["lengths"] = lengths
    elif "each_advantage" in per_sequence:
        per_sequence["lengths"] = torch.from_numpy(lengths)
    return MicroBatch(
        step=step,
        micro_step=micro_step,
        epoch=epoch,
        where=where,
        loss=loss,
        losses=losses,
        zero_weights=zero_weights,
        precision={name: given[name].dtype for name in _LOSS_COLUMNS if name in given and given[name].dtype in _HALF},
        context_parallel_size=context_parallel_size,
        positions_tell=all(batch.get(name) is None for name in _LENGTHS),
        columns={name: column.reshape(-1) for name, column in columns.items()},
        per_sequence=per_sequence,
        lengths=None if isinstance(lengths, Tensor) else lengths,
        facts=_parse_facts(batch, sequences, ids.numel(), where),
        sequences=sequences,
        tokens=ids.numel(),
        device=columns["trainer_logprobs"].device,
    )


def _find_columns(given: Mapping[str, Any], known: Iterable[str], where: str) -> dict[str, Tensor]:
    found = {}
    for column in known:
        names = _ALIASES.get(column, (column,))
        present = [name for name in names if given.get(name) is not None]
        if len(present) > 1:
            raise RecordError(f"{where} has both {present[0]} and {present[1]}; give one of them")
        if present:
            found[column] = _tensor(given[present[0]], f"{where}: {present[0]}")
        elif column in _NEEDED:
            raise RecordError(f"{where} has no {names[0]}; give it")
    return found


def _losses(columns: Mapping[str, Tensor], loss: LossSpec, where: str) -> tuple[tuple[LossSpec, ...], dict[str, str]]:
    """The losses of a micro-batch, and the weights that must be zero because their loss lacks a column.

    If a few sequences need the weights of a loss, a packer may give zeros to all other batches. Those need not have the
    columns that this loss reads.
    """
    if loss.weights != "rl_weights" and "rl_weights" in columns:
        raise RecordError(
            f"{where}: batch has rl_weights, but the loss is {type(loss).__name__}; give the loss of the tokens with "
            f"these weights, such as Dppo(): {loss.weights} choose those of {type(loss).__name__}"
        )
    found, zero_weights = [], {}
    for component in loss.components(columns):
        missing = component.missing(columns)
        if not missing:
            found.append(component)
        elif component.weights in columns:
            zero_weights[component.weights] = missing[0]
        else:
            raise RecordError(
                f"{where}: {type(component).__name__} needs {', '.join(missing)}, but the batch has none; "
                "give it, or loss=None if this micro-batch trains with another loss"
            )
    return tuple(found), zero_weights


def _lengths(
    batch: Mapping[str, Any], columns: Mapping[str, Tensor], where: str
) -> tuple[npt.NDArray[np.int64] | Tensor, Tensor | None]:
    """How many tokens each sequence has, with padding, and which tokens are real (None: lengths do not show it).

    Without lengths, each row is a sequence. If each of several rows has one length, it shows which tokens are padding.
    """
    ids = columns["ids"]
    given = [name for name in _LENGTHS if batch.get(name) is not None]
    if len(given) > 1:
        raise RecordError(f"{where}: batch has both {given[0]} and {given[1]}; give one of them")
    rows = ids.shape[0] if ids.dim() > 1 else 1
    whole = np.full(rows, ids.numel() // max(rows, 1), dtype=np.int64)
    if not given:
        if rows == 1 and ids.numel() and not _is_one_sequence(batch, columns):
            raise MisalignedError(
                f"{where}: {ids.numel()} tokens in one row, and nothing says whether they are one sequence or several "
                "that are packed; give lengths or cu_seqlens"
            )
        return whole, None
    bounds = _tensor(batch[given[0]], f"{where}: {given[0]}").reshape(-1)
    on_host = bounds.device.type == "cpu"
    if given == ["cu_seqlens"]:
        if not len(bounds) or (on_host and int(bounds[0])):
            raise MisalignedError(f"{where}: cu_seqlens does not begin with 0; give the bounds of all sequences")
        bounds = bounds.diff()
    elif len(bounds) == rows > 1:
        return whole, _real_tokens(bounds, ids, where)
    if not on_host:
        if not len(bounds) and ids.numel():
            raise MisalignedError(
                f"{where}: {given[0]} has no sequence, but there are {ids.numel()} tokens; give one length per sequence"
            )
        return bounds, None
    lengths = bounds.numpy().astype(np.int64)
    check_lengths(lengths, ids.numel(), where)
    return lengths, None


def _is_one_sequence(batch: Mapping[str, Any], columns: Mapping[str, Tensor]) -> bool:
    """Whether a row without lengths is known to be a sequence. Its positions, if there are any, are checked later."""
    is_named = any(batch.get(name) is not None and len(_as_list(batch[name])) == 1 for name in _FACTS)
    return is_named or "attention_mask" in columns or "position_ids" in columns


def _real_tokens(lengths: Tensor, ids: Tensor, where: str) -> Tensor:
    """The mask of padded rows: in each row the first `lengths[row]` tokens are real."""
    width = ids.numel() // len(lengths)
    if lengths.device.type == "cpu" and not 0 <= int(lengths.min()) <= int(lengths.max()) <= width:
        listed = ", ".join(map(str, lengths.tolist()))
        raise MisalignedError(f"{where}: rows of {width} tokens have the lengths {listed}; give 0 to {width} for each")
    return (torch.arange(width, device=lengths.device) < lengths[:, None]).reshape(ids.shape)


def _is_per_sequence(column: Tensor, sequences: int, ids: Tensor) -> bool:
    return _squeezed(column.shape) == _squeezed((sequences,)) != _squeezed(ids.shape)


def _tensor(values: Any, where: str) -> Tensor:
    try:
        if isinstance(values, Tensor):
            return _local(values.detach(), where)
        # Through numpy: torch itself would make floats float32, and put a list on its default device.
        held = np.asarray(values)
        if not (held.flags.writeable and held.flags.c_contiguous):
            held = held.copy()  # torch refuses other arrays, or warns
        return torch.from_numpy(held)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RecordError(f"{where} cannot be a tensor: {error}") from None


def _local(tensor: Any, where: str) -> Tensor:
    """A tensor that is whole on this rank. A sharded one is refused, because gathering would wait for other ranks."""
    if tensor.is_nested:
        raise RecordError(f"{where} is a nested tensor; give its values() here, and its offsets() as cu_seqlens")
    if isinstance(tensor, Tensor) and not hasattr(tensor, "placements"):  # it is no DTensor
        return tensor
    sizes = tensor.device_mesh.shape
    if any(size > 1 and not on.is_replicate() for size, on in zip(sizes, tensor.placements, strict=True)):
        raise RecordError(
            f"{where} is a DTensor that is spread over ranks: {tensor.placements}; "
            "give its full_tensor(), which every rank of its mesh has to call"
        )
    return cast("Tensor", tensor.to_local())


def _check_shapes(columns: Mapping[str, Tensor], where: str, context_parallel_size: int) -> None:
    if len({_squeezed(column.shape) for column in columns.values()}) > 1:
        listed = ", ".join(f"{name} {'×'.join(map(str, column.shape)) or 1}" for name, column in columns.items())
        shards = "; gather what is sharded over context-parallel ranks" if context_parallel_size > 1 else ""
        raise MisalignedError(
            f"{where}: columns differ in length: {listed}; give each of them one value per token{shards}"
        )


def _squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape without its dimensions of size 1, so that [1, T] and [T] are the same."""
    return tuple(size for size in shape if size != 1)


def _parse_facts(batch: Mapping[str, Any], sequences: int, tokens: int, where: str) -> dict[str, tuple[Any, ...]]:
    """Copy the facts about each sequence: ids, environment, weight versions, and rewards with gaps."""
    given = {name: tuple(_as_list(batch[name])) for name in _FACTS if batch.get(name) is not None}
    if _has_gaps(batch.get("rewards")):
        given["rewards"] = tuple(batch["rewards"])
    facts: dict[str, tuple[Any, ...]] = {}
    for name, values in given.items():
        if len(values) != sequences and (name != "env_names" or len(values) != tokens):
            listed = ", ".join(f"{other} {len(held)}" for other, held in given.items())
            raise MisalignedError(f"{where}: there are {sequences} sequences, but {listed}; give one entry for each")
        if name == "rewards":
            facts["reward"] = tuple(None if reward is None else float(reward) for reward in values)
        elif name == "weight_versions":
            facts["versions"] = tuple(map(_versions, values))
        elif len(values) == sequences:
            facts[_FACTS[name]] = tuple(map(_text, values))
        else:
            facts[_FACTS[name]] = values  # a name per token: too many to convert on the training thread
    return facts


def _has_gaps(rewards: object) -> bool:
    """Whether some rewards are None, so that they cannot become a tensor."""
    return isinstance(rewards, list | tuple) and any(reward is None for reward in rewards)


def _as_list(values: Any) -> Any:
    return values.tolist() if isinstance(values, Tensor | np.ndarray) else values


def _text(value: object) -> str | None:
    if type(value) is str and value.isascii():
        return value
    # Text that is not valid Unicode could not be written.
    return None if value is None else str(_as_list(value)).encode("utf-8", "replace").decode()


def _versions(value: Any) -> tuple[str, ...]:
    many = _as_list(value)
    if not isinstance(many, Iterable) or isinstance(many, str | bytes):
        many = (many,)
    return tuple(dict.fromkeys(version for version in map(_text, many) if version is not None))

"""Parse what a trainer hands over for one micro-batch: find its columns, check their lengths, copy nothing yet."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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
# The names under which a trainer may give a column, where that is not its own name alone.
_ALIASES = {
    "ids": ("input_ids", "ids"),
    "trained_mask": ("trained_mask", "loss_mask"),
    "reference_logprobs": ("reference_logprobs", "ref_logprobs"),
    "trainer_logprobs": ("logprobs", "trainer_logprobs"),
}
_NEEDED = ("ids", "trained_mask", "trainer_logprobs")
# Columns that may also come as one value per sequence, and their names then.
_PER_SEQUENCE = {"advantages": "each_advantage", "rewards": "reward"}
# What a batch calls the facts about each sequence.
_FACTS = {
    "sample_ids": "sample",
    "rollout_ids": "rollout",
    "groups": "group",
    "env_names": "env",
    "weight_versions": "versions",
}


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A micro-batch whose columns are known to be aligned. Nothing in it has been read from a device.

    Lengths that lie on a device can only be checked by whoever copies them. An `each_advantage` stands for all the
    tokens of its sequence; the column `advantages` is computed from it later.
    """

    step: int
    micro_step: int
    epoch: int
    where: str
    loss: LossSpec | None
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
    epoch: int = 0,
) -> MicroBatch:
    """Find the columns of a micro-batch and check that they have one length."""
    where = f"step {step}, micro step {micro_step}"
    tensors = {**batch, "rewards": None} if _has_gaps(batch.get("rewards")) else batch
    columns = {
        **_find_columns(tensors, _BATCH_COLUMNS, f"{where}: batch"),
        **_find_columns(outputs, _OUTPUT_COLUMNS, f"{where}: outputs"),
    }
    loss = None if any(name in columns for name in MASK_COLUMNS) else loss  # the trainer's own masks count
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
    if (weights := columns.pop("loss_weights", None)) is not None:
        if weights.numel() != sequences:
            found = f"there are {sequences} sequences, but {weights.numel()} loss_weights"
            raise MisalignedError(f"{where}: {found}; give one for each")
        per_sequence["loss_weight"] = weights.reshape(-1)
    _check_shapes(columns, where)
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


def _check_needs(columns: Mapping[str, Tensor], loss: LossSpec | None, where: str) -> None:
    missing = [] if loss is None else loss.missing(columns)
    if missing:
        raise RecordError(
            f"{where}: {type(loss).__name__} needs {', '.join(missing)}, but the batch has none; "
            "give it, or loss=None if this micro-batch trains with another loss"
        )


def _lengths(batch: Mapping[str, Any], ids: Tensor, where: str) -> tuple[npt.NDArray[np.int64] | Tensor, Tensor | None]:
    """How many tokens each sequence has, padding included, and which tokens are real (None: not known from lengths).

    Without lengths each row is a sequence. One length per row of several rows tells which of its tokens are padding.
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
            return values.detach()
        # By way of numpy: torch alone would make floats float32, and take a list to its default device.
        held = np.asarray(values)
        if not (held.flags.writeable and held.flags.c_contiguous):
            held = held.copy()  # torch takes no others, or not without a warning
        return torch.from_numpy(held)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RecordError(f"{where} cannot be a tensor: {error}") from None


def _check_shapes(columns: Mapping[str, Tensor], where: str) -> None:
    if len({_squeezed(column.shape) for column in columns.values()}) > 1:
        listed = ", ".join(f"{name} {'×'.join(map(str, column.shape)) or 1}" for name, column in columns.items())
        raise MisalignedError(f"{where}: columns differ in length: {listed}; give each of them one value per token")


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
    # Text that is not valid Unicode could not be written.
    return None if value is None else str(_as_list(value)).encode("utf-8", "replace").decode()


def _versions(value: Any) -> tuple[str, ...]:
    many = _as_list(value)
    if not isinstance(many, Iterable) or isinstance(many, str | bytes):
        many = (many,)
    return tuple(dict.fromkeys(version for version in map(_text, many) if version is not None))

"""Copies padded batches to the host, one copy per tensor of any library and device, and iterates over their rows."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rolltape.errors import MisalignedError, RecordError
from rolltape.records.jsonable import shown

# One table of tensors, or a list of them. None means a rejected table.
Batch = Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None

_PER_TOKEN = ("input_ids", "attention_mask", "loss_mask", "logprobs", "versions")
_WHOLE_NUMBERS = ("input_ids", "versions")


class HostTable(NamedTuple):
    """Columns of sequences × tokens on the host, all of one shape, as private copies."""

    entry: int  # its place in the batch, with rejected ones counted
    columns: dict[str, npt.NDArray[Any]]
    rewards: tuple[float | None, ...]  # None: the batch has none, or not for that sequence


class HostBatch(NamedTuple):
    """A batch on the host."""

    tables: tuple[HostTable, ...]
    rejected: int


class Row(NamedTuple):
    """One sequence without its padding. All arrays have one length."""

    entry: int
    row: int  # its place in its table
    ids: npt.NDArray[Any]
    trained_mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[Any] | None
    versions: npt.NDArray[Any] | None
    reward: float | None


def copy_to_host(batch: Batch) -> HostBatch:
    """Copy a batch to the host, each tensor once."""
    entries = [batch] if batch is None or isinstance(batch, Mapping) else list(batch)
    tables = (_table(given, entry) for entry, given in enumerate(entries) if given is not None)
    return HostBatch(tuple(tables), sum(given is None for given in entries))


def batch_rows(held: HostBatch) -> Iterator[Row]:
    """The sequences of a batch, without their padding."""
    for table in held.tables:
        for index in range(len(table.columns["input_ids"])):
            own = {name: column[index] for name, column in table.columns.items()}
            if "attention_mask" in own:
                there = own["attention_mask"] != 0
                own = {name: values[there] for name, values in own.items()}
            yield Row(
                entry=table.entry,
                row=index,
                ids=own["input_ids"],
                trained_mask=own["loss_mask"] != 0,
                logprobs=own.get("logprobs"),
                versions=own.get("versions"),
                reward=table.rewards[index],
            )


def _table(given: Mapping[str, Any], entry: int) -> HostTable:
    where = f"batch entry {entry}"
    if not isinstance(given, Mapping):
        raise RecordError(f"{where} is {shown(given)}; give a table of tensors, or None for one that was rejected")
    if not len(given.keys()):  # bool() of a TensorDict does not tell whether it is empty
        return HostTable(entry, {"input_ids": np.empty((0, 0), np.int64)}, ())
    for name in ("input_ids", "loss_mask"):
        if given.get(name) is None:
            raise RecordError(f"{where} has no {name}, only {', '.join(sorted(map(str, given)))}; give it")
    columns = {name: _column(given[name], name, where) for name in _PER_TOKEN if given.get(name) is not None}
    if len({column.shape for column in columns.values()}) > 1:
        shapes = ", ".join(f"{name} {'×'.join(map(str, column.shape))}" for name, column in columns.items())
        raise MisalignedError(f"{where}: {shapes}; give all of them one shape, sequences × tokens")
    return HostTable(entry, columns, _rewards(given.get("rewards"), len(columns["input_ids"]), where))


def _column(tensor: Any, name: str, where: str) -> npt.NDArray[Any]:
    """A tensor of sequences × tokens; a single sequence is a table of one row."""
    values = _host_copy(tensor, f"{where}: {name}")
    if name in _WHOLE_NUMBERS and values.dtype.kind not in "iu" and values.size:
        raise RecordError(f"{where}: {name} are {values.dtype}, which does not hold every number; give integers")
    if values.ndim == 1:
        values = values.reshape((1, -1) if values.size else (0, 0))
    if values.ndim != 2:
        raise RecordError(f"{where}: {name} has {values.ndim} dimensions; give sequences × tokens")
    return values


def _rewards(tensor: Any, rows: int, where: str) -> tuple[float | None, ...]:
    if tensor is None:
        return (None,) * rows
    gaps = isinstance(tensor, list | tuple) and any(reward is None for reward in tensor)
    values = np.array(tensor, object) if gaps else _host_copy(tensor, f"{where}: rewards")
    if values.size != rows:
        raise MisalignedError(
            f"{where}: {rows} sequences but rewards of shape {values.shape}; give one reward per sequence"
        )
    return tuple(None if reward is None else float(reward) for reward in values.reshape(-1).tolist())


def _host_copy(tensor: Any, where: str) -> npt.NDArray[Any]:
    """A tensor of torch, numpy or anything that converts, as a private array. bfloat16 becomes float32."""
    if hasattr(tensor, "detach"):
        # Also copy a tensor that is on the host already: the caller may still write to it.
        tensor = tensor.detach().to("cpu", copy=True)
        # numpy has no bfloat16.
        return np.asarray((tensor.float() if "bfloat16" in str(tensor.dtype) else tensor).numpy())
    try:
        values = np.array(tensor)
        return values if values.dtype.kind in "biuf" else values.astype(np.float32)
    except (TypeError, ValueError) as error:
        raise RecordError(f"{where} cannot be an array: {error}") from None

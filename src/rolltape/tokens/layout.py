"""Where the columns of a micro-batch lie in one buffer, so that one copy moves them all."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rolltape.records.token_record import TOKEN_COLUMNS
from rolltape.tokens.derive import MASK_COLUMNS, MISMATCH_COLUMNS
from rolltape.tokens.micro_batch import MicroBatch

_ALIGNED_TO = 16  # bytes
_TORCH_DTYPES = {np.int32: torch.int32, np.bool_: torch.bool, np.float32: torch.float32}
_DTYPES = {name: _TORCH_DTYPES[column.dtype] for name, column in TOKEN_COLUMNS.items()} | {"attention_mask": torch.bool}
# Columns that are derived from on the device, and so are needed there even if they came from elsewhere.
_DERIVED_FROM = (
    *("trained_mask", "advantages", "inference_logprobs", "trainer_logprobs", "old_logprobs", "reference_logprobs"),
    *("rl_weights", "ref_kl_weights", "each_advantage", "lengths"),
)

Sizes = Mapping[str, tuple[torch.dtype, int]]  # by column: the type of its values, and how many


class Region(NamedTuple):
    """A range of the buffer in bytes, and the type of its values."""

    start: int
    stop: int
    dtype: torch.dtype


class BufferLayout:
    """The region of each column. The columns written on the device come first: `device_bytes` of `total_bytes`."""

    def __init__(self, on_device: Sizes, on_host: Sizes) -> None:
        self.regions: dict[str, Region] = {}
        self.total_bytes = 0
        self._append(on_device)
        self.device_bytes = self.total_bytes
        self._device_columns = tuple(on_device)
        self._append(on_host)

    def _append(self, columns: Sizes) -> None:
        for name, (dtype, count) in columns.items():
            stop = self.total_bytes + count * dtype.itemsize
            self.regions[name] = Region(self.total_bytes, stop, dtype)
            self.total_bytes = -(-stop // _ALIGNED_TO) * _ALIGNED_TO

    def host_views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Every column as a view of a host buffer."""
        return self._views(buffer, self.regions)

    def device_views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The columns that are written on the device, as views of a buffer there."""
        return self._views(buffer, self._device_columns)

    def _views(self, buffer: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
        regions = ((name, self.regions[name]) for name in names)
        return {name: buffer[region.start : region.stop].view(region.dtype) for name, region in regions}


def plan_layout(batch: MicroBatch) -> BufferLayout:
    """Make room for the columns of a micro-batch and for those that will be derived from them."""
    mismatch = MISMATCH_COLUMNS if "inference_logprobs" in batch.columns else ()
    derived = (*mismatch, *(MASK_COLUMNS if batch.loss is not None else ()))
    if "each_advantage" in batch.per_sequence:
        derived = ("advantages", *derived)
    sizes = {name: (_DTYPES[name], batch.tokens) for name in (*batch.columns, *derived)}
    sizes |= {name: (_sequence_dtype(name, given), batch.sequences) for name, given in batch.per_sequence.items()}
    there = {*_on_device(batch), *derived} if batch.device.type != "cpu" else set()
    return BufferLayout(
        {name: size for name, size in sizes.items() if name in there},
        {name: size for name, size in sizes.items() if name not in there},
    )


def _on_device(batch: MicroBatch) -> set[str]:
    given = {**batch.columns, **batch.per_sequence}
    return {name for name, column in given.items() if name in _DERIVED_FROM or column.device.type != "cpu"}


def _sequence_dtype(name: str, given: Tensor) -> torch.dtype:
    if name == "lengths":
        return torch.int64
    # Whole numbers may need more than float32, which not every device has.
    is_wide = given.dtype == torch.float64 or (not given.is_floating_point() and given.device.type == "cpu")
    return torch.float64 if is_wide and name == "reward" else torch.float32

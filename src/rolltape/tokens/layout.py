"""All columns of a micro-batch in one buffer, so that one copy moves them."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from rolltape.records.token_record import FLAG_COLUMNS, ID_COLUMNS
from rolltape.tokens.derive import MASK_COLUMNS, MISMATCH_COLUMNS
from rolltape.tokens.intake import Intake

_ALIGNED_TO = 16  # bytes

# Read by what is derived on the device, so they are needed there even if they came from elsewhere.
_DERIVED_FROM = (
    "trained_mask",
    "advantages",
    "inference_logprobs",
    "trainer_logprobs",
    "old_logprobs",
    "reference_logprobs",
    "rl_weights",
    "ref_kl_weights",
    "each_advantage",
    "lengths",
)


class Region(NamedTuple):
    """A stretch of the buffer, in bytes, and what it holds."""

    start: int
    stop: int
    dtype: torch.dtype


class Layout:
    """Where each column lies. What is written on the device comes first: `device_bytes` of `total_bytes`."""

    def __init__(
        self, on_device: Mapping[str, tuple[torch.dtype, int]], on_host: Mapping[str, tuple[torch.dtype, int]]
    ):
        self.regions: dict[str, Region] = {}
        self.total_bytes = 0
        self._lay(on_device)
        self.device_bytes = self.total_bytes
        self._device_columns = tuple(on_device)
        self._lay(on_host)

    def _lay(self, columns: Mapping[str, tuple[torch.dtype, int]]) -> None:
        for name, (dtype, count) in columns.items():
            stop = self.total_bytes + count * dtype.itemsize
            self.regions[name] = Region(self.total_bytes, stop, dtype)
            self.total_bytes = -(-stop // _ALIGNED_TO) * _ALIGNED_TO

    def on_host(self, buffer: Tensor) -> dict[str, Tensor]:
        """Every column as a view of a host buffer."""
        return self._views(buffer, self.regions)

    def on_device(self, buffer: Tensor) -> dict[str, Tensor]:
        """The columns that are written on the device, as views of a buffer there."""
        return self._views(buffer, self._device_columns)

    def _views(self, buffer: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
        regions = ((name, self.regions[name]) for name in names)
        return {name: buffer[region.start : region.stop].view(region.dtype) for name, region in regions}


def layout_of(intake: Intake) -> Layout:
    """Room for what came and for what will be derived from it."""
    mismatch = MISMATCH_COLUMNS if "inference_logprobs" in intake.columns else ()
    derived = (*mismatch, *(MASK_COLUMNS if intake.loss is not None else ()))
    spread = ("advantages",) if "each_advantage" in intake.per_sequence else ()
    sized = {name: (_dtype(name), intake.tokens) for name in (*intake.columns, *spread, *derived)}
    sized |= {name: (_sequence_dtype(name, given), intake.sequences) for name, given in intake.per_sequence.items()}
    there = {*_on_the_device(intake), *spread, *derived} if intake.device.type != "cpu" else set()
    return Layout(
        {name: size for name, size in sized.items() if name in there},
        {name: size for name, size in sized.items() if name not in there},
    )


def _on_the_device(intake: Intake) -> set[str]:
    came = {**intake.columns, **intake.per_sequence}
    return {name for name, column in came.items() if name in _DERIVED_FROM or column.device.type != "cpu"}


def _dtype(column: str) -> torch.dtype:
    if column in ID_COLUMNS:
        return torch.int32
    return torch.bool if column in FLAG_COLUMNS or column == "attention_mask" else torch.float32


def _sequence_dtype(name: str, given: Tensor) -> torch.dtype:
    if name == "lengths":
        return torch.int64
    # Whole numbers may need more than float32, which not every device has.
    is_wide = given.dtype == torch.float64 or (not given.is_floating_point() and given.device.type == "cpu")
    return torch.float64 if is_wide and name == "reward" else torch.float32

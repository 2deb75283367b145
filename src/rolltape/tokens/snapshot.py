"""A micro-batch's columns as they are now, on their way to the host, while the training thread goes on."""

from collections.abc import Iterable

import msgspec
import numpy as np
import torch
from torch import Tensor

from rolltape.tokens.derive import derive
from rolltape.tokens.intake import Intake
from rolltape.tokens.layout import Layout
from rolltape.tokens.losses import LossSpec
from rolltape.tokens.slabs import Slabs


class Snapshot(msgspec.Struct, frozen=True, eq=False):
    """Columns in host memory, or soon there. `columns` is for a thread that may wait."""

    intake: Intake  # without its columns, which would keep the caller's tensors in memory
    layout: Layout
    slab: Tensor
    copied: torch.cuda.Event | None  # None: they are there already, and what is derived is not

    def columns(self) -> dict[str, Tensor]:
        """Every column, once it is there."""
        columns = self.layout.on_host(self.slab)
        if self.copied is not None:
            self.copied.synchronize()
        elif self.intake.device.type == "cpu":
            _complete(columns, self.intake.loss)
        return columns


class Camera:
    """Takes snapshots on the training thread. Work for a device is only queued there; nothing waits for it."""

    def __init__(self) -> None:
        self.slabs = Slabs()
        self._transfers: dict[torch.device, _Transfer] = {}

    def reserve(self, size: int, device: torch.device, count: int) -> None:
        """Have memory ready for so many micro-batches of `size` bytes."""
        pinned = device.type == "cuda"
        held = [self.slabs.take(size, pinned=pinned) for _ in range(count)]
        for slab in held:
            slab.zero_()
            self.slabs.give_back(slab)
        if pinned:
            self._transfer(device).reserve(size)

    @torch.no_grad()
    def snapshot(self, intake: Intake, layout: Layout) -> Snapshot:
        """The columns of `intake`: what the caller does to them later does not show."""
        slab = self.slabs.take(layout.total_bytes, pinned=intake.device.type == "cuda")
        hosted = layout.on_host(slab)
        if intake.device.type == "cpu":
            _fill_host(hosted, intake)
            return Snapshot(_told(intake), layout, slab, None)
        if intake.device.type == "cuda":
            copied = self._transfer(intake.device).copy(intake, layout, slab, hosted)
            return Snapshot(_told(intake), layout, slab, copied)
        buffer = torch.empty(layout.device_bytes, dtype=torch.uint8, device=intake.device)
        _fill_device(layout.on_device(buffer), hosted, intake)
        slab[: layout.device_bytes].copy_(buffer)
        return Snapshot(_told(intake), layout, slab, None)

    def _transfer(self, device: torch.device) -> "_Transfer":
        if device not in self._transfers:
            self._transfers[device] = _Transfer(device)
        return self._transfers[device]


class _Transfer:
    """One buffer on a CUDA device, and the stream that copies it to the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._last: torch.cuda.Event | None = None

    def reserve(self, size: int) -> None:
        if len(self._buffer) < size:
            self._buffer = self._buffer[:0].clone()  # let go of the old one first
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
            # Whoever gets this memory next must wait for the copy out of it.
            self._buffer.record_stream(self._stream)

    def copy(self, intake: Intake, layout: Layout, slab: Tensor, hosted: dict[str, Tensor]) -> torch.cuda.Event:
        """Gather the columns where they are, in the order of the caller's stream, and copy them beside it."""
        current = torch.cuda.current_stream(self._device)
        if self._last is not None:
            current.wait_event(self._last)
        self.reserve(layout.device_bytes)
        _fill_device(layout.on_device(self._buffer), hosted, intake)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            slab[: layout.device_bytes].copy_(self._buffer[: layout.device_bytes], non_blocking=True)
            self._last = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._last.record(self._stream)
        return self._last


def _fill_device(there: dict[str, Tensor], hosted: dict[str, Tensor], intake: Intake) -> None:
    """Bring each column to the device or leave it on the host, as the layout has it, and derive the others there."""
    for name, column in _given(intake):
        if name not in there:
            _put(column, hosted[name])
        elif column.device.type == "cpu":
            # Out of pinned memory, since a copy out of any other may wait for the device.
            there[name].copy_(_put(column, hosted[name]), non_blocking=True)
        else:
            there[name].copy_(column, non_blocking=True)
    _complete(there, intake.loss)


def _fill_host(hosted: dict[str, Tensor], intake: Intake) -> None:
    for name, column in _given(intake):
        _put(column, hosted[name])


def _put(column: Tensor, place: Tensor) -> Tensor:
    """Copy into host memory on this thread alone: torch would share the work with threads that are busy encoding."""
    if column.device.type == "cpu" and column.dtype != torch.bfloat16:  # which numpy does not know
        np.copyto(place.numpy(), column.numpy(), casting="unsafe")
    else:
        place.copy_(column)
    return place


def _told(intake: Intake) -> Intake:
    return msgspec.structs.replace(intake, columns={}, per_sequence={})


def _given(intake: Intake) -> Iterable[tuple[str, Tensor]]:
    return (*intake.columns.items(), *intake.per_sequence.items())


@torch.no_grad()
def _complete(columns: dict[str, Tensor], loss: LossSpec | None) -> None:
    """Make the columns that follow from those that came."""
    if "each_advantage" in columns:
        _spread(columns["each_advantage"], columns["lengths"], columns["advantages"])
    derive(columns, loss)


def _spread(each: Tensor, lengths: Tensor, place: Tensor) -> None:
    """Give each token its sequence's value; lengths that do not add up cannot lead out of bounds."""
    tokens = torch.arange(len(place), dtype=torch.int32, device=place.device)
    ends = lengths.cumsum(0, dtype=torch.int32)
    owner = torch.searchsorted(ends, tokens, right=True, out_int32=True).clamp_(max=len(ends) - 1)
    torch.index_select(each, 0, owner, out=place)

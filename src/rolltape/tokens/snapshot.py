"""Copies a micro-batch's columns into one buffer, and the buffer to the host, while the training thread continues."""

import threading
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from rolltape.records.token_record import TOKEN_COLUMNS
from rolltape.tokens.derive import MASK_COLUMNS, MISMATCH_COLUMNS, derive_columns
from rolltape.tokens.micro_batch import MicroBatch

_ALIGNED_TO = 16  # bytes
_TORCH_DTYPES = {np.int32: torch.int32, np.bool_: torch.bool, np.float32: torch.float32}
_DTYPES = {name: _TORCH_DTYPES[column.dtype] for name, column in TOKEN_COLUMNS.items()} | {"attention_mask": torch.bool}

Sizes = Mapping[str, tuple[torch.dtype, int]]  # by column: the type of its values, and how many


class Region(NamedTuple):
    """A range of the buffer in bytes, and the type of its values."""

    start: int
    stop: int
    dtype: torch.dtype


class BufferLayout:
    """The region of each column. Columns from the device come first: `device_bytes` of `total_bytes`."""

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
        """The columns that come from the device, as views of a buffer there."""
        return self._views(buffer, self._device_columns)

    def _views(self, buffer: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
        regions = ((name, self.regions[name]) for name in names)
        return {name: buffer[region.start : region.stop].view(region.dtype) for name, region in regions}


def plan_layout(batch: MicroBatch) -> BufferLayout:
    """Plan the regions of a micro-batch's columns and of those that will be derived from them."""
    mismatch = MISMATCH_COLUMNS if "inference_logprobs" in batch.columns else ()
    derived = (*mismatch, *(MASK_COLUMNS if batch.losses is not None else ()))
    if "each_advantage" in batch.per_sequence:
        derived = ("advantages", *derived)
    sizes = {name: (_DTYPES[name], batch.tokens) for name in (*batch.columns, *derived)}
    sizes |= {name: (_sequence_dtype(name, given), batch.sequences) for name, given in batch.per_sequence.items()}
    there = {name for name, column in _given_columns(batch) if column.device.type != "cpu"}
    return BufferLayout(
        {name: size for name, size in sizes.items() if name in there},
        {name: size for name, size in sizes.items() if name not in there},
    )


def _sequence_dtype(name: str, given: Tensor) -> torch.dtype:
    if name == "lengths":
        return torch.int64
    # Whole numbers may need more than float32, which not every device has.
    is_wide = given.dtype == torch.float64 or (not given.is_floating_point() and given.device.type == "cpu")
    return torch.float64 if is_wide and name in ("reward", "loss_weight") else torch.float32


_SMALLEST_BUFFER = 1 << 20  # bytes
_KEPT_BUFFERS = 8


class Snapshot(msgspec.Struct, frozen=True, eq=False):
    """A micro-batch whose columns are in a host buffer, or on their way there."""

    batch: MicroBatch  # without its columns, which would keep the caller's tensors in memory
    layout: BufferLayout
    buffer: Tensor
    copied: Any | None  # an event of the device; None: the copy is done

    def columns(self) -> dict[str, Tensor]:
        """Every column, derived ones included. Call it once, on a background thread: it waits for the copy."""
        columns = self.layout.host_views(self.buffer)
        if self.copied is not None:
            self.copied.synchronize()
        derive_columns(columns, self.batch.losses, self.batch.precision)
        return columns


class PinnedBuffers:
    """Host buffers that are reused, because pinning and first use of memory are slow. Threads may share them.

    Their sizes are powers of two. Buffers for batches on the CPU are not pinned.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[bool, list[Tensor]] = {False: [], True: []}

    def take(self, size: int, *, pinned: bool) -> Tensor:
        """A buffer of at least `size` bytes that is not in use."""
        with self._lock:
            free = self._free[pinned]
            fitting = [at for at, buffer in enumerate(free) if len(buffer) >= size]
            if fitting:
                return free.pop(min(fitting, key=lambda at: len(free[at])))
        capacity = max(_SMALLEST_BUFFER, 1 << (size - 1).bit_length())
        return torch.empty(capacity, dtype=torch.uint8, device="cpu", pin_memory=pinned)

    def give_back(self, buffer: Tensor) -> None:
        """Make a buffer available again. If there are many, the largest are kept."""
        with self._lock:
            free = self._free[buffer.is_pinned()]
            free.append(buffer)
            free.sort(key=len, reverse=True)
            del free[_KEPT_BUFFERS:]


class DeviceSnapshotter:
    """Takes snapshots on the training thread. It only queues work for a device there, and waits for nothing."""

    def __init__(self) -> None:
        self.buffers = PinnedBuffers()
        self._transfers: dict[torch.device, _Transfer] = {}

    def reserve(self, size: int, device: torch.device, count: int) -> None:
        """Allocate memory for `count` micro-batches of `size` bytes."""
        pinned = has_streams(device)
        held = [self.buffers.take(size, pinned=pinned) for _ in range(count)]
        for buffer in held:
            buffer.zero_()
            self.buffers.give_back(buffer)
        if pinned:
            self._transfer(device).reserve(size)

    @torch.no_grad()
    def snapshot(self, batch: MicroBatch, layout: BufferLayout) -> Snapshot:
        """Copy the columns of a micro-batch. Later changes by the caller do not affect the copy."""
        pinned = has_streams(batch.device)
        buffer = self.buffers.take(layout.total_bytes, pinned=pinned)
        hosted = layout.host_views(buffer)
        for name, column in _given_columns(batch):
            if column.device.type == "cpu":
                _copy_on_host(column, hosted[name])
        copied = None
        if pinned:
            copied = self._transfer(batch.device).copy(batch, layout, buffer)
        elif layout.device_bytes:
            gathered = torch.empty(layout.device_bytes, dtype=torch.uint8, device=batch.device)
            _gather_on_device(layout.device_views(gathered), batch)
            buffer[: layout.device_bytes].copy_(gathered)
        return Snapshot(msgspec.structs.replace(batch, columns={}, per_sequence={}), layout, buffer, copied)

    def _transfer(self, device: torch.device) -> "_Transfer":
        if device not in self._transfers:
            self._transfers[device] = _Transfer(device)
        return self._transfers[device]


def has_streams(device: torch.device) -> bool:
    """Whether a device copies to the host while the calling thread continues: CUDA, XPU, NPU and others."""
    module = torch.get_device_module(device)
    return device.type != "cpu" and all(hasattr(module, name) for name in ("Stream", "Event", "current_stream"))


class _Transfer:
    """One buffer on a device, and the stream that copies it to the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)  # torch.cuda, torch.xpu, …
        self._stream = self._module.Stream(device)
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._last: Any | None = None

    def reserve(self, size: int) -> None:
        if len(self._buffer) < size:
            self._buffer = self._buffer[:0].clone()  # release the old one first
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
            # The next user of this memory must wait until it is copied.
            self._buffer.record_stream(self._stream)

    def copy(self, batch: MicroBatch, layout: BufferLayout, buffer: Tensor) -> Any:
        """Gather the columns on the device, on the caller's stream, and copy them to the host on another stream.

        Returns the event that marks the end of the copy.
        """
        current = self._module.current_stream(self._device)
        if self._last is not None:
            current.wait_event(self._last)
        self.reserve(layout.device_bytes)
        _gather_on_device(layout.device_views(self._buffer), batch)
        self._stream.wait_stream(current)
        with self._module.stream(self._stream):
            buffer[: layout.device_bytes].copy_(self._buffer[: layout.device_bytes], non_blocking=True)
            self._last = self._event()
            self._last.record(self._stream)
        return self._last

    def _event(self) -> Any:
        try:
            return self._module.Event(blocking=True)  # a waiting thread sleeps
        except TypeError:  # not every device has blocking events
            return self._module.Event()


def _gather_on_device(there: dict[str, Tensor], batch: MicroBatch) -> None:
    for name, column in _given_columns(batch):
        if name in there:
            there[name].copy_(column, non_blocking=True)


def _copy_on_host(column: Tensor, out: Tensor) -> None:
    """Copy on this thread only: torch would use other threads too, which are busy encoding."""
    if column.dtype == torch.bfloat16:  # numpy has no bfloat16
        out.copy_(column)
    else:
        np.copyto(out.numpy(), column.numpy(), casting="unsafe")


def _given_columns(batch: MicroBatch) -> Iterable[tuple[str, Tensor]]:
    return (*batch.columns.items(), *batch.per_sequence.items())

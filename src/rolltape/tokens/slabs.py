"""Host memory that is used again and again: pinning it, or touching it for the first time, is what costs."""

import threading

import torch
from torch import Tensor

_SMALLEST = 1 << 20  # bytes
_KEPT = 8


class Slabs:
    """Buffers on the host, in powers of two. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[bool, list[Tensor]] = {False: [], True: []}

    def take(self, size: int, *, pinned: bool) -> Tensor:
        """A buffer of at least `size` bytes that nobody else has."""
        with self._lock:
            free = self._free[pinned]
            fitting = [at for at, slab in enumerate(free) if len(slab) >= size]
            if fitting:
                return free.pop(min(fitting, key=lambda at: len(free[at])))
        capacity = max(_SMALLEST, 1 << (size - 1).bit_length())
        return torch.empty(capacity, dtype=torch.uint8, device="cpu", pin_memory=pinned)

    def give_back(self, slab: Tensor) -> None:
        """Let others have a buffer; the smallest go if there are many."""
        with self._lock:
            free = self._free[slab.is_pinned()]
            free.append(slab)
            free.sort(key=len, reverse=True)
            del free[_KEPT:]

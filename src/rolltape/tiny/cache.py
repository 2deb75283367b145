"""The keys and values that one request has computed so far."""

import math
import mmap
import sys

import numpy as np

from rolltape.tiny.checkpoint import Floats, ModelConfig


class Cache:
    """Keys and values of every layer, with room for all that the request may become."""

    def __init__(self, config: ModelConfig, tokens: int) -> None:
        # (layers, keys and values, kv_heads, tokens, head_dim), to be written and read in place.
        self.values: Floats = mapped_floats((config.layers, 2, config.kv_heads, tokens, config.head_dim))


def mapped_floats(shape: tuple[int, ...]) -> Floats:
    """Room that is mapped, not allocated: a page takes memory when it is written, and all go back at the end."""
    size = 4 * math.prod(shape)
    return np.frombuffer(_mapped(size) if size else b"", dtype=np.float32).reshape(shape)


def _mapped(size: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        mapped.madvise(mmap.MADV_NOHUGEPAGE)
    return mapped

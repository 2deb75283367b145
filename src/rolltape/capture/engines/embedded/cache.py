"""The keys and values that one request has computed so far."""

import math
import mmap
import sys

import numpy as np

from rolltape.capture.engines.embedded.checkpoint import Floats, ModelConfig


class Cache:
    """Keys and values of every layer, with room for all that the request may become.

    The room is mapped, not allocated: a page takes memory when a token is written to it, and all of them go
    back to the system when the request ends.
    """

    def __init__(self, config: ModelConfig, tokens: int) -> None:
        shape = (config.layers, 2, config.kv_heads, tokens, config.head_dim)
        mapped = _mapped(4 * math.prod(shape))
        # (layers, keys and values, kv_heads, tokens, head_dim), to be written and read in place.
        self.values: Floats = np.frombuffer(mapped, dtype=np.float32).reshape(shape)


def _mapped(size: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        mapped.madvise(mmap.MADV_NOHUGEPAGE)
    return mapped

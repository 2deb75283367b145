"""Reuse the keys and values of prompts that begin alike, in pieces that are cached across requests.

A piece is cut at a fixed place and its bits depend only on the ids up to its end, so a copy is bit for bit equal to
computing it again. Sampled tokens are fed one by one, in other shapes, so they are not cached: as part of the next
prompt they are read again.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from rolltape.tiny.attention import Cache, mapped_floats
from rolltape.tiny.checkpoint import ModelConfig

# A prompt is read in pieces of this size, always cut at the same places, so that the shapes of its attention, and so
# its bits, do not depend on other requests.
PROMPT_PIECE = 128


class Prefixes:
    """A cache of pieces that were read under one set of weights. Used by the engine's thread."""

    def __init__(self, config: ModelConfig, megabytes: float) -> None:
        piece = (config.layers, 2, config.kv_heads, PROMPT_PIECE, config.head_dim)
        self._shape = (int(megabytes * 2**20) // (4 * math.prod(piece)), *piece)
        self.clear()

    def clear(self) -> None:
        """Remove all pieces and free their memory."""
        self._room = mapped_floats(self._shape)
        self._free = list(range(self._shape[0]))
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # by key, the least recently used first

    def __len__(self) -> int:
        return len(self._slots)

    def keys(self, prompt: list[int]) -> list[bytes]:
        """A key for each complete piece of a prompt: a digest of the ids up to its end."""
        keys: list[bytes] = []
        if self._shape[0]:
            for piece in np.array(prompt[: len(prompt) // PROMPT_PIECE * PROMPT_PIECE]).reshape(-1, PROMPT_PIECE):
                keys.append(blake2b(b"".join([*keys[-1:], piece.tobytes()]), digest_size=16).digest())
        return keys

    def take(self, keys: Sequence[bytes], first: int, cache: Cache) -> int:
        """Copy the pieces from `first` on into a request's cache, until one is missing. Return their number."""
        count = 0
        for index in range(first, len(keys)):
            slot = self._slots.get(keys[index])
            if slot is None:
                break
            cache.values[..., _tokens(index), :] = self._room[slot]
            count += 1
        self._use(keys[: first + count])
        return count

    def keep(self, keys: Sequence[bytes], cache: Cache) -> None:
        """Copy the last of these pieces from a request's cache, in place of the least recently used piece."""
        if keys[-1] not in self._slots:
            if not self._free:
                oldest = next(iter(self._slots))
                if oldest in keys:  # this prompt fills the whole cache, and its beginning is more useful than its end
                    return
                self._free.append(self._slots.pop(oldest))
            slot = self._slots[keys[-1]] = self._free.pop()
            self._room[slot] = cache.values[..., _tokens(len(keys) - 1), :]
        self._use(keys)

    def _use(self, keys: Sequence[bytes]) -> None:
        # The first piece becomes the most recent: a piece is found only with all pieces before it.
        for key in reversed(keys):
            if key in self._slots:
                self._slots.move_to_end(key)


def _tokens(piece: int) -> slice:
    return slice(piece * PROMPT_PIECE, (piece + 1) * PROMPT_PIECE)

"""Reuse the keys and values of prompts that begin alike, in pieces that are kept across requests.

A piece is cut at a fixed place and its bits depend on the ids up to its end alone, so a copy of it is, bit for
bit, what reading it again would give. What was sampled is fed token by token, in other shapes, and therefore not
kept: as part of the next prompt it is read again.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from rolltape.tiny.attention import Cache, mapped_floats
from rolltape.tiny.checkpoint import ModelConfig

# A prompt is read in pieces of this size, cut at the same places whatever else runs, so that the shapes of its
# attention, and with them its bits, are its own.
PROMPT_PIECE = 128


class Prefixes:
    """The pieces that were read under one set of weights, as many as fit. Used by the engine's thread."""

    def __init__(self, config: ModelConfig, megabytes: float) -> None:
        piece = (config.layers, 2, config.kv_heads, PROMPT_PIECE, config.head_dim)
        self._shape = (int(megabytes * 2**20) // (4 * math.prod(piece)), *piece)
        self.clear()

    def clear(self) -> None:
        """Forget all pieces and give their memory back."""
        self._room = mapped_floats(self._shape)
        self._free = list(range(self._shape[0]))
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # by key, the least recently used first

    def __len__(self) -> int:
        return len(self._slots)

    def keys(self, prompt: list[int]) -> list[bytes]:
        """A key for each whole piece of a prompt: a digest of the ids up to its end."""
        keys: list[bytes] = []
        if self._shape[0]:
            for piece in np.array(prompt[: len(prompt) // PROMPT_PIECE * PROMPT_PIECE]).reshape(-1, PROMPT_PIECE):
                keys.append(blake2b(b"".join([*keys[-1:], piece.tobytes()]), digest_size=16).digest())
        return keys

    def take(self, keys: Sequence[bytes], first: int, cache: Cache) -> int:
        """Copy the pieces from the `first` on into a cache, until one is missing; how many there were."""
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
        """Copy the last piece of these from a cache, in the place of the one that was not used for longest."""
        if keys[-1] not in self._slots:
            if not self._free:
                oldest = next(iter(self._slots))
                if oldest in keys:  # the whole room is this prompt's; its beginning is worth more than its end
                    return
                self._free.append(self._slots.pop(oldest))
            slot = self._slots[keys[-1]] = self._free.pop()
            self._room[slot] = cache.values[..., _tokens(len(keys) - 1), :]
        self._use(keys)

    def _use(self, keys: Sequence[bytes]) -> None:
        # The first piece last: none outlives one that it follows, without which it would not be found.
        for key in reversed(keys):
            if key in self._slots:
                self._slots.move_to_end(key)


def _tokens(piece: int) -> slice:
    return slice(piece * PROMPT_PIECE, (piece + 1) * PROMPT_PIECE)

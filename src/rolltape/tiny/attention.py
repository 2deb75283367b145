"""Attention of many requests' tokens over their caches; a request's result does not depend on the other requests."""

import math
import mmap
import sys
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from rolltape.tiny.checkpoint import Floats, ModelConfig


class Cache:
    """Keys and values of every layer, with room for the longest possible reply of the request."""

    def __init__(self, config: ModelConfig, tokens: int) -> None:
        # (layers, keys and values, kv_heads, tokens, head_dim), written and read in place.
        self.values: Floats = mapped_floats((config.layers, 2, config.kv_heads, tokens, config.head_dim))


def mapped_floats(shape: tuple[int, ...]) -> Floats:
    """An array of mapped memory: a page takes memory only when it is written, and all is returned at the end."""
    size = 4 * math.prod(shape)
    return np.frombuffer(_mapped(size) if size else b"", dtype=np.float32).reshape(shape)


def _mapped(size: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        mapped.madvise(mmap.MADV_NOHUGEPAGE)
    return mapped


class TokenSpan(NamedTuple):
    """Consecutive tokens of one request: a piece of its prompt, or its last sampled token."""

    cache: Cache
    ids: list[int]
    start: int  # the position of the first
    wanted: int  # for how many of the last tokens logits are computed

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


class _One(NamedTuple):
    """A span of a single token: its cache up to this token, for every layer, and its place for scores."""

    held: Floats  # (layers, 2, kv_heads, held, head_dim)
    turned_keys: Floats  # its keys, (layers, kv_heads, head_dim, held)
    scores: Floats  # (kv_heads, group, held)


class StepRows:
    """The rows of one step. Single tokens come first and share one softmax; longer spans have their own."""

    def __init__(self, spans: list[TokenSpan], padded: int, config: ModelConfig, *, safe: bool) -> None:
        """`padded`: the number of rows, including those of no span; `safe`: no score can overflow exp."""
        self._safe = safe
        heads, group = config.heads, config.heads // config.kv_heads
        self._mixed = np.zeros((padded, config.kv_heads, group, config.head_dim), dtype=np.float32)
        lone = [span for span in spans if len(span.ids) == 1]
        self._lengths = [span.end for span in lone for _ in range(heads)]
        *offsets, total = accumulate(self._lengths, initial=0)
        self._offsets = np.array(offsets)
        self._flat = np.empty(total, dtype=np.float32)
        self._ones: list[_One] = []
        place = 0
        for span in lone:
            held = span.cache.values[:, :, :, : span.end]
            scores = self._flat[place : place + heads * span.end].reshape(config.kv_heads, group, span.end)
            self._ones.append(_One(held, held[:, 0].swapaxes(-1, -2), scores))
            place += scores.size
        self._longer: list[tuple[slice, TokenSpan]] = []
        row = len(lone)
        for span in spans[len(lone) :]:
            assert len(span.ids) > 1, "single tokens come first"
            self._longer.append((slice(row, row + len(span.ids)), span))
            row += len(span.ids)

    def attend(self, layer: int, queries: Floats, both: Floats) -> Floats:
        """Add keys and values `both` (rows, 2, kv_heads, dim) to the caches, and return the attention of each row.

        The result has the shape of `queries` (rows, kv_heads, group, dim), and is valid until the next call.
        """
        if self._ones:
            self._attend_ones(layer, queries, both)
        for rows, span in self._longer:
            held = span.cache.values[layer, :, :, : span.end]
            held[:, :, span.start :] = both[rows].transpose(1, 2, 0, 3)
            self._mixed[rows] = _attend(queries[rows], held[0], held[1], span.start, safe=self._safe)
        return self._mixed

    def _attend_ones(self, layer: int, queries: Floats, both: Floats) -> None:
        ones, flat, mixed = self._ones, self._flat, self._mixed
        for (held, turned_keys, scores), query, new in zip(ones, queries, both, strict=False):
            held[layer, :, :, -1] = new
            np.matmul(query, turned_keys[layer], out=scores)
        if not self._safe:
            flat -= np.repeat(np.maximum.reduceat(flat, self._offsets), self._lengths)
        np.exp(flat, out=flat)
        for (held, _, scores), result in zip(ones, mixed, strict=False):
            np.matmul(scores, held[layer, 1], out=result)
        mixed[: len(ones)] /= np.add.reduceat(flat, self._offsets).reshape(-1, *mixed.shape[1:3], 1)


def _attend(queries: Floats, keys: Floats, values: Floats, start: int, *, safe: bool) -> Floats:
    """Causal attention of consecutive tokens: queries (tokens, kv_heads, group, head_dim)."""
    tokens, kv_heads, group, dim = queries.shape
    stacked = queries.transpose(1, 2, 0, 3).reshape(kv_heads, group * tokens, dim)
    scores = np.matmul(stacked, keys.swapaxes(1, 2)).reshape(kv_heads, group, tokens, -1)
    np.copyto(scores[..., start:], -np.inf, where=np.triu(np.ones((tokens, tokens), dtype=bool), 1))
    if not safe:
        scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    mixed = np.matmul(scores.reshape(kv_heads, group * tokens, -1), values).reshape(kv_heads, group, tokens, dim)
    mixed /= scores.sum(axis=-1, keepdims=True)
    transposed: Floats = mixed.transpose(2, 0, 1, 3)
    return transposed

"""Matrix products whose rows do not depend on which other rows are computed with them.

BLAS chooses its kernel, and so the order of additions, by the shape of a product. So a row's last bits change with
the size of the batch. Here every product is cut into blocks of fixed depth and width, and only a few row counts are
used, for which equal bits were shown on this machine.
"""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController  # type: ignore[import-not-found, import-untyped, unused-ignore]

from rolltape.tiny.checkpoint import Floats

# A few rows times 256 × 64 use OpenBLAS's kernels for small matrices, which read the weights once, in order and
# unpacked. A single row, doubled, then costs about as much as a matrix-vector product.
BLOCK_DEPTH = 256
BLOCK_WIDTH = 64
_ROW_COUNTS = (2, 4, 8, 16, 32, 64, 128)
_REFERENCE = 4


@cache
def proven_row_counts(depth: int) -> tuple[int, ...]:
    """The row counts, ascending, for which a row times a block has the same bits at every position.

    Only (1,) if this BLAS treats the rows of one product differently.
    """
    rng = np.random.default_rng(depth)
    most = _ROW_COUNTS[-1]
    rows = rng.standard_normal((2 * most, depth), dtype=np.float32)
    block = rng.standard_normal((1, depth, BLOCK_WIDTH), dtype=np.float32)

    def product(order: np.ndarray, count: int) -> Floats:
        result = np.empty((len(rows), BLOCK_WIDTH), dtype=np.float32)
        parts = [np.matmul(rows[order[at : at + count]], block)[0] for at in range(0, len(rows), count)]
        result[order] = np.concatenate(parts)
        return result

    orders = [rng.permutation(len(rows)) for _ in range(3)]
    with one_blas_thread():  # as in real use
        expected = product(np.arange(len(rows)), _REFERENCE)
        proven = [
            count for count in _ROW_COUNTS if all(np.array_equal(product(order, count), expected) for order in orders)
        ]
    return tuple(proven) if _REFERENCE in proven else (1,)


class WeightArena:
    """One array for the weights of many products.

    numpy requests large pages for a large array, and a pass over all weights then takes about half the time.
    """

    def __init__(self, shapes: list[tuple[int, int]]) -> None:
        """`shapes` are the (outputs, inputs) of the matrices."""
        self._floats: Floats = np.empty(sum(math.prod(_blocks(*shape)) for shape in shapes), dtype=np.float32)
        self._taken = 0

    def take(self, *shape: int) -> Floats:
        size = math.prod(shape)
        part = self._floats[self._taken : self._taken + size]
        self._taken += size
        return part.reshape(shape)


def _blocks(outputs: int, inputs: int) -> tuple[int, int, int, int]:
    """The blocks of a matrix: (blocks along its inputs, blocks along its outputs, depth, width)."""
    deep = -(-inputs // BLOCK_DEPTH)
    return deep, -(-outputs // BLOCK_WIDTH), -(-inputs // deep), BLOCK_WIDTH


class Linear:
    """One or more weight matrices of the same input, applied as one: `linear(rows)` is rows @ concat(weights).T."""

    def __init__(self, *weights: Floats, room: WeightArena | None = None) -> None:
        """The weights have the shape (outputs, inputs), as in checkpoints."""
        self.inputs = weights[0].shape[1]
        self.outputs = sum(len(weight) for weight in weights)
        room = WeightArena([(self.outputs, self.inputs)]) if room is None else room
        deep, wide, depth, width = _blocks(self.outputs, self.inputs)
        whole = np.zeros((wide * width, deep * depth), dtype=np.float32)
        np.concatenate(weights, out=whole[: self.outputs, : self.inputs])
        self._weights = room.take(deep, wide, depth, width)
        self._weights[:] = whole.reshape(wide, width, deep, depth).transpose(2, 0, 3, 1)
        self._row_counts = proven_row_counts(depth)
        self.tile = self._row_counts[0]
        self._cuts: dict[int, list[slice]] = {}

    def __call__(self, rows: Floats) -> Floats:
        """Multiply; the number of rows must be a multiple of `tile`."""
        total = len(rows)
        deep, wide, depth, width = self._weights.shape
        if self.inputs < deep * depth:
            rows = np.pad(rows, [(0, 0), (0, deep * depth - self.inputs)])
        parts = rows.reshape(total, deep, 1, depth).transpose(1, 2, 0, 3)
        result = np.empty((total, wide, width), dtype=np.float32)
        target = result.swapaxes(0, 1)
        for cut in self._cuts.get(total) or self._cut(total):
            if deep == 1:
                np.matmul(parts[0, :, cut], self._weights[0], out=target[:, cut])
            else:
                np.add.reduce(np.matmul(parts[:, :, cut], self._weights), axis=0, out=target[:, cut])
        return result.reshape(total, -1)[:, : self.outputs]

    def _cut(self, total: int) -> list[slice]:
        cuts, at = [], 0
        while at < total:
            count = next(count for count in reversed(self._row_counts) if count <= total - at)
            cuts.append(slice(at, at + count))
            at += count
        self._cuts[total] = cuts
        return cuts

    def columns(self, which: np.ndarray) -> Floats:
        """The weights of some outputs, shape (len(which), inputs): the embedding of a tied head."""
        block, place = np.divmod(which, BLOCK_WIDTH)
        return self._weights[:, block, :, place].reshape(len(which), -1)[:, : self.inputs]


_lock = threading.Lock()
_users = 0
_before: list[int] = []


@contextmanager
def one_blas_thread() -> Iterator[Callable[[], None]]:
    """Limit BLAS to one thread in the whole process; the last user restores the threads.

    Yields a function that sets the limit again, cheap enough for every step, since other code may change it.
    """
    global _users, _before
    libraries = ThreadpoolController().select(user_api="blas").lib_controllers
    with _lock:
        if _users == 0:
            _before = [library.get_num_threads() for library in libraries]
        _users += 1

    def hold() -> None:
        for library in libraries:
            if library.get_num_threads() != 1:
                library.set_num_threads(1)
            if library.get_num_threads() != 1:  # it does nothing, because another thread has set a limit and keeps it
                _release(library, force=True)
                library.set_num_threads(1)

    hold()
    try:
        yield hold
    finally:
        with _lock:
            _users -= 1
            for library, threads in zip(libraries, _before, strict=False):
                if _users == 0:
                    library.set_num_threads(threads)
                _release(library, force=False)


def _release(library: Any, *, force: bool) -> None:
    """Let another thread set a limit. From threadpoolctl 3.8 on, only the thread that first set one may change it."""
    if hasattr(library, "clear_controlling_thread"):
        library.clear_controlling_thread(force)

"""Matrix products whose rows do not depend on which other rows are computed with them.

BLAS picks its kernel, and with it the order of additions, by the shape of a product, so a row's last bits
change with the size of the batch. Here every product is cut into blocks of fixed depth and width, and is
asked for in a few row counts only, those that are shown to agree bit for bit on this machine.
"""

import math
from functools import cache
from itertools import pairwise

import numpy as np

from rolltape.capture.engines.embedded.blas import one_blas_thread
from rolltape.capture.engines.embedded.checkpoint import Floats

# A few rows times 256 × 64 stay within OpenBLAS's kernels for small matrices, which read the weights once, in
# order and unpacked; a lone row, doubled, then costs about what a matrix-vector product does.
BLOCK_DEPTH = 256
BLOCK_WIDTH = 64
_ROW_COUNTS = (2, 4, 8, 16, 32, 64, 128)
_REFERENCE = 4


@cache
def proven_row_counts(depth: int) -> tuple[int, ...]:
    """The row counts, ascending, in which a row times a block gives the same bits wherever it stands.

    Only (1,) where this BLAS treats the rows of one product differently.
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
    with one_blas_thread():  # as they will be used
        expected = product(np.arange(len(rows)), _REFERENCE)
        proven = [
            count for count in _ROW_COUNTS if all(np.array_equal(product(order, count), expected) for order in orders)
        ]
    return tuple(proven) if _REFERENCE in proven else (1,)


class Room:
    """One array for the weights of many products.

    numpy asks the system for large pages where an array is large, and a pass over all weights then takes
    about half the time.
    """

    def __init__(self, shapes: list[tuple[int, int]]) -> None:
        """For matrices of these (outputs, inputs)."""
        self._floats: Floats = np.empty(sum(_wide(outputs) * inputs for outputs, inputs in shapes), dtype=np.float32)
        self._taken = 0

    def take(self, *shape: int) -> Floats:
        size = math.prod(shape)
        part = self._floats[self._taken : self._taken + size]
        self._taken += size
        return part.reshape(shape)


def _wide(outputs: int) -> int:
    return -(-outputs // BLOCK_WIDTH) * BLOCK_WIDTH


class Linear:
    """One or more weight matrices of the same input, applied as one: `linear(rows)` is rows @ concat(weights).T."""

    def __init__(self, *weights: Floats, room: Room | None = None) -> None:
        """Take matrices of shape (outputs, inputs), as checkpoints store them."""
        inputs = weights[0].shape[1]
        self.outputs = sum(len(weight) for weight in weights)
        room = Room([(self.outputs, inputs)]) if room is None else room
        whole = np.zeros((_wide(self.outputs), inputs), dtype=np.float32)
        np.concatenate(weights, out=whole[: self.outputs])
        blocks = whole.reshape(-1, BLOCK_WIDTH, inputs).swapaxes(1, 2)
        self._depths = list(pairwise([*range(0, inputs, BLOCK_DEPTH), inputs]))
        self._pieces: list[Floats] = []
        for first, last in self._depths:
            piece = room.take(len(blocks), last - first, BLOCK_WIDTH)
            piece[:] = blocks[:, first:last]
            self._pieces.append(piece)
        proven = [set(proven_row_counts(last - first)) for first, last in self._depths]
        self._row_counts = tuple(sorted(set.intersection(*proven))) or (1,)
        self.tile = self._row_counts[0]
        self._cuts: dict[int, list[slice]] = {}

    def __call__(self, rows: Floats) -> Floats:
        """Multiply; the number of rows must be a multiple of `tile`."""
        total = len(rows)
        result = np.empty((total, len(self._pieces[0]), BLOCK_WIDTH), dtype=np.float32)
        if total in self._row_counts and len(self._pieces) == 1:
            np.matmul(rows, self._pieces[0], out=result.swapaxes(0, 1))
            return result.reshape(total, -1)[:, : self.outputs]
        for cut in self._cuts.get(total) or self._cut(total):
            part, target = rows[cut], result[cut].swapaxes(0, 1)
            np.matmul(part[:, : self._depths[0][1]], self._pieces[0], out=target)
            for (first, last), piece in zip(self._depths[1:], self._pieces[1:], strict=True):
                target += np.matmul(part[:, first:last], piece)
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
        return np.concatenate([piece[block, :, place] for piece in self._pieces], axis=1)

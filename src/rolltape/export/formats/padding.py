"""Rows of different lengths → one array, padded on the left or on the right."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


def right_padded(
    rows: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike, *, fill: float = 0, width: int | None = None
) -> npt.NDArray[Any]:
    """Each row at the left of its line, `fill` after it; trailing shapes are kept."""
    padded = _filled(rows, dtype, fill, width)
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = row
    return padded


def left_padded(
    rows: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike, *, fill: float = 0, width: int | None = None
) -> npt.NDArray[Any]:
    """Each row at the right of its line, `fill` before it."""
    padded = _filled(rows, dtype, fill, width)
    for line, row in zip(padded, rows, strict=True):
        line[len(line) - len(row) :] = row
    return padded


def _filled(rows: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike, fill: float, width: int | None) -> npt.NDArray[Any]:
    longest = max(len(row) for row in rows)
    return np.full((len(rows), longest if width is None else width, *rows[0].shape[1:]), fill, dtype=dtype)

"""Columns that grow: numbers as arrays, texts by a code for each different one."""

from collections.abc import Hashable, Iterable
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T", bound=Hashable)
Array = npt.NDArray[Any]

_FIRST_ROWS = 256


class Coded(Generic[T]):
    """The different values of a column, each with a number."""

    def __init__(self, values: Iterable[T] = ()) -> None:
        self.values: list[T] = list(values)
        self._codes: dict[T, int] = {value: code for code, value in enumerate(self.values)}

    def code(self, value: T) -> int:
        """The number of a value, given now if it has none."""
        code = self._codes.get(value)
        if code is None:
            code = self._codes[value] = len(self.values)
            self.values.append(value)
        return code

    def known(self, value: T) -> int:
        """The number of a value; -1: no row has it."""
        return self._codes.get(value, -1)

    def ranks(self) -> Array:
        """The place of each value among all of them in order; absent ones come last."""
        order = sorted(range(len(self.values)), key=lambda code: (self.values[code] is None, self.values[code]))
        ranks = np.empty(len(order), np.int64)
        ranks[order] = np.arange(len(order))
        return ranks


class Columns:
    """Arrays of one length, by name. A row is added with its defaults, and its fields set afterwards."""

    def __init__(self, kinds: dict[str, tuple[str, float, int]]) -> None:
        self._kinds = kinds  # dtype, default, and how many numbers a row has
        self._arrays = {name: self._made(name, _FIRST_ROWS) for name in kinds}
        self.rows = 0

    def _made(self, name: str, rows: int) -> Array:
        dtype, default, width = self._kinds[name]
        return np.full(rows if width == 1 else (rows, width), default, dtype)

    def __getitem__(self, name: str) -> Array:
        """A column as it is now; it may be written to, and is not to be kept."""
        return self._arrays[name][: self.rows]

    def add(self) -> int:
        """A further row, and its number."""
        row = self.rows
        if row == len(next(iter(self._arrays.values()))):
            for name, held in self._arrays.items():
                grown = self._made(name, 2 * len(held))
                grown[: len(held)] = held
                self._arrays[name] = grown
        self.rows += 1
        return row

    def set(self, row: int, **fields: float) -> None:
        for name, value in fields.items():
            self._arrays[name][row] = value

    def get(self, name: str, row: int) -> Any:
        return self._arrays[name][row].item()

    def fill(self, columns: dict[str, Array]) -> None:
        """Take whole columns, of one length, in place of what is there; those not given have their defaults."""
        self.rows = len(next(iter(columns.values())))
        room = max(_FIRST_ROWS, self.rows)
        for name in self._kinds:
            self._arrays[name] = self._made(name, room)
            if name in columns:
                self._arrays[name][: self.rows] = columns[name]

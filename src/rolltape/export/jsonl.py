"""Rows ↔ JSON lines: strict JSON, one object a line, each naming its schema."""

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rolltape.errors import ExportError
from rolltape.export.destination import Destination, destination
from rolltape.export.rows import Row
from rolltape.export.schema import RowKind

_encode = msgspec.json.Encoder().encode


def write_jsonl(rows: Iterable[Row], kind: RowKind, out: Destination) -> int:
    """Write rows as they come; the number written."""
    written = 0
    with destination(out) as stream:
        for row in rows:
            stream.write(json_line(row, kind))
            written += 1
    return written


def json_line(row: Row, kind: RowKind) -> bytes:
    """One row as a line of strict JSON, its newline included."""
    plain: dict[str, object] = {"schema": kind.value}
    for name, value in row.items():
        plain[name] = _plain(value)
    return _encode(plain) + b"\n"


def read_jsonl(path: str | Path, kind: RowKind) -> Iterator[Row]:
    """The rows of a file that `write_jsonl` wrote, arrays as lists."""
    try:
        with Path(path).open("rb") as lines:
            for number, line in enumerate(lines, 1):
                yield _checked(line, kind, f"{path}, line {number}")
    except OSError as error:
        raise ExportError(f"{path} cannot be read: {error.strerror or error}") from None


def _checked(line: bytes, kind: RowKind, where: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ExportError(f"{where}: no JSON: {error}") from None
    found = row.get("schema") if isinstance(row, dict) else None
    if found != kind.value:
        raise ExportError(f"{where}: schema is {found!r}; this reads {kind.value!r}")
    checked: Row = row
    return checked


def _plain(value: object) -> object:
    """What the encoder can write: arrays as lists, numbers that are not finite spelled out."""
    if isinstance(value, np.ndarray):
        return _list(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def _list(array: npt.NDArray[Any]) -> list[object]:
    if array.dtype.kind == "b":
        values: list[object] = array.astype(np.int8).tolist()
        return values
    values = array.tolist()
    if array.dtype.kind == "f":
        for at in np.flatnonzero(~np.isfinite(array)):
            values[at] = None if np.isnan(array[at]) else {"$float": repr(values[at])}
    return values

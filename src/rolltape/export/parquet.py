"""Rows ↔ Arrow and Parquet: lists of numbers stay columns of numbers, free-form JSON is text."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Raw

from rolltape.errors import ExportError
from rolltape.export.destination import Destination, destination
from rolltape.export.rows import Row
from rolltape.export.schema import COLUMNS, SCHEMA_KEY, RowKind, is_json

_ROWS_PER_GROUP = 1024
_TOKENS_PER_GROUP = 4_000_000
_LONG_COLUMNS = ("ids", "new_prompt_ids", "sampled_ids")


def write_parquet(rows: Iterable[Row], kind: RowKind, out: Destination) -> int:
    """Write rows in groups as they come; the number written."""
    columns = COLUMNS[kind].with_metadata({SCHEMA_KEY: kind.value.encode()})
    written = 0
    # Logprobs hardly ever repeat; splitting a double's bytes lets the compressor see its exponent.
    split = ["logprobs.list.element"] if "logprobs" in columns.names else []
    dictionary: Any = [name for name in columns.names if not pa.types.is_nested(columns.field(name).type)]
    with (
        destination(out) as stream,
        pq.ParquetWriter(
            stream, columns, compression="zstd", use_dictionary=dictionary, use_byte_stream_split=split
        ) as writer,
    ):
        for group in _groups(rows):
            writer.write_table(table_of(group, columns))
            written += len(group)
    return written


def read_parquet(path: str | Path, kind: RowKind) -> Iterator[Row]:
    """The rows of a file that `write_parquet` wrote, per-token columns as arrays."""
    with _naming(path), pq.ParquetFile(path) as file:
        found = (file.schema_arrow.metadata or {}).get(SCHEMA_KEY, b"none").decode()
        if found != kind.value:
            raise ExportError(f"{path}: schema is {found!r}; this reads {kind.value!r}")
        for batch in file.iter_batches(batch_size=_ROWS_PER_GROUP):
            yield from _rows(batch, COLUMNS[kind])


def table_of(rows: Sequence[Row], columns: pa.Schema) -> pa.Table:
    """Rows as an Arrow table."""
    arrays: list[Any] = [_column([row[field.name] for row in rows], field) for field in columns]
    return pa.Table.from_arrays(arrays, schema=columns)


def tables_of(rows: Iterable[Row], columns: pa.Schema) -> pa.Table:
    """Rows as one Arrow table, built in groups so that few rows are Python objects at a time."""
    tables = [table_of(group, columns) for group in _groups(rows)]
    return pa.concat_tables(tables) if tables else columns.empty_table()


def _groups(rows: Iterable[Row]) -> Iterator[list[Row]]:
    source = iter(rows)
    while group := list(islice(source, 1)):
        tokens = _tokens(group[0])
        while len(group) < _ROWS_PER_GROUP and tokens < _TOKENS_PER_GROUP:
            following = next(source, None)
            if following is None:
                break
            group.append(following)
            tokens += _tokens(following)
        yield group


def _tokens(row: Row) -> int:
    return sum(len(row[name]) for name in _LONG_COLUMNS if name in row)


def _column(values: list[Any], field: "pa.Field[Any]") -> Any:
    kind = field.type
    if pa.types.is_list(kind) and pa.types.is_primitive(kind.value_type):
        return _numbers(values, kind)
    if pa.types.is_map(kind):
        return pa.array([list(value.items()) for value in values], type=kind)
    return pa.array([_arrow(value) for value in values], type=kind)


def _numbers(values: list[Any], kind: Any) -> Any:
    """Arrays of numbers end to end with their offsets; NaN, which stands for "none given", as null."""
    absent = np.array([value is None for value in values], dtype=np.bool_)
    lengths = [0 if value is None else len(value) for value in values]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    parts = [np.asarray(value) for value in values if value is not None and len(value)]
    flat = np.concatenate(parts) if parts else np.empty(0, dtype=kind.value_type.to_pandas_dtype())
    missing = np.isnan(flat) if flat.dtype.kind == "f" else None
    elements = pa.array(flat, type=kind.value_type, mask=missing)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), elements, type=kind, mask=pa.array(absent))


def _arrow(value: object) -> object:
    if isinstance(value, Raw):
        return bytes(value).decode()
    if isinstance(value, dict):
        return {name: _arrow(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_arrow(item) for item in value]
    return value


def _rows(batch: pa.RecordBatch, columns: pa.Schema) -> Iterator[Row]:
    names = [field.name for field in columns]
    read = [_values(batch.column(field.name), field) for field in columns]
    for values in zip(*read, strict=True):
        yield dict(zip(names, values, strict=True))


def _values(column: "pa.Array[Any]", field: "pa.Field[Any]") -> Iterable[Any]:
    kind = field.type
    if pa.types.is_map(kind):
        return [dict(value or ()) for value in column.to_pylist()]
    if isinstance(column, pa.ListArray) and pa.types.is_primitive(kind.value_type):
        flat = column.values.to_numpy(zero_copy_only=False)
        offsets = column.offsets.to_numpy()
        present = column.is_valid().to_pylist()
        return [flat[offsets[at] : offsets[at + 1]] if given else None for at, given in enumerate(present)]
    return [_decoded(value, field) for value in column.to_pylist()]


def _decoded(value: Any, field: "pa.Field[Any]") -> Any:
    if value is None:
        return None
    if is_json(field):
        return json.loads(value)
    if pa.types.is_list(field.type):
        return [_decoded(item, field.type.value_field) for item in value]
    if pa.types.is_struct(field.type):
        return {inner.name: _decoded(value[inner.name], inner) for inner in field.type if inner.name in value}
    return value


@contextmanager
def _naming(path: str | Path) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise ExportError(f"{path} cannot be read: {error}") from None

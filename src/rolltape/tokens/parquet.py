"""Reads and writes token records as Parquet: one row per sequence, its per-token columns as lists.

The columns are those of `TokenRecord`, and two counts, so that a query need not read the lists.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rolltape.errors import DamagedTapeError
from rolltape.extras import arrow_errors, list_rows, pa, pq
from rolltape.records.token_record import FACT_COLUMNS, TOKEN_COLUMNS, TOKEN_SCHEMA, Shape, TokenColumn, TokenRecord
from rolltape.tape.rundir import make_private_file
from rolltape.tokens.sequences import Sequences

SCHEMA_KEY = b"rolltape.schema"


def _arrow_type(column: TokenColumn) -> pa.DataType:
    value: Any = pa.string() if column.dtype is str else pa.from_numpy_dtype(np.dtype(column.dtype))
    if column.shape is Shape.PER_TOKEN:
        return pa.list_(pa.field("element", value, nullable=False))
    return pa.list_(value) if column.shape is Shape.LIST else value


_COUNTS = {name: TokenColumn(name, np.int32, Shape.SCALAR, optional=False) for name in ("tokens", "trained_tokens")}
SCHEMA = pa.schema(
    [
        pa.field(name, _arrow_type(column))
        for columns in (FACT_COLUMNS, _COUNTS, TOKEN_COLUMNS)
        for name, column in columns.items()
    ],
    metadata={SCHEMA_KEY: TOKEN_SCHEMA.encode()},
)

# Measured on eighteen columns: 26 bytes per token. Splitting a float's bytes groups the exponents, which compress well.
# Dictionaries of values that hardly ever repeat cost more than they save.
_ENCODINGS = {
    f"{name}.list.element": "DELTA_BINARY_PACKED" if name == "position_ids" else "BYTE_STREAM_SPLIT"
    for name, column in TOKEN_COLUMNS.items()
    if name != "ids" and column.dtype is not np.bool_
}
_SCALARS = [name for name, column in (FACT_COLUMNS | _COUNTS).items() if column.shape is Shape.SCALAR]
_TEXTS: Any = [name for name in _SCALARS if SCHEMA.field(name).type == pa.string()]
_ZSTD_LEVEL = 1


def write_parquet(path: Path, step: int, rank: int, first: int, held: Sequence[Sequences]) -> None:
    """Write sequences of one step and rank as one row group; the first of them is number `first` of the rank."""
    batches = []
    for sequences in held:
        batches.append(_record_batch(step, rank, first, sequences))
        first += len(sequences)
    table = pa.Table.from_batches(batches, SCHEMA)
    make_private_file(path)
    with (
        pa.OSFile(str(path), "wb") as sink,
        pq.ParquetWriter(
            sink,
            SCHEMA,
            compression="zstd",
            compression_level=_ZSTD_LEVEL,
            use_dictionary=_TEXTS,
            column_encoding=_ENCODINGS,
            write_statistics=_SCALARS,
        ) as writer,
    ):
        writer.write_table(table, row_group_size=max(len(table), 1))


def read_parquet(path: Path, columns: Collection[str] | None = None) -> Iterator[TokenRecord]:
    """Read the records of a file; `columns` limits which of the optional per-token columns are read."""
    try:
        with pq.ParquetFile(path) as file:
            found = (file.schema_arrow.metadata or {}).get(SCHEMA_KEY, b"none").decode()
            if found != TOKEN_SCHEMA:
                raise DamagedTapeError(
                    f"{path}: schema is {found!r}, but this version reads {TOKEN_SCHEMA!r}; "
                    "read it with the version that wrote it"
                )
            wanted = [name for name in file.schema_arrow.names if _is_wanted(name, columns)]
            for batch in file.iter_batches(batch_size=64, columns=wanted):
                yield from _records(batch)
    except arrow_errors(OSError) as error:
        raise DamagedTapeError(f"{path}: cannot be read: {error}") from None


def read_column(path: Path, name: str) -> list[Any]:
    """One fact of every record of a file."""
    try:
        found: list[Any] = pq.read_table(path, columns=[name]).column(name).to_pylist()
    except arrow_errors(OSError) as error:
        raise DamagedTapeError(f"{path}: cannot be read: {error}") from None
    return found


def _is_wanted(name: str, columns: Collection[str] | None) -> bool:
    if name in TOKEN_COLUMNS:
        return columns is None or name in columns or not TOKEN_COLUMNS[name].optional
    return name in FACT_COLUMNS


def _record_batch(step: int, rank: int, first: int, sequences: Sequences) -> pa.RecordBatch:
    count = len(sequences)
    bounds = np.concatenate([[0], sequences.lengths.cumsum()])
    trained = np.concatenate([[0], sequences.columns["trained_mask"].cumsum()])[bounds]
    facts: Mapping[str, Any] = {
        **sequences.facts,
        "step": np.full(count, step),
        "rank": np.full(count, rank, np.int32),
        "sequence": np.arange(first, first + count, dtype=np.int32),
        "tokens": sequences.lengths.astype(np.int32),
        "trained_tokens": np.diff(trained).astype(np.int32),
    }
    offsets: Any = pa.array(bounds.astype(np.int32))
    arrays: list[Any] = []
    for field in SCHEMA:
        if field.name in facts:
            arrays.append(pa.array(facts[field.name], field.type))
        elif field.name in sequences.columns:
            values: Any = pa.array(sequences.columns[field.name])
            arrays.append(pa.ListArray.from_arrays(offsets, values, type=field.type))
        else:
            arrays.append(pa.nulls(count, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _records(batch: pa.RecordBatch) -> Iterator[TokenRecord]:
    fields: dict[str, list[Any]] = {
        name: list_rows(batch.column(name)) if name in TOKEN_COLUMNS else batch.column(name).to_pylist()
        for name in batch.schema.names
    }
    fields["versions"] = [tuple(versions or ()) for versions in fields["versions"]]
    for place in range(batch.num_rows):
        yield TokenRecord(**{name: values[place] for name, values in fields.items()})

"""Token records ↔ Parquet: one row per sequence, its columns as lists of numbers."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rolltape.errors import DamagedTapeError
from rolltape.records.token_record import (
    FLAG_COLUMNS,
    ID_COLUMNS,
    NEEDED_COLUMNS,
    TOKEN_COLUMNS,
    TOKEN_SCHEMA,
    TokenRecord,
)
from rolltape.tokens.sequences import Sequences

SCHEMA_KEY = b"rolltape.schema"

_TEXT, _COUNT = pa.string(), pa.int32()
_FACTS: dict[str, Any] = {
    "step": pa.int64(),
    "rank": _COUNT,
    "micro_step": _COUNT,
    "micro_sequence": _COUNT,
    "sequence": _COUNT,
    "sample": _TEXT,
    "rollout": _TEXT,
    "group": _TEXT,
    "env": _TEXT,
    "versions": pa.list_(_TEXT),
    "reward": pa.float64(),
    "loss": _TEXT,
    "tokens": _COUNT,
    "trained_tokens": _COUNT,
}
_COUNTED = ("tokens", "trained_tokens")  # follow from the columns, and save a query from reading them


def _list_type(column: str) -> pa.DataType:
    number: pa.DataType = pa.bool_() if column in FLAG_COLUMNS else pa.float32()
    number = _COUNT if column in ID_COLUMNS else number
    return pa.list_(pa.field("element", number, nullable=False))


COLUMNS = pa.schema(
    [*(pa.field(name, kind) for name, kind in _FACTS.items()), *(pa.field(c, _list_type(c)) for c in TOKEN_COLUMNS)],
    metadata={SCHEMA_KEY: TOKEN_SCHEMA.encode()},
)

# Measured on eighteen columns: 26 bytes a token. Splitting a float's bytes lets the compressor see its exponent, and
# dictionaries of values that hardly ever repeat cost more than they save.
_ENCODINGS = {
    f"{name}.list.element": "DELTA_BINARY_PACKED" if name == "position_ids" else "BYTE_STREAM_SPLIT"
    for name in TOKEN_COLUMNS
    if name != "ids" and name not in FLAG_COLUMNS
}
_REPEATED: Any = [name for name, kind in _FACTS.items() if kind == _TEXT]
_ZSTD_LEVEL = 1


def write_parquet(path: Path, step: int, rank: int, first: int, held: Sequence[Sequences]) -> None:
    """Write the records of a step and rank, the first of which is its `first`; as one row group."""
    table = _table(step, rank, first, held)
    with (
        pa.OSFile(str(path), "wb") as sink,
        pq.ParquetWriter(
            sink,
            COLUMNS,
            compression="zstd",
            compression_level=_ZSTD_LEVEL,
            use_dictionary=_REPEATED,
            column_encoding=_ENCODINGS,
            write_statistics=[name for name in _FACTS if name != "versions"],
        ) as writer,
    ):
        writer.write_table(table, row_group_size=max(len(table), 1))


def read_parquet(path: Path, columns: Collection[str] | None = None) -> Iterator[TokenRecord]:
    """The records of a file; with `columns`, of the optional ones only those."""
    try:
        with pq.ParquetFile(path) as file:
            found = (file.schema_arrow.metadata or {}).get(SCHEMA_KEY, b"none").decode()
            if found != TOKEN_SCHEMA:
                raise DamagedTapeError(f"{path}: schema is {found!r}; this reads {TOKEN_SCHEMA!r}")
            wanted = [name for name in file.schema_arrow.names if _is_wanted(name, columns)]
            for batch in file.iter_batches(batch_size=64, columns=wanted):
                yield from _records(batch)
    except (OSError, pa.ArrowException) as error:
        raise DamagedTapeError(f"{path}: cannot be read: {error}") from None


def _is_wanted(name: str, columns: Collection[str] | None) -> bool:
    if name in _COUNTED or (name not in _FACTS and name not in TOKEN_COLUMNS):
        return False
    needed = name in _FACTS or name in NEEDED_COLUMNS
    return needed or columns is None or name in columns


def _table(step: int, rank: int, first: int, held: Sequence[Sequences]) -> pa.Table:
    batches = []
    for sequences in held:
        facts = _facts(step, rank, first, sequences)
        arrays: list[Any] = [
            pa.array(facts[name], kind) if name in facts else pa.nulls(len(sequences), kind)
            for name, kind in _FACTS.items()
        ]
        offsets = pa.array(np.concatenate([[0], sequences.lengths.cumsum()]).astype(np.int32))
        arrays += [_lists(name, sequences, offsets) for name in TOKEN_COLUMNS]
        batches.append(pa.RecordBatch.from_arrays(arrays, schema=COLUMNS))
        first += len(sequences)
    return pa.Table.from_batches(batches, COLUMNS)


def _facts(step: int, rank: int, first: int, sequences: Sequences) -> Mapping[str, Any]:
    count = len(sequences)
    bounds = np.concatenate([[0], sequences.lengths.cumsum()])
    trained = np.concatenate([[0], sequences.columns["trained_mask"].cumsum()])[bounds]
    return {
        **sequences.facts,
        "step": np.full(count, step),
        "rank": np.full(count, rank, np.int32),
        "sequence": np.arange(first, first + count, dtype=np.int32),
        "tokens": sequences.lengths.astype(np.int32),
        "trained_tokens": np.diff(trained).astype(np.int32),
    }


def _lists(name: str, sequences: Sequences, offsets: Any) -> Any:
    kind = COLUMNS.field(name).type
    values = sequences.columns.get(name)
    if values is None:
        return pa.nulls(len(sequences), kind)
    return pa.ListArray.from_arrays(offsets, pa.array(values), type=kind)


def _records(batch: pa.RecordBatch) -> Iterator[TokenRecord]:
    facts = [name for name in batch.schema.names if name in _FACTS]
    columns = [name for name in batch.schema.names if name not in _FACTS]
    told = [batch.column(name).to_pylist() for name in facts]
    numbers = [_arrays(batch.column(name)) for name in columns]
    for place in range(batch.num_rows):
        fields: dict[str, Any] = {name: values[place] for name, values in zip(facts, told, strict=True)}
        fields["versions"] = tuple(fields["versions"] or ())
        fields |= {name: values[place] for name, values in zip(columns, numbers, strict=True)}
        yield TokenRecord(**fields)


def _arrays(column: Any) -> list[Any]:
    flat = column.values.to_numpy(zero_copy_only=False)
    offsets = column.offsets.to_numpy()
    return [
        flat[offsets[at] : offsets[at + 1]] if there else None for at, there in enumerate(column.is_valid().to_pylist())
    ]

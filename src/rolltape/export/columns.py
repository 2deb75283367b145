"""Columns of exported records. A table of columns is declared once; rows, Arrow tables and files derive from it."""

import base64
import json
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from operator import attrgetter, itemgetter
from typing import IO, Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Raw

from rolltape.errors import ExportError, RolltapeError
from rolltape.extras import list_rows, number_lists, pa, pq
from rolltape.records.jsonable import decode_numbers, encode_json, encode_numbers
from rolltape.records.turn import Logprobs

# By column: text, numbers, numpy arrays, lists, dicts, and free-form JSON as Raw. A row from a file has decoded
# free-form JSON, and lists in place of arrays if the file was JSON.
Row = dict[str, Any]
R = TypeVar("R", bound=msgspec.Struct)

ROWS_PER_GROUP = 1024
_TOKENS_PER_GROUP = 4_000_000
_LONG_COLUMNS = ("ids", "new_prompt_ids", "sampled_ids")


def _same(value: Any) -> Any:
    return value


class Kind(NamedTuple):
    """The type of a column's values. None is None in a record, in a row and in a file; the functions never get it."""

    arrow: Callable[[], Any]  # returns its Arrow type, which is made on demand
    write: Callable[[Any], Any] = _same  # a record's value → what a row holds
    read: Callable[[Any], Any] = _same  # what a row from a file holds → a record's value
    parse: Callable[[Any], Any] = _same  # Arrow's Python objects → what a row holds

    def __call__(self, name: str, source: str | Callable[[Any], Any] | None = None) -> "Column":
        """A column of this kind. Its value is at a path of attributes, by default its name, or from a function."""
        return Column(name, self, source if callable(source) else attrgetter(source or name))


class Column(NamedTuple):
    """A column of a table, and where its value is in a record."""

    name: str
    kind: Kind
    get: Callable[[Any], Any]


class Table:
    """The columns of one kind of record."""

    def __init__(self, *columns: Column) -> None:
        self.columns = columns
        self._writers = [(name, get, None if kind.write is _same else kind.write) for name, kind, get in columns]

    @cached_property
    def schema(self) -> "pa.Schema":
        return pa.schema([pa.field(one.name, one.kind.arrow()) for one in self.columns])

    def row(self, record: Any) -> Row:
        row = {}
        for name, get, write in self._writers:
            value = get(record)
            try:
                row[name] = value if write is None or value is None else write(value)
            except RolltapeError as error:
                key = self.columns[0]
                raise ExportError(f"{key.name} {key.get(record)}, column {name}: {error}") from None
        return row

    def values(self, row: Row) -> dict[str, Any]:
        """A row's values by column, for the columns that the file has; the inverse of `row`."""
        return {
            name: None if row[name] is None else kind.read(row[name]) for name, kind, _ in self.columns if name in row
        }

    def arrow(self, rows: Iterable[Row]) -> "pa.Table":
        tables = list(self._arrow_groups(rows))
        return pa.concat_tables(tables) if tables else self.schema.empty_table()

    def write_parquet(self, rows: Iterable[Row], stream: IO[bytes], metadata: dict[bytes, bytes]) -> int:
        """Write rows as Parquet, in groups as they come. Return how many were written."""
        schema = self.schema.with_metadata(metadata)
        # Logprobs hardly ever repeat. Splitting a double's bytes groups the exponents, which compress well.
        split = ["logprobs.list.element"] if "logprobs" in schema.names else []
        dictionary: Any = [field.name for field in schema if not pa.types.is_nested(field.type)]
        written = 0
        with pq.ParquetWriter(
            stream, schema, compression="zstd", use_dictionary=dictionary, use_byte_stream_split=split
        ) as writer:
            for group in self._arrow_groups(rows):
                writer.write_table(group)
                written += len(group)
        return written

    def _arrow_groups(self, rows: Iterable[Row]) -> Iterator["pa.Table"]:
        """Rows as Arrow tables of some rows each, so that only few rows are Python objects at a time."""
        for group in _groups(rows):
            arrays: list[Any] = [
                _arrow_array([row[name] for row in group], kind.arrow()) for name, kind, _ in self.columns
            ]
            yield pa.Table.from_arrays(arrays, schema=self.schema)

    def rows(self, batch: "pa.RecordBatch") -> Iterator[Row]:
        """The rows of Arrow columns, for the columns that the file has, with numbers per token as arrays."""
        held = [one for one in self.columns if one.name in batch.schema.names]
        names = [one.name for one in held]
        read = [_row_cells(batch.column(one.name), one.kind) for one in held]
        for cells in zip(*read, strict=True):
            yield dict(zip(names, cells, strict=True))


def _groups(rows: Iterable[Row]) -> Iterator[list[Row]]:
    group: list[Row] = []
    tokens = 0
    for row in rows:
        group.append(row)
        tokens += sum(len(row[name]) for name in _LONG_COLUMNS if name in row)
        if len(group) == ROWS_PER_GROUP or tokens >= _TOKENS_PER_GROUP:
            yield group
            group, tokens = [], 0
    if group:
        yield group


def built(kind: type[R], values: dict[str, Any], **renamed: Any) -> R:
    """Make a record from values by column. A field that the file does not have gets its default."""
    named = {name: values[name] for name in kind.__struct_fields__ if name in values}
    return msgspec.convert({**named, **renamed}, kind)


def _arrow_array(cells: list[Any], kind: Any) -> Any:
    if pa.types.is_list(kind) and pa.types.is_primitive(kind.value_type):
        return number_lists(cells, kind, nan_is_null=True)
    if pa.types.is_map(kind):
        return pa.array([list(cell.items()) for cell in cells], type=kind)
    return pa.array([_arrow_cell(cell) for cell in cells], type=kind)


def _arrow_cell(cell: Any) -> Any:
    if isinstance(cell, Raw):
        return bytes(cell).decode()
    if isinstance(cell, dict):
        return {name: _arrow_cell(item) for name, item in cell.items()}
    return [_arrow_cell(item) for item in cell] if isinstance(cell, list) else cell


def _row_cells(held: Any, kind: Kind) -> Iterable[Any]:
    if pa.types.is_list(held.type) and pa.types.is_primitive(held.type.value_type):
        return list_rows(held)
    return [None if cell is None else kind.parse(cell) for cell in held.to_pylist()]


def plain_json(value: object) -> Any:
    """A decoded JSON value with its non-finite numbers restored."""
    return decode_numbers(encode_json(value, "value")[0]) if isinstance(value, dict | list) else value


def _read_number(cell: Any) -> float:
    return float(plain_json(cell))


def _read_logprobs(cells: Any) -> npt.NDArray[np.float64]:
    if isinstance(cells, list):
        cells = [np.nan if cell is None else _read_number(cell) for cell in cells]
    return np.asarray(cells, dtype=np.float64)


TEXT, TEXTS = Kind(lambda: pa.string()), Kind(lambda: pa.list_(pa.string()))
FLAG, INT, COUNT = Kind(lambda: pa.bool_()), Kind(lambda: pa.int64()), Kind(lambda: pa.int32())
NUMBER = Kind(lambda: pa.float64(), read=_read_number)
NUMBERS_BY_NAME = Kind(
    lambda: pa.map_(pa.string(), pa.float64()),
    read=lambda cell: {name: _read_number(number) for name, number in cell.items()},
    parse=dict,
)
IDS = Kind(lambda: pa.list_(pa.int32()), write=np.asarray, read=lambda cells: np.asarray(cells, np.int32))
MASK = Kind(lambda: pa.list_(pa.bool_()), read=lambda cells: np.asarray(cells, np.bool_))
LOGPROBS = Kind(lambda: pa.list_(pa.float64()), read=_read_logprobs)
BYTES = Kind(lambda: pa.binary(), read=lambda cell: base64.b64decode(cell) if isinstance(cell, str) else cell)
SIZES = Kind(lambda: pa.list_(pa.int64()), read=list)
JSON = Kind(
    lambda: pa.string(), write=lambda value: Raw(encode_numbers(value, "value")), read=plain_json, parse=json.loads
)
# JSON that a record holds as bytes.
ENCODED_JSON = Kind(lambda: pa.string(), write=Raw, parse=json.loads)


def records(make: Callable[[dict[str, Any]], Any], *columns: Column) -> Kind:
    """A list of records with these columns. `make` builds a record from its values."""
    table = Table(*columns)
    parsers = {one.name: one.kind.parse for one in columns}

    def parse(cells: list[dict[str, Any]]) -> list[Row]:
        return [
            {name: None if cell is None else parsers.get(name, _same)(cell) for name, cell in row.items()}
            for row in cells
        ]

    return Kind(
        lambda: pa.list_(pa.struct(list(table.schema))),
        write=lambda items: [table.row(item) for item in items],
        read=lambda rows: tuple(make(table.values(row)) for row in rows),
        parse=parse,
    )


def lists_of(kind: Kind) -> Kind:
    """A list of values of another kind."""
    return Kind(
        lambda: pa.list_(kind.arrow()),
        write=lambda values: [kind.write(value) for value in values],
        read=lambda cells: [kind.read(cell) for cell in cells],
        parse=lambda cells: [kind.parse(cell) for cell in cells],
    )


def array_columns(values: Callable[[Any], npt.NDArray[Any]]) -> tuple[Column, ...]:
    """The columns that hold any numpy array bit for bit: its type, its shape, and its bytes in row order."""
    return (
        TEXT("dtype", lambda record: values(record).dtype.name),
        SIZES("shape", lambda record: list(values(record).shape)),
        BYTES("data", lambda record: _array_bytes(values(record))),
    )


def array_of(values: dict[str, Any]) -> npt.NDArray[Any]:
    """The array that `array_columns` wrote."""
    dtype = np.dtype(values["dtype"])
    return np.frombuffer(values["data"], dtype.newbyteorder("<")).astype(dtype).reshape(values["shape"])


def _array_bytes(values: npt.NDArray[Any]) -> bytes:
    if values.dtype.itemsize > 8:
        raise ExportError(f"its dtype is {values.dtype}, which other machines cannot read")
    return np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<"), copy=False).tobytes()


def logprob_columns() -> tuple[Column, ...]:
    """Logprobs of any width as doubles, and their original type."""
    dtype = TEXT("logprob_dtype", lambda of: None if of.logprobs is None else of.logprobs.dtype.name)
    return LOGPROBS("logprobs"), dtype


def logprobs_of(values: dict[str, Any]) -> Logprobs | None:
    """The logprobs that `logprob_columns` wrote."""
    wide: Logprobs | None = values["logprobs"]
    return wide.astype(np.float32) if wide is not None and values["logprob_dtype"] == "float32" else wide


def side_arrays(name: str, *columns: Column, source: str = "side") -> Column:
    """Side arrays by name: a list with the columns of any array, and the given further ones."""
    own = (*array_columns(attrgetter("values")), IDS("counts"), *columns)
    kind = records(dict, TEXT("name", itemgetter(0)), *map(_of_named, own))
    return kind._replace(write=lambda sides: kind.write(sides.items()))(name, source)


def _of_named(column: Column) -> Column:
    """A column of (name, record) pairs that reads the record."""
    return column._replace(get=lambda named: column.get(named[1]))


def pair_columns(first: str, second: str, kind: Kind, source: str | None = None) -> tuple[Column, Column]:
    """Two columns for the two values of a pair: the record itself, or its value at a path of attributes."""
    pair = attrgetter(source) if source else _same
    return kind(first, lambda record: pair(record)[0]), kind(second, lambda record: pair(record)[1])


def pairs(first: str, second: str, kind: Kind) -> Kind:
    """A list of pairs."""
    return records(lambda values: (values[first], values[second]), *pair_columns(first, second, kind))

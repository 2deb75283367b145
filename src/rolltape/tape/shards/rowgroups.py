"""A shard's Parquet file, read by row groups."""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from rolltape.extras import pa, pq
from rolltape.tape.rundir import Place

_GROUPS_HELD = 8
_ROWS_AT_ONCE = 4096


class RowFile:
    """One file. It keeps the row groups that were read last."""

    def __init__(self, place: Place, shard: str, name: str) -> None:
        self._handle = place.open("rb", "shards", shard, name)
        # Arrow's threads are not used, here and below: one of them that still holds a Python file when the interpreter
        # ends aborts the process (pyarrow 26).
        self._file = pq.ParquetFile(self._handle, page_checksum_verification=True, pre_buffer=False)
        metadata = self._file.metadata
        rows = (metadata.row_group(index).num_rows for index in range(metadata.num_row_groups))
        self._starts = [0, *accumulate(rows)]
        self._held: dict[int, RowGroup] = {}

    @property
    def rows(self) -> int:
        return self._starts[-1]

    @property
    def columns(self) -> list[str]:
        return list(self._file.schema_arrow.names)

    def each(self, columns: list[str]) -> Iterator[dict[str, Any]]:
        """Some columns of all rows, in their order."""
        for batch in self._file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=columns, use_threads=False):
            yield from batch.to_pylist()

    def place_of(self, row: int) -> tuple["RowGroup", int]:
        """The row group that holds a row, and the row's number in it."""
        index = bisect_right(self._starts, row) - 1
        if index not in self._held:
            if len(self._held) >= _GROUPS_HELD:
                del self._held[next(iter(self._held))]
            self._held[index] = RowGroup(self._file.read_row_group(index, use_threads=False))
        return self._held[index], row - self._starts[index]

    def close(self) -> None:
        self._file.close()
        self._handle.close()


class RowGroup:
    """A row group. Plain values are made for the whole group at first use; arrays are copied one by one."""

    def __init__(self, table: "pa.Table") -> None:
        self._table = table
        self._values: dict[str, list[Any]] = {}
        self._arrays: dict[str, tuple[Any, Any, Any]] = {}

    def value(self, column: str, index: int) -> Any:
        if column not in self._values:
            self._values[column] = self._table.column(column).to_pylist()
        return self._values[column][index]

    def array(self, column: str, index: int) -> Any:
        """One row of a column of number lists, or None if it is absent."""
        if column not in self._arrays:
            chunk: Any = self._table.column(column).combine_chunks()
            chunk = chunk.chunk(0) if isinstance(chunk, pa.ChunkedArray) else chunk
            numbers = chunk.values.to_numpy(zero_copy_only=False)
            self._arrays[column] = (numbers, chunk.offsets.to_numpy(), chunk.is_valid().to_numpy(zero_copy_only=False))
        numbers, offsets, valid = self._arrays[column]
        if not valid[index]:
            return None
        # A copy: a turn must not keep the whole row group in memory.
        own = numbers[offsets[index] : offsets[index + 1]].copy()
        own.setflags(write=False)
        return own

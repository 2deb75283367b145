"""Optional packages: imported on first use, with an error that names the extra to install.

Recording, serving and viewing do not need them. Parquet files and shards need pyarrow; `rolltape query` needs DuckDB.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from rolltape.errors import MissingExtra

__all__ = ["arrow_errors", "duckdb", "import_extra", "list_rows", "number_lists", "pa", "pq"]

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa
    import pyarrow.parquet as pq


def import_extra(
    name: str, extra: str, *, what: str = "this", missing: type[MissingExtra] = MissingExtra
) -> ModuleType:
    """Import a module, or raise `missing` with the message that `what` needs its package."""
    package = name.partition(".")[0]
    try:
        return import_module(name)
    except ImportError as error:
        is_there = error.name is None or error.name.partition(".")[0] != package
        problem = f"cannot be imported ({error})" if is_there else "is not installed"
        raise missing(f"{what} needs {package}, which {problem}; pip install 'rolltape[{extra}]'") from None


class _LazyModule:
    """Stands for a module, and imports it when an attribute is read."""

    def __init__(self, name: str, extra: str) -> None:
        self._name, self._extra = name, extra

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_extra(self._name, self._extra), attribute)


if not TYPE_CHECKING:
    duckdb = _LazyModule("duckdb", "query")
    pa = _LazyModule("pyarrow", "parquet")
    pq = _LazyModule("pyarrow.parquet", "parquet")


def number_lists(rows: Sequence[Any], kind: Any, *, nan_is_null: bool = False) -> Any:
    """Lists of numbers, or None for a row, as an Arrow column. They are joined without visiting each number."""
    # Arrow's own function for the numpy type of an Arrow type needs pandas in older versions (20).
    dtype = pa.array([], kind.value_type).to_numpy(zero_copy_only=False).dtype
    lengths = [0 if row is None else len(row) for row in rows]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    flat = np.concatenate([np.empty(0, dtype), *(np.asarray(row, dtype) for row in rows if row is not None)])
    missing = np.isnan(flat) if nan_is_null and dtype.kind == "f" else None
    absent = np.array([row is None for row in rows], np.bool_)
    numbers = pa.array(flat, kind.value_type, mask=missing)
    of_arrays: Any = pa.ListArray.from_arrays
    return of_arrays(pa.array(offsets), numbers, type=kind, mask=pa.array(absent) if absent.any() else None)


def list_rows(column: Any) -> list[Any]:
    """The rows of an Arrow column of number lists, as arrays that share its memory, or None."""
    flat, offsets = column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy()
    there = column.is_valid().to_pylist()
    return [flat[offsets[at] : offsets[at + 1]] if given else None for at, given in enumerate(there)]


def arrow_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """Error types to catch: `others`, and pyarrow's base class once pyarrow is imported."""
    return (*others, pa.ArrowException) if "pyarrow" in sys.modules else others

"""Packages that an extra brings: imported when they are first used, with an error that names the extra.

Recording, serving and viewing do without them. Parquet files and shards need pyarrow, `rolltape query` DuckDB.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from rolltape.errors import MissingExtra

__all__ = ["arrow_errors", "duckdb", "import_extra", "numpy_dtype", "pa", "pq"]

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa
    import pyarrow.parquet as pq


def import_extra(name: str, extra: str) -> ModuleType:
    """Import a module, or raise MissingExtra."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != name.partition(".")[0]:
            raise
        package = name.partition(".")[0]
        raise MissingExtra(f"this needs {package}, which is not installed; pip install 'rolltape[{extra}]'") from None


class _LazyModule:
    """Stands for a module until an attribute of it is asked for."""

    def __init__(self, name: str, extra: str) -> None:
        self._name, self._extra = name, extra

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_extra(self._name, self._extra), attribute)


if not TYPE_CHECKING:
    duckdb = _LazyModule("duckdb", "query")
    pa = _LazyModule("pyarrow", "parquet")
    pq = _LazyModule("pyarrow.parquet", "parquet")


def numpy_dtype(kind: Any) -> np.dtype[Any]:
    """The numpy type of an Arrow type of numbers. Arrow's own function asks for pandas in older versions (20)."""
    dtype: np.dtype[Any] = pa.array([], kind).to_numpy(zero_copy_only=False).dtype
    return dtype


def arrow_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """What pyarrow raises, which is nothing as long as it has not been imported, and other errors beside."""
    return (*others, pa.ArrowException) if "pyarrow" in sys.modules else others

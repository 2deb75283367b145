"""Optional packages: imported on first use, with an error that names the extra to install.

Recording, serving and viewing do not need them. Parquet files and shards need pyarrow; `rolltape query` needs DuckDB.
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


def numpy_dtype(kind: Any) -> np.dtype[Any]:
    """The numpy type of a numeric Arrow type. Arrow's own function needs pandas in older versions (20)."""
    dtype: np.dtype[Any] = pa.array([], kind).to_numpy(zero_copy_only=False).dtype
    return dtype


def arrow_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """Error types to catch: `others`, and pyarrow's base class once pyarrow is imported."""
    return (*others, pa.ArrowException) if "pyarrow" in sys.modules else others

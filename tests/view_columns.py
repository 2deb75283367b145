"""The columns of a packed answer, as the page reads them."""

from typing import Any

import msgspec
import numpy as np


def unpacked(packed: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    size = int.from_bytes(packed[:8], "little")
    header = msgspec.json.decode(packed[8 : 8 + size])
    assert (8 + size) % 8 == 0
    columns = {}
    for column in header["columns"]:
        assert column["offset"] % 8 == 0
        kind = np.dtype(f"<{column['dtype']}")
        columns[column["name"]] = np.frombuffer(packed, kind, column["length"], 8 + size + column["offset"])
    return header, columns

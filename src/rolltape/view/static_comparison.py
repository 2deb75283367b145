"""Write the comparison of two runs as a page that needs no server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rolltape.errors import ExportError
from rolltape.view.answers import MOST_ROWS, encode_answer
from rolltape.view.compare.comparisons import comparing
from rolltape.view.rollout.masking import Mask
from rolltape.view.static_page import SharedFiles, build_page

_FILE, _START = "compare.html", "/compare?a=a&b=b"


def write_comparison(folder: Path, a: str, b: str, *, mask: bool = True) -> tuple[Path, int]:
    """Write the comparison of all of two runs by each measure; the page, and how many keys were masked in it."""
    shared, masking = SharedFiles(), Mask() if mask else None
    blocks = [(path, _spelled(answer, masking)) for path, answer in _answers(a, b)]
    masked = 0 if masking is None else len(masking.masked)
    about = {"start": _START, "home": _START, "files": {"/compare": _FILE}, "masked": masked, "name": "comparison"}
    page = build_page(shared, [*blocks, ("/static", msgspec.json.encode(about).decode())])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shared.write(folder)
        (folder / _FILE).write_text(page, encoding="utf-8")
    except OSError as error:
        raise ExportError(f"{folder}: cannot be written: {error.strerror or error}") from error
    return folder / _FILE, masked


def _answers(a: str, b: str) -> Iterator[tuple[str, dict[str, Any]]]:
    with comparing(a, b, {"limit": str(MOST_ROWS)}) as answer:
        first = answer({})
        yield "/api/runs", {"runs": [{"r": side, "name": first[side]["name"]} for side in ("a", "b")]}
        for one in first["measures"]:
            yield f"/api/compare?measure={one['measure']}", answer({"measure": one["measure"]})


def _spelled(answer: dict[str, Any], mask: Mask | None) -> str:
    return encode_answer(answer if mask is None else mask.all(answer)).decode()

"""Files of other programs, and imports of them."""

import json
from pathlib import Path
from typing import Any

import rolltape
from rolltape.importers import ImportOptions, ImportReport, import_run

QUESTION = {"role": "user", "content": "2 + 2?"}
ANSWER = {"role": "assistant", "content": "4"}


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def imported(kind: str, path: Path, run: Path, *, skip_broken: bool = False, **options: Any) -> ImportReport:
    with rolltape.open(run) as tape:
        return import_run(kind, path, tape, options=ImportOptions(**options), skip_broken=skip_broken)

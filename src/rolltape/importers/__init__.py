"""Other programs' rollouts → a run: `rolltape import KIND PATH RUN`.

One module per kind of source, in `kinds/`. Its function `find(path, options)` yields the rollouts of a file or folder.
`recognize(path)` returns why a path looks like this kind, or None.

    with rolltape.open("runs/imported") as tape:
        report = import_run("slime", "rollout_data/", tape)
    print(report.imported, report.known)
"""

import os
from collections.abc import Callable
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Protocol

from rolltape.errors import ImportFileError
from rolltape.importers.imported import BrokenEntry, Found, ImportedRollout, ImportedSession, ImportOptions
from rolltape.importers.recording import ImportReport, record_imported, refuse_broken
from rolltape.tape.recording.tape import Tape

__all__ = [
    "KINDS",
    "BrokenEntry",
    "ImportOptions",
    "ImportReport",
    "ImportedRollout",
    "ImportedSession",
    "find_rollouts",
    "guess",
    "import_run",
    "record_imported",
]

# What each kind reads. `rolltape.importers.kinds.KIND` has the importer.
KINDS: dict[str, str] = {
    "areal": "AReaL's dumps of rollouts",
    "atif": "Harbor's trajectories",
    "inspect": "Inspect's logs",
    "messages": "chat messages: OpenAI fine-tuning, ShareGPT, TRL, a Hugging Face dataset",
    "otel": "OpenTelemetry spans as OTLP JSON, with the GenAI conventions",
    "prime-rl": "prime-rl's token exports",
    "slime": "slime's --save-debug-rollout-data files, and its samples as JSON lines",
    "tinker": "tinker-cookbook's capture databases and rollout summaries",
    "trl": "TRL's logged completions",
    "verifiers": "verifiers' traces and results",
    "verl": "verl's dumps of rollouts",
}


class Importer(Protocol):
    """The functions that the module of a kind defines."""

    def find(self, path: Path, options: ImportOptions) -> Found:
        """The rollouts of a file or folder, and the entries that cannot be read."""
        ...

    def recognize(self, path: Path) -> str | None:
        """Why a path looks like one of this kind, or None if it does not."""
        ...


def import_run(
    kind: str,
    path: str | os.PathLike[str],
    tape: Tape,
    *,
    options: ImportOptions | None = None,
    skip_broken: bool = False,
    progress: Callable[[ImportReport], None] = lambda report: None,
) -> ImportReport:
    """Record the rollouts of another program's file or folder. Rollouts that the run has are not recorded again.

    Example:

        with rolltape.open("runs/imported") as tape:
            report = import_run("slime", "rollout_data/0.pt", tape)
    """
    found = find_rollouts(kind, path, options)
    return record_imported(tape, kind, found, skip_broken=skip_broken, progress=progress)


def find_rollouts(
    kind: str, path: str | os.PathLike[str], options: ImportOptions | None = None, *, skip_broken: bool = True
) -> Found:
    """The rollouts of a file or folder, for `record_imported`. Raises if the source cannot be read at all, and without
    `skip_broken` also if its first entry is broken."""
    found = iter(_importer(kind).find(Path(path), options or ImportOptions()))
    first = next(found, None)
    if first is None:
        raise ImportFileError(f"{path}: it holds no rollouts of the kind {kind}")
    if not skip_broken:
        refuse_broken(first)
    return chain([first], found)


def guess(path: str | os.PathLike[str]) -> dict[str, str]:
    """The kinds that a path looks like, each with the reason."""
    place = Path(path)
    if not place.exists():
        raise ImportFileError(f"{place}: there is no such file; check the path")
    reasons = {kind: _importer(kind).recognize(place) for kind in KINDS}
    return {kind: reason for kind, reason in reasons.items() if reason is not None}


def _importer(kind: str) -> Importer:
    if kind not in KINDS:
        raise ImportFileError(f"{kind!r} is not a kind of source; known are {', '.join(sorted(KINDS))}")
    module: Importer = import_module(f"rolltape.importers.kinds.{kind.replace('-', '_')}")
    return module

"""A file of JSON lines as a tracker: one line per step, with its metrics, summary and traces."""

import json
import os
from pathlib import Path
from typing import Any, Unpack

import msgspec

from rolltape.errors import SinkError
from rolltape.records.jsonable import encode_numbers
from rolltape.tracking.sinks import Outbox, OutboxOptions
from rolltape.tracking.summary import ShownStep, step_metrics
from rolltape.tracking.traces import trace_page

STEP_SCHEMA = "rolltape.step/1"  # a field may be added; a change of meaning raises the version


def jsonl_sink(path: str | os.PathLike[str], **options: Unpack[OutboxOptions]) -> Outbox:
    """A sink that appends one JSON line per step to a file.

    Example:

        sink = rolltape.jsonl_sink("steps.jsonl", max_traces_per_step=4)
    """
    return Outbox(JsonlTracker(path), **options)


class JsonlTracker:
    """Appends a line per step, and flushes after each."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._held: set[tuple[str, int]] = set()
        try:
            if self._path.exists():
                self._held = _read_steps(self._path)
            self._file = self._path.open("ab")
        except OSError as error:
            raise SinkError(f"{self._path}: {error.strerror or error}; give a file that can be written") from None

    def holds(self, split: str, step: int) -> bool:
        return (split, step) in self._held

    def put(self, shown: ShownStep) -> None:
        line = encode_numbers(_line(shown), f"step {shown.step} of {shown.split}")
        self._file.write(line + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _line(shown: ShownStep) -> dict[str, Any]:
    return {
        "schema": STEP_SCHEMA,
        "split": shown.split,
        "step": shown.step,
        "metrics": step_metrics(shown),
        "summary": None if shown.summary is None else msgspec.to_builtins(shown.summary, str_keys=True),
        "traces": [trace.to_dict() for trace in shown.traces],
        **({} if shown.view_url is None else {"pages": [trace_page(shown, trace) for trace in shown.traces]}),
    }


def _read_steps(path: Path) -> set[tuple[str, int]]:
    """The steps whose summary is in the file. An incomplete last line counts as none, and is terminated."""
    held = set()
    with path.open("rb+") as file:
        last = b"\n"
        for last in file:
            if (step := _parse_step(last)) is not None:
                held.add(step)
        if not last.endswith(b"\n"):
            file.write(b"\n")
    return held


def _parse_step(line: bytes) -> tuple[str, int] | None:
    try:
        value = json.loads(line)
        return (str(value["split"]), int(value["step"])) if value["summary"] is not None else None
    except (ValueError, KeyError, TypeError):
        return None

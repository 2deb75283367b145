"""Records → files and tables in Rolltape's own formats; docs/reference/export.md describes the columns."""

import math
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Raw

from rolltape.errors import ExportError
from rolltape.export.columns import Row, Table
from rolltape.export.conversations import (
    CONVERSATION,
    Conversation,
    conversation_line,
    conversations_of,
    training_line,
)
from rolltape.export.schema import (
    LISTED_ROLLOUT,
    ROLLOUT,
    SAMPLE,
    ListedRollout,
    RowKind,
    rollout_row,
)
from rolltape.export.turns import MESSAGE, TURN, message_rows, turn_rows
from rolltape.extras import pa
from rolltape.records.jsonable import encode_numbers
from rolltape.records.rollout import Outcome, Rollout, RolloutHead
from rolltape.records.sample import Sample
from rolltape.records.trace import Trace
from rolltape.tape.rundir import is_in_run, open_private

Destination = str | os.PathLike[str]

TABLES: dict[RowKind, Table] = {
    RowKind.SAMPLE: SAMPLE,
    RowKind.ROLLOUT: ROLLOUT,
    RowKind.TURN: TURN,
    RowKind.MESSAGE: MESSAGE,
    RowKind.CONVERSATION: CONVERSATION,
}

# The key of a Parquet file's metadata that holds the RowKind.
SCHEMA_KEY = b"rolltape.schema"
_encode = msgspec.json.Encoder().encode


def samples_to_jsonl(samples: Iterable[Sample], out: Destination) -> int:
    """Write samples as JSON lines, and return how many were written.

    Example:

        rolltape.samples_to_jsonl(rolltape.linearize(rollout).samples(), "samples.jsonl")
    """
    return write_jsonl(map(SAMPLE.row, samples), RowKind.SAMPLE, out)


def samples_to_parquet(samples: Iterable[Sample], out: Destination) -> int:
    """Write samples as Parquet, and return how many were written.

    Example:

        run = rolltape.read("runs/exp1")
        samples = (sample for rollout in run.rollouts() for sample in rolltape.linearize(rollout).samples())
        rolltape.samples_to_parquet(samples, "samples.parquet")
    """
    return _write_parquet(map(SAMPLE.row, samples), RowKind.SAMPLE, out)


def rollouts_to_jsonl(rollouts: Iterable[Rollout], out: Destination) -> int:
    """Write rollouts without their turns as JSON lines, and return how many were written.

    Example:

        rolltape.rollouts_to_jsonl(run.rollouts(), "rollouts.jsonl")
    """
    return write_jsonl(map(rollout_row, rollouts), RowKind.ROLLOUT, out)


def rollouts_to_parquet(rollouts: Iterable[Rollout], out: Destination) -> int:
    """Write rollouts without their turns as Parquet, and return how many were written.

    Example:

        rolltape.rollouts_to_parquet(run.rollouts(), "rollouts.parquet")
    """
    return _write_parquet(map(rollout_row, rollouts), RowKind.ROLLOUT, out)


def turns_to_jsonl(rollouts: Iterable[Rollout], out: Destination, *, whole_prompts: bool = False) -> int:
    """Write the turns of rollouts as JSON lines, and return how many were written.

    Example:

        rolltape.turns_to_jsonl(run.rollouts(), "turns.jsonl")
    """
    return write_jsonl(_turn_rows(rollouts, whole_prompts), RowKind.TURN, out)


def turns_to_parquet(rollouts: Iterable[Rollout], out: Destination, *, whole_prompts: bool = False) -> int:
    """Write the turns of rollouts as Parquet, and return how many were written.

    Example:

        rolltape.turns_to_parquet(run.rollouts(), "turns.parquet")
    """
    return _write_parquet(_turn_rows(rollouts, whole_prompts), RowKind.TURN, out)


def traces_to_jsonl(traces: Iterable[Trace], out: Destination, *, whole_prompts: bool = False) -> int:
    """Write traces as JSON lines without absent fields, and return how many were written.

    Example:

        rolltape.traces_to_jsonl(map(rolltape.trace_of, run.rollouts()), "traces.jsonl")
    """
    rows = (_trace_row(trace, whole_prompts) for trace in traces)
    return write_jsonl(rows, RowKind.TRACE, out)


def conversations_to_jsonl(
    rollouts: Iterable[Rollout], out: Destination, *, bare: bool = False, left_out: list[str] | None = None
) -> int:
    """Write conversations in OpenAI's chat form as JSON lines, and return how many were written.

    A rollout has one for each reply that no later turn continues. Weight 1 marks the replies to train on. A
    conversation without such a reply is left out. The ids of rollouts without any conversation are appended to
    `left_out`. `bare` writes only messages and tools, as fine-tuning services accept them.

    Example:

        rolltape.export.conversations_to_jsonl(run.rollouts(), "conversations.jsonl")
    """
    found = _training_conversations(rollouts, left_out)
    if not bare:
        return write_jsonl(map(conversation_line, found), RowKind.CONVERSATION, out)
    written = 0
    with destination(out) as stream:
        for conversation in found:
            stream.write(training_line(conversation))
            written += 1
    return written


def conversations_to_parquet(
    rollouts: Iterable[Rollout], out: Destination, *, left_out: list[str] | None = None
) -> int:
    """Write conversations as Parquet, as `conversations_to_jsonl` writes lines, and return how many were written.

    Example:

        rolltape.export.conversations_to_parquet(run.rollouts(), "conversations.parquet")
    """
    found = _training_conversations(rollouts, left_out)
    return _write_parquet(map(CONVERSATION.row, found), RowKind.CONVERSATION, out)


def _training_conversations(rollouts: Iterable[Rollout], left_out: list[str] | None) -> Iterator[Conversation]:
    for rollout in rollouts:
        trains = False
        for conversation in conversations_of(rollout):
            if conversation.training:
                trains = True
                yield conversation
        if not trains and left_out is not None:
            left_out.append(rollout.id)


def rollouts_table(rollouts: Iterable[tuple[RolloutHead, Outcome, int, int, int]]) -> "pa.Table":
    """A row per rollout from its head, its outcome, and its numbers of sessions, turns and sampled tokens."""
    return LISTED_ROLLOUT.arrow(LISTED_ROLLOUT.row(ListedRollout(*rollout)) for rollout in rollouts)


def turns_table(rollouts: Iterable[Rollout]) -> "pa.Table":
    """A row per turn, with only its new ids and messages."""
    return TURN.arrow(_turn_rows(rollouts, whole_prompts=False))


def messages_table(rollouts: Iterable[Rollout]) -> "pa.Table":
    """A row per message, at the first turn that holds it."""
    return MESSAGE.arrow(row for rollout in rollouts for row in message_rows(rollout))


def samples_table(samples: Iterable[Sample]) -> "pa.Table":
    """A row per sample."""
    return SAMPLE.arrow(map(SAMPLE.row, samples))


def _turn_rows(rollouts: Iterable[Rollout], whole_prompts: bool) -> Iterator[Row]:
    return (row for rollout in rollouts for row in turn_rows(rollout, whole_prompts=whole_prompts))


def _trace_row(trace: Trace, whole_prompts: bool) -> Row:
    where = f"the trace of rollout {trace.rollout}"
    fields = trace.to_dict(whole_prompts=whole_prompts)
    return {name: Raw(encode_numbers(value, where)) for name, value in fields.items()}


def write_jsonl(rows: Iterable[Row], kind: RowKind, out: Destination) -> int:
    """Write rows as JSON lines as they come. Return the number written."""
    written = 0
    with destination(out) as stream:
        for row in rows:
            stream.write(json_line(row, kind))
            written += 1
    return written


def json_line(row: Row, kind: RowKind) -> bytes:
    """One row as a line of strict JSON, its newline included."""
    plain: dict[str, object] = {"schema": kind.value}
    for name, value in row.items():
        plain[name] = _jsonable(value)
    return _encode(plain) + b"\n"


def _jsonable(value: object) -> object:
    """What the encoder can write: arrays as lists, numbers that are not finite spelled out."""
    if isinstance(value, np.ndarray):
        return _number_list(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, dict):
        return {name: _jsonable(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_jsonable(item) for item in value]
    return value


def _number_list(array: npt.NDArray[Any]) -> list[object]:
    if array.dtype.kind == "b":
        values: list[object] = array.astype(np.int8).tolist()
        return values
    values = array.tolist()
    if array.dtype.kind == "f":
        for at in np.flatnonzero(~np.isfinite(array)):
            values[at] = None if np.isnan(array[at]) else {"$float": repr(values[at])}
    return values


def _write_parquet(rows: Iterable[Row], kind: RowKind, out: Destination) -> int:
    """Write rows as Parquet, in groups as they come. Return the number written."""
    with destination(out) as stream:
        return TABLES[kind].write_parquet(rows, stream, {SCHEMA_KEY: kind.value.encode()})


def local_path(out: Destination) -> Path:
    """The path of a file or folder to write; raises ExportError for a URL."""
    if "://" in os.fspath(out):
        raise ExportError(
            f"{os.fspath(out)}: a URL, and exports are written to this machine; name a file or folder and copy it, or "
            "push to the hub with --format datasets -o hf://datasets/OWNER/NAME"
        )
    return Path(out).resolve()


@contextmanager
def destination(out: Destination) -> Iterator[IO[bytes]]:
    """Open `out` for writing; `-` is standard output. A file is replaced at the end, or left as it was."""
    if os.fspath(out) == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    path = local_path(out)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        if path.exists() and not path.is_file():
            # A device or a pipe is written to, not replaced.
            with path.open("wb") as stream:
                yield stream
            return
        try:
            with open_private(partial) if is_in_run(path) else partial.open("wb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise ExportError(f"{os.fspath(out)} cannot be written: {error.strerror or error}") from None

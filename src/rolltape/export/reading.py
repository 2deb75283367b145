"""Files in Rolltape's own formats → records."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from rolltape.errors import ExportError, RolltapeError
from rolltape.export.columns import ROWS_PER_GROUP, Row, plain_json
from rolltape.export.files import SCHEMA_KEY, TABLES
from rolltape.export.schema import RowKind, rollout_of, sample_of
from rolltape.export.turns import turns_of
from rolltape.extras import arrow_errors, pq
from rolltape.records.rollout import Rollout
from rolltape.records.sample import Sample
from rolltape.records.trace import Trace
from rolltape.records.turn import Turn

T = TypeVar("T")


def read_samples(path: str | Path) -> Iterator[Sample]:
    """Read the samples of an exported file, `.parquet` or JSON lines.

    Example:

        samples = list(rolltape.read_samples("samples.parquet"))
    """
    return _read(path, RowKind.SAMPLE, lambda rows: map(sample_of, rows))


def read_turns(path: str | Path) -> Iterator[Turn]:
    """Read the turns of an exported file, `.parquet` or JSON lines.

    Example:

        turns = list(rolltape.read_turns("turns.parquet"))
    """
    return _read(path, RowKind.TURN, turns_of)


def read_rollouts(path: str | Path, turns: str | Path | None = None) -> Iterator[Rollout]:
    """Read the rollouts of an exported file, with their turns if the file of turns is given too.

    Example:

        rollouts = list(rolltape.read_rollouts("rollouts.jsonl", "turns.jsonl"))
    """
    by_session: dict[str, list[Turn]] = {}
    for turn in read_turns(turns) if turns is not None else ():
        by_session.setdefault(turn.session, []).append(turn)

    return _read(path, RowKind.ROLLOUT, lambda rows: (rollout_of(row, by_session) for row in rows))


def read_traces(path: str | Path) -> Iterator[Trace]:
    """Read the traces of an exported file of JSON lines.

    Example:

        traces = list(rolltape.read_traces("traces.jsonl"))
    """
    return _read(path, RowKind.TRACE, lambda rows: (msgspec.convert(plain_json(row), Trace) for row in rows))


def _read(path: str | Path, kind: RowKind, revive: Callable[[Iterator[Row]], Iterator[T]]) -> Iterator[T]:
    """The records of a file. Errors name the file and the row."""
    records = revive((_parquet_rows if Path(path).suffix == ".parquet" else _jsonl_rows)(path, kind))
    for number in range(1, 2**63):
        try:
            record = next(records)
        except StopIteration:
            return
        except RolltapeError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, msgspec.ValidationError) as error:
            raise ExportError(f"{path}, row {number}: not a {kind.value}: {error!r}") from None
        yield record


def _jsonl_rows(path: str | Path, kind: RowKind) -> Iterator[Row]:
    try:
        with Path(path).open("rb") as lines:
            for number, line in enumerate(lines, 1):
                where = f"{path}, line {number}"
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise ExportError(f"{where}: not JSON: {error}") from None
                _check_schema(row.get("schema") if isinstance(row, dict) else None, kind, where)
                yield row
    except OSError as error:
        raise ExportError(f"{path} cannot be read: {error.strerror or error}") from None


def _parquet_rows(path: str | Path, kind: RowKind) -> Iterator[Row]:
    try:
        with pq.ParquetFile(path) as file:
            _check_schema((file.schema_arrow.metadata or {}).get(SCHEMA_KEY, b"none").decode(), kind, str(path))
            for batch in file.iter_batches(batch_size=ROWS_PER_GROUP):
                yield from TABLES[kind].rows(batch)
    except arrow_errors(OSError) as error:
        raise ExportError(f"{path} cannot be read: {error}") from None


def _check_schema(found: object, kind: RowKind, where: str) -> None:
    if found != kind.value:
        raise ExportError(f"{where}: schema is {found!r}; this reads {kind.value!r}")

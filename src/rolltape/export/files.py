"""Records ↔ files in Rolltape's own formats; docs/export.md describes the columns."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rolltape.errors import ExportError, RolltapeError
from rolltape.export.destination import Destination
from rolltape.export.jsonl import read_jsonl, write_jsonl
from rolltape.export.parquet import read_parquet, write_parquet
from rolltape.export.revive import rollout_of, sample_of, trace_of, turns_of
from rolltape.export.rows import Row, rollout_row, sample_row, trace_row, turn_rows
from rolltape.export.schema import RowKind
from rolltape.records.rollout import Rollout
from rolltape.records.sample import Sample
from rolltape.records.trace import Trace
from rolltape.records.turn import Turn

T = TypeVar("T")


def samples_to_jsonl(samples: Iterable[Sample], out: Destination) -> int:
    """Write samples as JSON lines; the number written."""
    return write_jsonl(map(sample_row, samples), RowKind.SAMPLE, out)


def samples_to_parquet(samples: Iterable[Sample], out: Destination) -> int:
    """Write samples as Parquet; the number written."""
    return write_parquet(map(sample_row, samples), RowKind.SAMPLE, out)


def rollouts_to_jsonl(rollouts: Iterable[Rollout], out: Destination) -> int:
    """Write rollouts without their turns as JSON lines; the number written."""
    return write_jsonl(map(rollout_row, rollouts), RowKind.ROLLOUT, out)


def rollouts_to_parquet(rollouts: Iterable[Rollout], out: Destination) -> int:
    """Write rollouts without their turns as Parquet; the number written."""
    return write_parquet(map(rollout_row, rollouts), RowKind.ROLLOUT, out)


def turns_to_jsonl(rollouts: Iterable[Rollout], out: Destination, *, whole_prompts: bool = False) -> int:
    """Write the turns of rollouts as JSON lines; the number written."""
    return write_jsonl(_turn_rows(rollouts, whole_prompts), RowKind.TURN, out)


def turns_to_parquet(rollouts: Iterable[Rollout], out: Destination, *, whole_prompts: bool = False) -> int:
    """Write the turns of rollouts as Parquet; the number written."""
    return write_parquet(_turn_rows(rollouts, whole_prompts), RowKind.TURN, out)


def traces_to_jsonl(traces: Iterable[Trace], out: Destination, *, whole_prompts: bool = False) -> int:
    """Write traces as JSON lines; the number written."""
    rows = (trace_row(trace, whole_prompts=whole_prompts) for trace in traces)
    return write_jsonl(rows, RowKind.TRACE, out)


def read_samples(path: str | Path) -> Iterator[Sample]:
    """The samples of an export, `.parquet` or JSON lines."""
    return _revived(path, RowKind.SAMPLE, lambda rows: map(sample_of, rows))


def read_turns(path: str | Path) -> Iterator[Turn]:
    """The turns of an export, `.parquet` or JSON lines."""
    return _revived(path, RowKind.TURN, turns_of)


def read_rollouts(path: str | Path, turns: str | Path | None = None) -> Iterator[Rollout]:
    """The rollouts of an export, with their turns if the export of those is given too."""
    by_session: dict[str, list[Turn]] = {}
    for turn in read_turns(turns) if turns is not None else ():
        by_session.setdefault(turn.session, []).append(turn)

    def with_turns(row: Row) -> Rollout:
        return rollout_of(row, [turn for held in row["session_heads"] for turn in by_session.get(held["session"], ())])

    return _revived(path, RowKind.ROLLOUT, lambda rows: map(with_turns, rows))


def read_traces(path: str | Path) -> Iterator[Trace]:
    """The traces of an export in JSON lines."""
    return _revived(path, RowKind.TRACE, lambda rows: map(trace_of, rows))


def _turn_rows(rollouts: Iterable[Rollout], whole_prompts: bool) -> Iterator[Row]:
    return (row for rollout in rollouts for row in turn_rows(rollout, whole_prompts=whole_prompts))


def _revived(path: str | Path, kind: RowKind, revive: Callable[[Iterator[Row]], Iterator[T]]) -> Iterator[T]:
    rows: Iterator[Any] = (read_parquet if Path(path).suffix == ".parquet" else read_jsonl)(path, kind)
    records = revive(rows)
    for number in range(1, 2**63):
        try:
            record = next(records)
        except StopIteration:
            return
        except RolltapeError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, msgspec.ValidationError) as error:
            raise ExportError(f"{path}, row {number}: no {kind.value}: {error!r}") from None
        yield record

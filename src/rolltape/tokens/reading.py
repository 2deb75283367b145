"""Token records as they were written, step by step."""

from collections.abc import Collection, Iterator
from pathlib import Path

from rolltape.records.token_record import TokenRecord
from rolltape.tokens.parquet import read_parquet
from rolltape.tokens.primerl import read_lines
from rolltape.tokens.steps import Format, TokenStep, steps_of


def read_tokens(
    run: str | Path,
    *,
    step: int | None = None,
    rank: int | None = None,
    columns: Collection[str] | None = None,
    stable_only: bool = False,
) -> Iterator[TokenRecord]:
    """The records of a run, or of one step or rank; with `columns`, of the optional ones only those.

    Ranks that are done are read even if others of the step are not, unless it is to be `stable_only`.
    """
    for one in steps_of(run):
        if step in (None, one.step) and (one.stable or not stable_only):
            yield from records_of(one, rank, columns)


def records_of(
    step: TokenStep, rank: int | None = None, columns: Collection[str] | None = None
) -> Iterator[TokenRecord]:
    """The records of one step, rank by rank."""
    for path in step.paths(rank):
        yield from read_parquet(path, columns) if step.file_format is Format.PARQUET else read_lines(path)

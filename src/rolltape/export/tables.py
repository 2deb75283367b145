"""Records → Arrow tables, the ones that `rolltape query` opens."""

from collections.abc import Iterable

import pyarrow as pa

from rolltape.export.parquet import tables_of
from rolltape.export.rows import message_rows, sample_row, summary_row, turn_rows
from rolltape.export.schema import MESSAGE_COLUMNS, ROLLOUT_SUMMARY_COLUMNS, SAMPLE_COLUMNS, TURN_COLUMNS
from rolltape.records.rollout import Outcome, Rollout, RolloutHead
from rolltape.records.sample import Sample


def rollouts_table(rollouts: Iterable[tuple[RolloutHead, Outcome, int, int, int]]) -> pa.Table:
    """A row per rollout from its head, its outcome, and its numbers of sessions, turns and sampled tokens."""
    rows = (
        summary_row(head, outcome, sessions=sessions, turns=turns, sampled_tokens=sampled)
        for head, outcome, sessions, turns, sampled in rollouts
    )
    return tables_of(rows, ROLLOUT_SUMMARY_COLUMNS)


def turns_table(rollouts: Iterable[Rollout]) -> pa.Table:
    """A row per turn, ids and messages as what is new in it."""
    return tables_of((row for rollout in rollouts for row in turn_rows(rollout)), TURN_COLUMNS)


def messages_table(rollouts: Iterable[Rollout]) -> pa.Table:
    """A row per message, at the first turn that holds it."""
    return tables_of((row for rollout in rollouts for row in message_rows(rollout)), MESSAGE_COLUMNS)


def samples_table(samples: Iterable[Sample]) -> pa.Table:
    """A row per sample."""
    return tables_of((sample_row(sample) for sample in samples), SAMPLE_COLUMNS)

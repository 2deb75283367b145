"""Records → files and tables in Rolltape's own formats, and back."""

from rolltape.export.files import (
    read_rollouts,
    read_samples,
    read_traces,
    read_turns,
    rollouts_to_jsonl,
    rollouts_to_parquet,
    samples_to_jsonl,
    samples_to_parquet,
    traces_to_jsonl,
    turns_to_jsonl,
    turns_to_parquet,
)
from rolltape.export.tables import messages_table, rollouts_table, samples_table, turns_table

__all__ = [
    "messages_table",
    "read_rollouts",
    "read_samples",
    "read_traces",
    "read_turns",
    "rollouts_table",
    "rollouts_to_jsonl",
    "rollouts_to_parquet",
    "samples_table",
    "samples_to_jsonl",
    "samples_to_parquet",
    "traces_to_jsonl",
    "turns_table",
    "turns_to_jsonl",
    "turns_to_parquet",
]

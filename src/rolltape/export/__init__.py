"""Records → files and tables in Rolltape's own formats, and back."""

from rolltape.export.files import (
    conversations_to_jsonl,
    conversations_to_parquet,
    messages_table,
    rollouts_table,
    rollouts_to_jsonl,
    rollouts_to_parquet,
    samples_table,
    samples_to_jsonl,
    samples_to_parquet,
    traces_to_jsonl,
    turns_table,
    turns_to_jsonl,
    turns_to_parquet,
)
from rolltape.export.reading import read_rollouts, read_samples, read_traces, read_turns

__all__ = [
    "conversations_to_jsonl",
    "conversations_to_parquet",
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

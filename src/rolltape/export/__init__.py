"""Records → files and tables in Rolltape's own formats, and back."""

from rolltape.export.conversations import conversations_to_jsonl
from rolltape.export.files import (
    messages_table,
    read_rollouts,
    read_samples,
    read_traces,
    read_turns,
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

__all__ = [
    "conversations_to_jsonl",
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

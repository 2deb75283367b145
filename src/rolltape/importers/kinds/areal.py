"""AReaL's rollout dumps: the JSON lines that its workflow executor writes with `dump_to_file`, one file a task."""

from pathlib import Path

from rolltape.importers.files import first_file, first_object
from rolltape.importers.imported import Found, ImportOptions
from rolltape.importers.text_dumps import TextDump, dump_rollouts, number

# AReaL has no step in them; the newest weight version among a rollout's tokens is what its folders are named after.
_DUMP = TextDump(prompt="prompt", reply="completion", step="tail_version", reward=lambda row: number(row.get("reward")))


def recognize(path: Path) -> str | None:
    """Rows with `prompt`, `completion` and `tail_version`."""
    file = first_file(path, ".jsonl")
    row = first_object(file) if file is not None else None
    fields = {"prompt", "completion", "tail_version"}
    return "rows with prompt, completion, and tail_version" if row and fields <= row.keys() else None


def find(path: Path, options: ImportOptions) -> Found:
    """One rollout per row. Prompts and replies are decoded text."""
    return dump_rollouts(path, ".jsonl", _DUMP, options)

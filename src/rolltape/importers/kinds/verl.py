"""verl's rollout dumps: JSON lines in `trainer.rollout_data_dir` and `validation_data_dir`, one file a step."""

from pathlib import Path

from rolltape.importers.files import first_file, first_object
from rolltape.importers.imported import Found, ImportOptions
from rolltape.importers.text_dumps import TextDump, dump_rollouts, number

_DUMP = TextDump(
    prompt="input", reply="output", step="step", reward=lambda row: number(row.get("score")), task=("gts",)
)


def recognize(path: Path) -> str | None:
    """Rows with `input`, `output` and `score`."""
    file = first_file(path, ".jsonl")
    row = first_object(file) if file is not None else None
    return "rows with input, output, and score" if row and {"input", "output", "score"} <= row.keys() else None


def find(path: Path, options: ImportOptions) -> Found:
    """One rollout per row. Prompts and replies are rendered text."""
    return dump_rollouts(path, ".jsonl", _DUMP, options)

"""verl's rollout dumps: JSON lines in `trainer.rollout_data_dir` and `validation_data_dir`, one file per step."""

from rolltape.importers.text_dumps import TextDump, number

# Prompts and replies are rendered text.
_DUMP = TextDump(
    suffix=".jsonl",
    prompt="input",
    reply="output",
    mark="score",
    step="step",
    reward=lambda row: number(row.get("score")),
    task=("gts",),
)
recognize, find = _DUMP.recognize, _DUMP.find

"""AReaL's rollout dumps: the JSON lines that its workflow executor writes with `dump_to_file`, one file a task."""

from rolltape.importers.text_dumps import TextDump, number

# Prompts and replies are decoded text. AReaL has no step in them; the newest weight version among a rollout's tokens is
# what its folders are named after.
_DUMP = TextDump(
    suffix=".jsonl",
    prompt="prompt",
    reply="completion",
    mark="tail_version",
    step="tail_version",
    reward=lambda row: number(row.get("reward")),
)
recognize, find = _DUMP.recognize, _DUMP.find

"""AReaL's rollout dumps: the JSON lines that its workflow executor writes with `dump_to_file`, one file per task."""

from rolltape.importers.text_dumps import TextDump, number

# Prompts and replies are decoded text. The dumps have no step. AReaL names its folders by the newest weight version of
# a rollout's tokens, which is used as the step.
_DUMP = TextDump(
    suffix=".jsonl",
    prompt="prompt",
    reply="completion",
    mark="tail_version",
    step="tail_version",
    reward=lambda row: number(row.get("reward")),
)
recognize, find = _DUMP.recognize, _DUMP.find

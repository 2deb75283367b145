"""TRL's logged completions: the Parquet files that `log_completions` writes, one a step."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rolltape.importers.files import first_file, first_parquet_row
from rolltape.importers.imported import Found, ImportOptions
from rolltape.importers.text_dumps import TextDump, dump_rollouts, number


def _reward(row: Mapping[str, Any]) -> float | None:
    """The reward, if one function gave it. TRL weighs several, and does not write the weights down."""
    numbers = {name: number(value) for name, value in row.items() if name not in ("step", "advantage")}
    rewards = [value for value in numbers.values() if value is not None]
    return rewards[0] if len(rewards) == 1 else None


_DUMP = TextDump(prompt="prompt", reply="completion", step="step", reward=_reward)


def recognize(path: Path) -> str | None:
    """Parquet files with `prompt`, `completion` and `advantage`."""
    file = first_file(path, ".parquet")
    row = first_parquet_row(file) if file is not None else None
    return "rows with prompt, completion, and advantage" if row and {"completion", "advantage"} <= row.keys() else None


def find(path: Path, options: ImportOptions) -> Found:
    """One rollout per row. With several reward functions their values are kept, and there is no reward."""
    return dump_rollouts(path, ".parquet", _DUMP, options)

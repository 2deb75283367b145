"""TRL's logged completions: the Parquet files that `log_completions` writes, one per step."""

from collections.abc import Mapping
from typing import Any

from rolltape.importers.text_dumps import TextDump, number


def _reward(row: Mapping[str, Any]) -> float | None:
    """The reward, if there is one reward function. With several, TRL does not write their weights, so there is none."""
    numbers = {name: number(value) for name, value in row.items() if name not in ("step", "advantage")}
    rewards = [value for value in numbers.values() if value is not None]
    return rewards[0] if len(rewards) == 1 else None


_DUMP = TextDump(suffix=".parquet", prompt="prompt", reply="completion", mark="advantage", step="step", reward=_reward)
recognize, find = _DUMP.recognize, _DUMP.find

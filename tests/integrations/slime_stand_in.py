"""The part of slime's types that the integration uses (August 2026), for machines without slime.

ROLLTAPE_SLIME names a checkout of slime: the tests then use slime itself.
"""

import json
import os
import sys
from dataclasses import dataclass, field
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass
class Sample:
    """One row of a batch, and before it is generated a prompt."""

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    response_length: int = 0
    label: str | None = None
    reward: float | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: list[int] | None = None
    rollout_top_p_token_offsets: list[int] | None = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    session_id: str | None = None

    @staticmethod
    def from_dict(data: dict[str, Any]) -> "Sample":
        return Sample(**{**data, "status": Sample.Status(data["status"])})

    def get_reward_value(self, args: Any) -> Any:
        return self.reward


@dataclass
class RolloutFnTrainOutput:
    samples: list[Any]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    data: dict[str, Any]
    metrics: dict[str, Any] | None = None


class Dataset:
    """The prompts of a file of JSON lines."""

    def __init__(self, path: str, *, prompt_key: str, label_key: str, **_: Any) -> None:
        rows = map(json.loads, Path(path).read_text().splitlines())
        self.samples = [Sample(prompt=row[prompt_key], label=row[label_key]) for row in rows]


def install() -> Any:
    """Make `slime` importable, and return the module with its `Sample`."""
    if checkout := os.environ.get("ROLLTAPE_SLIME"):
        sys.path.insert(0, checkout)
        return import_module("slime.utils.types")
    types, base, hooks = (ModuleType(name) for name in ("slime.utils.types", "base_types", "sample_hooks"))
    types.Sample = Sample  # type: ignore[attr-defined]
    base.RolloutFnTrainOutput, base.RolloutFnEvalOutput = RolloutFnTrainOutput, RolloutFnEvalOutput  # type: ignore[attr-defined]
    hooks._current_rollout_id = 0  # type: ignore[attr-defined]
    data, processing = ModuleType("slime.utils.data"), ModuleType("slime.utils.processing_utils")
    data.Dataset = Dataset  # type: ignore[attr-defined]
    processing.load_tokenizer = lambda *_, **__: None  # type: ignore[attr-defined]
    for name in ("slime", "slime.utils", "slime.rollout"):
        sys.modules.setdefault(name, ModuleType(name))
    sys.modules |= {
        "slime.utils.types": types,
        "slime.utils.data": data,
        "slime.utils.processing_utils": processing,
        "slime.rollout.base_types": base,
        "slime.rollout.sample_hooks": hooks,
    }
    return types

"""The parts of AReaL that a workflow touches, if AReaL is not installed. ROLLTAPE_AREAL names a checkout to use."""

import os
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any


@dataclass
class GenerationHyperparameters:
    n_samples: int = 1
    max_new_tokens: int = 16384
    max_tokens: int = 32768
    greedy: bool = False
    top_p: float = 1.0
    top_k: int = int(1e8)
    temperature: float = 1.0
    stop_token_ids: list[int] = field(default_factory=list)


@dataclass
class ModelRequest:
    rid: str = ""
    input_ids: list[int] = field(default_factory=list)
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)


@dataclass
class ModelResponse:
    output_tokens: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_versions: list[int] = field(default_factory=list)
    stop_reason: str = "stop"


class RolloutWorkflow:
    """AReaL's has one abstract method."""


@dataclass(frozen=True)
class WorkflowContext:
    is_eval: bool = False
    task_id: int | None = None


class Scalars:
    def __init__(self) -> None:
        self.rewards: list[float] = []

    def scalar(self, reward: float) -> None:
        self.rewards.append(reward)


def install() -> None:
    """Make `areal` importable."""
    if checkout := os.environ.get("ROLLTAPE_AREAL"):
        sys.path.insert(0, checkout)
        return
    areal, api, arguments, utils = (ModuleType(f"areal{name}") for name in ("", ".api", ".api.cli_args", ".utils"))
    current: dict[str, Any] = {"context": WorkflowContext()}
    scopes: dict[str, Scalars] = defaultdict(Scalars)
    given: dict[ModuleType, dict[str, Any]] = {
        areal: {
            "workflow_context": SimpleNamespace(
                WorkflowContext=WorkflowContext,
                get=lambda: current["context"],
                set=lambda context: current.update(context=context),
                stat_scope=lambda: "eval-rollout" if current["context"].is_eval else "rollout",
            )
        },
        api: {"ModelRequest": ModelRequest, "ModelResponse": ModelResponse, "RolloutWorkflow": RolloutWorkflow},
        arguments: {"GenerationHyperparameters": GenerationHyperparameters},
        utils: {"stats_tracker": SimpleNamespace(get=lambda scope: scopes[scope])},
    }
    for module, names in given.items():
        module.__dict__.update(names)
        sys.modules[module.__name__] = module

"""Trainings by TRL for tests: short talks whose rollouts fork or break, and a trainer that keeps what it saw."""

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

import rolltape
from rolltape.collect.settings import CollectSettings
from rolltape.gateway.request import SamplingParams
from rolltape.integrations import LiveGroups
from rolltape.integrations.transformers import TransformersEngine
from rolltape.records.policy import Advantage
from rolltape.tiny import shipped_model

TEMPERATURE = 0.7
NORMALIZED = rolltape.Credit(advantage=Advantage.NORMALIZED)


def talk(task: Mapping[str, Any], seed: int) -> Generator[str, str, float]:
    """Ask twice, which the model's template forks, since it drops earlier thoughts. Some attempts break."""
    if seed % task.get("breaks_one_in", seed + 1) == 0:
        raise RuntimeError("the environment broke")
    first = yield task["prompt"]
    second = yield "Are you sure?"
    return crc32(f"{seed}{first}{second}".encode()) % 5 / 4  # whatever it says, so that attempts differ


def talks(count: int, **fields: Any) -> list[dict[str, Any]]:
    how = {"environment": "message", "episode": "python:trl_jobs:talk", **fields}
    return [{"id": f"talk-{n}", "prompt": f"What is {n} + 12?", **how} for n in range(count)]


def load_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(shipped_model(), dtype=torch.float32)


def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(shipped_model())


def live_groups(run: Path, model: Any, credit: rolltape.Credit = NORMALIZED) -> LiveGroups:
    settings = CollectSettings(
        source="talks",
        model=str(shipped_model()),
        thinking=True,
        sampling=SamplingParams(temperature=TEMPERATURE, max_tokens=64),
    )
    return LiveGroups(run, collect=settings, engine=TransformersEngine(model), credit=credit)


def arguments(folder: Path, **given: Any) -> GRPOConfig:
    fixed: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "beta": 0.0,
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "temperature": TEMPERATURE,
        "vllm_importance_sampling_mode": "token_truncate",
    }
    return GRPOConfig(**{**fixed, **given})


def trained_rows(inputs: Mapping[str, Any]) -> list[tuple[list[int], list[float], float]]:
    """What TRL trains on, row by row: ids, logprobs of trained tokens, advantage; rows that train nothing left out."""
    rows = []
    masks = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    for at, mask in enumerate(masks):
        if mask.any():
            prompt = inputs["prompt_ids"][at][inputs["prompt_mask"][at].bool()].tolist()
            completion = inputs["completion_ids"][at][inputs["completion_mask"][at].bool()].tolist()
            logprobs = inputs["sampling_per_token_logps"][at][mask].tolist()
            rows.append(([*prompt, *completion], logprobs, float(inputs["advantages"][at])))
    return rows


def sample_row(sample: rolltape.Sample) -> tuple[list[int], list[float], float]:
    """The same of a sample, in TRL's precision."""
    logprobs = torch.tensor(sample.logprobs[sample.trained_mask]).float().tolist()
    return sample.ids.tolist(), logprobs, float(torch.tensor(sample.advantage or 0.0).float())


def samples_of_step(run: Path, step: int) -> Sequence[rolltape.Sample]:
    rollouts = list(rolltape.read(run).rollouts(step=step))
    groups: dict[str, list[rolltape.Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.head.group, []).append(rollout)
    return [sample for group in groups.values() for sample in rolltape.samples_of_group(group, credit=NORMALIZED)]

"""verl's rows: prompts of its dataset as tasks, and samples as rows for its trainers."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np
import torch
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.core_algos import register_adv_est

from rolltape.export.formats.arrays import VersionNumbers, as_tensors, logprobs_or_zero
from rolltape.export.formats.fitting import Fact, fitted
from rolltape.export.formats.verl import FORM, arrays, blank_sample
from rolltape.groups import Group
from rolltape.integrations.attempts import samples_by_attempt
from rolltape.records.sample import Sample

Row = dict[str, Any]  # of verl's dataset: its columns, and `uid`, which is the same for all attempts at a prompt

# Here losses use our advantages, and all samples of a rollout are passed together, so forks need no warning.
_FORM = FORM.without(Fact.FORKED)


@register_adv_est("rolltape")  # type: ignore[untyped-decorator]
def recorded_advantages(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, reward_baselines: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """For `algorithm.adv_estimator=rolltape`: the advantages that were computed over the rollouts of a group."""
    advantages = (token_level_rewards.sum(-1) - reward_baselines)[:, None] * response_mask
    return advantages, advantages


def prompt_task(row: Row) -> Row:
    """A row of verl's dataset as a task: its messages, the ground truth as the answer, and its `extra_info`."""
    truth = (row.get("reward_model") or {}).get("ground_truth")
    answer = {} if truth is None else {"answer": truth}
    return {"messages": list(row["raw_prompt"]), **answer, **(row.get("extra_info") or {})}


def loop_output(sample: Sample, turns: int) -> AgentLoopOutput:
    """A sample as verl's agent loops return it."""
    start = sample.prompt_tokens
    oldest, newest = VersionNumbers().bounds(sample) or (None, None)
    return AgentLoopOutput(
        prompt_ids=sample.ids[:start].tolist(),
        response_ids=sample.ids[start:].tolist(),
        response_mask=sample.trained_mask[start:].astype(int).tolist(),
        response_logprobs=logprobs_or_zero(sample)[start:].tolist(),
        reward_score=sample.rollout_reward,
        num_turns=turns,
        metrics=AgentLoopMetrics(),
        extra_fields={
            "min_global_steps": oldest,
            "max_global_steps": newest,
            "reward_extra_info": {},
            "rollout": sample.rollout,
            "sample": sample.id,
            "loss_weight": sample.loss_weight,
        },
    )


def data_proto(groups: Iterable[Group], *, divisor: int = 1, **given: Any) -> DataProto:
    """All samples of groups as one `DataProto` with advantages, for your own trainer.

    Blank rows are added until the number of rows is a multiple of `divisor`. Other arguments are those of
    `data_proto_fields`: `pad_id`, `prompt_length`, `response_length`.

    Example:

        groups = live.request(tasks, step=3).wait()
        data = data_proto(groups, divisor=8, pad_id=tokenizer.pad_token_id)
    """
    samples = fitted((sample for group in groups for sample in group.samples), FORM)
    samples += [blank_sample(0.0)] * (-len(samples) % divisor)
    others = {
        "uid": np.array([sample.group for sample in samples], dtype=object),
        "rollout": np.array([sample.rollout for sample in samples], dtype=object),
        "sample": np.array([sample.id for sample in samples], dtype=object),
        "loss_weight": np.array([sample.loss_weight for sample in samples], dtype=object),
    }
    return DataProto.from_dict(as_tensors(arrays(samples, **given)), others, {"reward_extra_keys": []})


def finished_attempts(group: Group) -> dict[int, tuple[int, list[Sample]]]:
    """By finished attempt: its number of turns, and its samples, the one with the most trained tokens first.

    A rollout with nothing to train has a blank sample, so that its reward counts.
    """
    samples = samples_by_attempt(group, _FORM)
    found = {}
    for rollout in group.rollouts:
        blank = msgspec.structs.replace(blank_sample(rollout.reward), rollout=rollout.id, group=group.id)
        found[rollout.head.attempt] = (len(rollout.turns), samples[rollout.head.attempt] or [blank])
    return found


def failed_attempt(reward: float | None) -> tuple[int, list[Sample]]:
    """A blank sample for an attempt that failed. With the mean of its group as reward, the mean stays the same."""
    return 0, [blank_sample(reward)]


def row_at(prompts: Any, at: int) -> Row:
    """One row of a `TensorDict`: its tensors and other values."""
    one = prompts[at]
    return {
        name: getattr(value, "data", value) if not isinstance(value, torch.Tensor) else value
        for name, value in one.items()
    }


def plain(value: Any) -> Any:
    """Values and arrays of numpy and torch as plain Python values."""
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        return plain(value.tolist())
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value

"""TRL's own GRPOTrainer takes what we give as the result of its `rollout_func`, and trains on what was recorded."""

import copy
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset  # type: ignore[import-untyped]
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from exported import a_sample
from framework_samples import CLOSE, causal_model, recorded_group, shifted, token_mean_loss
from rolltape.errors import ExportError
from rolltape.export.formats import LeftOutWarning, rollout_result, write_samples_for
from rolltape.records.sample import Sample
from rolltape.tiny import shipped_model

pytestmark = [
    pytest.mark.filterwarnings("ignore::rolltape.export.formats.LeftOutWarning"),
    pytest.mark.filterwarnings("ignore:You are using 'rollout_func'"),
]


class Watched(GRPOTrainer):  # type: ignore[misc]
    """Keeps what its loss was computed from, and the gradient at each token's last hidden state."""

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        self.seen = inputs
        held: list[torch.Tensor] = []

        def hold(module: Any, given: Any, output: torch.Tensor) -> None:
            output.retain_grad()
            held.append(output)

        hook = model.model.norm.register_forward_hook(hold)
        self.loss = super()._compute_loss(model, inputs)
        hook.remove()
        (self.hidden,) = held
        return self.loss


def reward(completions: Any, reward: list[float | None], **others: Any) -> list[float | None]:
    """TRL hands each field that it does not know to its reward functions."""
    return reward


def trainer_for(folder: Path, samples: Sequence[Sample], change: Any = None, *, correct: bool = False) -> Watched:
    """A trainer whose rollouts are these samples; `correct` has it compare its logprobs with ours as it does vLLM's."""

    def rollout_func(prompts: list[str], trainer: Any) -> dict[str, Any]:
        result = rollout_result(samples)
        return change(result) if change else result

    arguments = GRPOConfig(
        output_dir=str(folder), use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no",
        disable_tqdm=True, max_steps=1, learning_rate=1e-3, scale_rewards="none", beta=0.0, loss_type="bnpo",
        per_device_train_batch_size=len(samples), num_generations=len(samples), bf16=False,
        vllm_importance_sampling_mode="token_truncate",
    )  # fmt: skip
    trainer = Watched(
        model=copy.deepcopy(causal_model()),
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "task"}] * len(samples)),
        processing_class=AutoTokenizer.from_pretrained(shipped_model()),
        rollout_func=rollout_func,
    )
    if correct:
        trainer.use_vllm, trainer._last_loaded_step = True, 0
    return trainer


def ratios(trainer: Watched) -> torch.Tensor:
    """TRL's own ratio between its logprobs and ours, at the tokens that train."""
    trained = (trainer.seen["completion_mask"] * trainer.seen["tool_mask"]).bool()
    found: torch.Tensor = trainer.seen["importance_sampling_ratio"][trained]
    return found


def late(result: dict[str, Any]) -> dict[str, Any]:
    return {**result, "logprobs": [shifted(np.array(row)).tolist() for row in result["logprobs"]]}


def test_a_training_step_sees_ids_masks_logprobs_and_advantages_as_recorded(tmp_path: Path) -> None:
    samples = recorded_group(tmp_path)
    trainer = trainer_for(tmp_path, samples)
    before = copy.deepcopy(trainer.model.state_dict())
    trainer.train()
    seen = trainer.seen
    trained = (seen["completion_mask"] * seen["tool_mask"]).bool()
    by_rollout = {tuple(sample.ids.tolist()): sample for sample in samples}
    for row, mask in enumerate(trained):
        prompt = seen["prompt_ids"][row][seen["prompt_mask"][row].bool()].tolist()
        completion = seen["completion_ids"][row][seen["completion_mask"][row].bool()].tolist()
        sample = by_rollout[(*prompt, *completion)]
        assert len(prompt) == sample.prompt_tokens
        assert mask[: len(completion)].tolist() == sample.trained_mask[len(prompt) :].tolist()
        given = seen["sampling_per_token_logps"][row][mask]
        assert given.tolist() == sample.logprobs[sample.trained_mask].astype(np.float32).tolist()
        assert seen["advantages"][row].item() == pytest.approx(sample.advantage)
    assert trainer.loss.item() == pytest.approx(token_mean_loss(samples), abs=CLOSE)
    assert any(not torch.equal(before[name], weights) for name, weights in trainer.model.state_dict().items())


def test_only_the_states_that_predict_trained_tokens_have_a_gradient(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, recorded_group(tmp_path))
    trainer.train()
    assert trainer.hidden.grad is not None
    completions = trainer.seen["completion_mask"] * trainer.seen["tool_mask"]
    # The last state predicts what comes after the last token, and nothing predicts the first.
    predicts_trained = torch.cat([torch.zeros_like(trainer.seen["prompt_mask"]), completions], 1)[:, 1:].bool()
    assert torch.equal(trainer.hidden.grad[:, :-1].abs().sum(-1) > 0, predicts_trained)
    assert trainer.hidden.grad[:, -1].abs().sum() == 0


def test_trls_correction_for_the_engine_is_one_at_every_trained_token_and_a_shift_shows(tmp_path: Path) -> None:
    samples = recorded_group(tmp_path)
    trainer = trainer_for(tmp_path, samples, correct=True)
    trainer.train()
    assert ratios(trainer).numel() == sum(sample.trained_tokens for sample in samples)
    assert (ratios(trainer) - 1).abs().max() < CLOSE
    trainer = trainer_for(tmp_path, samples, late, correct=True)
    trainer.train()
    assert (ratios(trainer) - 1).abs().max() > 0.5


def test_a_logprob_that_was_not_given_is_none_and_corrects_nothing(tmp_path: Path) -> None:
    samples = recorded_group(tmp_path)
    samples[0].logprobs[np.flatnonzero(samples[0].trained_mask)[:2]] = np.nan
    with pytest.warns(LeftOutWarning, match="trained tokens that have no logprob: None there"):
        assert rollout_result(samples)["logprobs"][0][:3][1:] == [None, pytest.approx(samples[0].logprobs[7])]
    trainer = trainer_for(tmp_path, samples, correct=True)
    trainer.train()
    assert (ratios(trainer) - 1).abs().max() < CLOSE


def test_a_rollout_that_forked_is_refused_where_there_is_one_completion_for_each_prompt(tmp_path: Path) -> None:
    samples = recorded_group(tmp_path, forked=True)
    with pytest.raises(ExportError, match=r"TRL takes one completion for each prompt; choose one, or make samples"):
        rollout_result(samples)
    with pytest.warns(LeftOutWarning, match="its baseline and its loss count completions"):
        assert len(rollout_result(samples[:3])["prompt_ids"]) == 3


def test_lines_of_the_file_are_the_rows_of_the_result(tmp_path: Path) -> None:
    samples = recorded_group(tmp_path)
    assert write_samples_for("trl", samples, tmp_path / "rows.jsonl").samples == 3
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {name: [line[name] for line in lines] for name in lines[0]} == rollout_result(samples)


@pytest.mark.parametrize("reward", [None, math.nan, math.inf])
def test_a_sample_without_a_reward_has_none(reward: float | None) -> None:
    assert rollout_result([a_sample(reward=reward)])["reward"] == [None]

"""verl's own DataProto, advantage and loss take what we give, and see in it what was recorded."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl import DataProto
from verl.trainer.ppo.core_algos import (
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
    compute_policy_loss_vanilla,
)
from verl.trainer.ppo.reward import extract_reward
from verl.trainer.ppo.rollout_corr_helper import apply_bypass_mode
from verl.utils.model import compute_position_id_with_mask
from verl.utils.torch_functional import logprobs_from_logits
from verl.workers.config import ActorConfig

from exported import a_sample
from framework_samples import CLOSE, REWARDS, causal_model, ending_unscored, recorded_group, shifted, token_mean_loss
from rolltape.errors import ExportError
from rolltape.export.formats import data_proto_fields, write_samples_for
from rolltape.records.policy import Advantage, Credit
from rolltape.records.sample import SampleSide

pytestmark = pytest.mark.filterwarnings("ignore::rolltape.export.formats.LeftOutWarning")

ACTOR = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio=0.2)


def data_of(samples: Any, **given: Any) -> DataProto:
    data = DataProto.from_dict(**data_proto_fields(samples, **given)._asdict())
    data.check_consistency()
    return data


def new_logprobs(data: DataProto) -> torch.Tensor:
    """The model's logprobs of the responses, as verl's actor computes them from the batch."""
    batch = data.batch
    logits = causal_model()(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], position_ids=batch["position_ids"]
    ).logits
    width = batch["responses"].shape[1]
    found: torch.Tensor = logprobs_from_logits(logits[:, -width - 1 : -1].contiguous(), batch["responses"])
    return found


def policy_loss(data: DataProto, logprobs: torch.Tensor, mode: str = "token-mean") -> Any:
    loss, _ = compute_policy_loss_vanilla(
        old_log_prob=data.batch["old_log_probs"],
        log_prob=logprobs,
        advantages=data.batch["advantages"],
        response_mask=data.batch["response_mask"],
        loss_agg_mode=mode,
        config=ACTOR,
    )
    return loss


def test_a_data_proto_holds_every_sample_where_verl_looks_for_it(tmp_path: Path) -> None:
    samples = recorded_group(tmp_path, forked=True)
    with pytest.warns(match="forked"):
        data = data_of(samples, pad_id=99)
    assert len(data) == len(samples) == 4
    batch = data.batch
    assert torch.equal(batch["position_ids"], compute_position_id_with_mask(batch["attention_mask"]))
    assert torch.equal(batch["input_ids"], torch.cat([batch["prompts"], batch["responses"]], 1))
    for row, sample in zip(data, samples, strict=True):
        here = row.batch["attention_mask"].bool()
        assert row.batch["input_ids"][here].tolist() == sample.ids.tolist()
        assert set(row.batch["input_ids"][~here].tolist()) <= {99}
        after = sample.trained_mask[sample.prompt_tokens :]
        assert row.batch["response_mask"][: len(after)].tolist() == after.tolist()
        assert row.batch["response_mask"][len(after) :].sum() == 0
        assert row.non_tensor_batch["uid"] == sample.group
    assert data.non_tensor_batch["min_global_steps"].tolist() == [7, 7, 7, 7]
    assert data.non_tensor_batch["max_global_steps"].tolist() == [8, 7, 7, 7]
    scores, _ = extract_reward(data)
    assert scores.sum(1).tolist() == [1.0, 0.0, 0.25, 0.25]


def test_at_the_weights_that_sampled_the_ratio_is_one_and_a_shift_shows(tmp_path: Path) -> None:
    data = data_of(recorded_group(tmp_path))
    trained = data.batch["response_mask"].bool()
    with torch.no_grad():
        off = (new_logprobs(data) - data.batch["rollout_log_probs"])[trained]
        off_by_one = (new_logprobs(data) - shifted(data.batch["rollout_log_probs"]))[trained]
    assert off.abs().max() < CLOSE
    assert off_by_one.abs().max() > 1


def test_verls_loss_is_what_a_hand_calculation_gives_and_only_trained_tokens_have_a_gradient(tmp_path: Path) -> None:
    samples = recorded_group(tmp_path, credit=Credit(advantage=Advantage.NORMALIZED))
    data = data_of(samples)
    apply_bypass_mode(data, OmegaConf.create({}), OmegaConf.create({}))
    logprobs = new_logprobs(data).detach().requires_grad_()
    loss = policy_loss(data, logprobs)
    assert loss.item() == pytest.approx(token_mean_loss(samples), abs=CLOSE)
    assert abs(token_mean_loss(samples)) > 0.1
    loss.backward()
    assert logprobs.grad is not None
    tokens = sum(sample.trained_tokens for sample in samples)
    expected = -data.batch["advantages"] / tokens
    torch.testing.assert_close(logprobs.grad, expected, atol=CLOSE, rtol=0)
    assert torch.equal(logprobs.grad != 0, data.batch["response_mask"].bool())

    data.batch["old_log_probs"] = shifted(data.batch["old_log_probs"])
    assert policy_loss(data, logprobs).item() != pytest.approx(token_mean_loss(samples), abs=0.01)


def test_verls_baseline_is_ours_unless_a_rollout_forked(tmp_path: Path) -> None:
    whole = data_of(recorded_group(tmp_path / "a"))

    def verls(data: DataProto) -> Any:
        advantages, _ = compute_grpo_outcome_advantage(
            data.batch["rm_scores"], data.batch["response_mask"], data.non_tensor_batch["uid"],
            norm_adv_by_std_in_grpo=False,
        )  # fmt: skip
        return advantages

    torch.testing.assert_close(verls(whole), whole.batch["advantages"])
    with pytest.warns(match="own baseline"):
        forked = data_of(recorded_group(tmp_path / "b", forked=True))
    centred = [reward - sum(REWARDS) / len(REWARDS) for reward in REWARDS]
    given = forked.batch["advantages"].sum(1) / forked.batch["response_mask"].sum(1)
    assert given.tolist() == pytest.approx([*centred, centred[-1]])
    assert not torch.allclose(verls(forked), forked.batch["advantages"])


def test_an_estimator_over_tokens_finds_the_reward_where_the_last_token_does_not_train(tmp_path: Path) -> None:
    samples = ending_unscored(tmp_path)
    data = data_of(samples)
    mask = data.batch["response_mask"]
    scores, _ = extract_reward(data)
    _, returns = compute_gae_advantage_return(scores, torch.zeros_like(scores), mask, gamma=1.0, lam=1.0)
    for row, sample in enumerate(samples):
        assert returns[row][mask[row].bool()].tolist() == [sample.reward] * sample.trained_tokens


def test_the_file_gives_the_same_data_proto(tmp_path: Path) -> None:
    samples = recorded_group(tmp_path)
    written = write_samples_for("verl", samples, tmp_path / "step4.npz")
    assert written.samples == 3
    held = np.load(tmp_path / "step4.npz")
    tensors = {name: torch.from_numpy(held[name]) for name in held.files if not name.startswith("non_tensor.")}
    others = {name.removeprefix("non_tensor."): held[name] for name in held.files if name.startswith("non_tensor.")}
    data, direct = DataProto.from_dict(tensors=tensors, non_tensors=others), data_of(samples)
    assert set(data.batch.keys()) == set(direct.batch.keys())
    for name in direct.batch.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
        assert torch.equal(data.batch[name], direct.batch[name])
    assert {name: values.tolist() for name, values in others.items()} == {
        name: values.tolist() for name, values in direct.non_tensor_batch.items()
    }


def test_widths_can_be_given_and_a_sample_that_is_longer_is_named(tmp_path: Path) -> None:
    samples = recorded_group(tmp_path)
    data = data_of(samples, prompt_length=20, response_length=30)
    assert data.batch["prompts"].shape == (3, 20)
    assert data.batch["rollout_log_probs"].shape == (3, 30)
    with pytest.raises(ExportError, match=rf"sample {samples[0].id}: 13 tokens, but response_length is 12"):
        data_proto_fields(samples, response_length=12)


def test_without_logprobs_there_is_no_such_column() -> None:
    lacking = a_sample(reward=1.0, logprobs=np.full(4, np.nan, np.float32), side={}, turn_rewards={})
    with pytest.raises(ExportError, match="verl needs a logprob for each trained token, but 1 of 1 samples"):
        data_proto_fields([lacking], versions=["7", "8"])
    assert "rollout_log_probs" not in data_of([lacking], logprobs=False).batch.keys()  # noqa: SIM118


def test_routed_experts_stand_at_the_tokens_that_they_saw() -> None:
    experts = np.arange(4 * 2 * 3, dtype=np.int32).reshape(4, 2, 3)
    side = {"routed_experts": SampleSide(experts, None, ((3, 4),))}
    plain = {"reward": 1.0, "turn_rewards": {}, "version_index": np.full(4, -1, np.int32)}
    data = data_of([a_sample(side=side, **plain)], prompt_length=5)
    assert data.batch["routed_experts"][0, 3:6].tolist() == experts[:3].tolist()
    assert data.batch["routed_experts"][0, [0, 1, 2, 6]].abs().sum() == 0
    with pytest.warns(match="routed experts are not whole in all samples"):
        mixed = data_of([a_sample(side=side, **plain), a_sample(side={}, **plain)])
    assert "routed_experts" not in mixed.batch.keys()  # noqa: SIM118

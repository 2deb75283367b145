"""AReaL's padded tensor dict, against the fields that its workflows return and the shift that its actor makes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from exported import a_sample
from framework_samples import CLOSE, REWARDS, causal_model, ending_unscored, recorded_group, shifted, token_mean_loss
from rolltape.errors import ExportError
from rolltape.export.formats import Choices, LeftOutWarning, tensor_dict, write_samples_for
from rolltape.records.sample import SampleSide

pytestmark = pytest.mark.filterwarnings("ignore::rolltape.export.formats.LeftOutWarning")

# What AReaL's workflows return, with the types that they give them.
FIELDS = {
    "input_ids": torch.int32,
    "attention_mask": torch.bool,
    "loss_mask": torch.int32,
    "logprobs": torch.float32,
    "versions": torch.int32,
    "rewards": torch.float32,
}


def next_token_logprobs(batch: dict[str, Any]) -> torch.Tensor:
    """At each place the model's logprob of the token after it, which is how AReaL's engines number them."""
    ids = batch["input_ids"].long()
    logits = causal_model()(input_ids=ids, attention_mask=batch["attention_mask"].long()).logits
    found: torch.Tensor = logits.log_softmax(-1).gather(-1, torch.roll(ids, -1, -1)[..., None])[..., 0]
    return found


def test_the_batch_has_the_fields_of_a_workflow_padded_on_the_right(tmp_path: Path) -> None:
    samples = recorded_group(tmp_path, forked=True)
    batch = tensor_dict(samples)
    assert {name: tensor.dtype for name, tensor in batch.items()} == FIELDS
    width = max(len(sample.ids) for sample in samples)
    assert {tuple(tensor.shape) for name, tensor in batch.items() if name != "rewards"} == {(4, width)}
    for row, sample in enumerate(samples):
        length = len(sample.ids)
        assert batch["attention_mask"][row].tolist() == [True] * length + [False] * (width - length)
        assert batch["input_ids"][row, :length].tolist() == sample.ids.tolist()
        assert batch["loss_mask"][row].nonzero()[:, 0].tolist() == np.flatnonzero(sample.trained_mask).tolist()
        assert batch["rewards"][row].item() == sample.reward
        for padding in ("input_ids", "loss_mask", "logprobs"):
            assert not batch[padding][row, length:].any()


def test_versions_are_numbers_along_the_tokens_and_minus_one_elsewhere(tmp_path: Path) -> None:
    samples = recorded_group(tmp_path, forked=True)
    versions = tensor_dict(samples)["versions"]
    for row, sample in enumerate(samples):
        expected = [7 if sampled else -1 for sampled in sample.sampled_mask]
        if row == 0:
            expected[-3:] = [8, 8, 8]
        assert versions[row].tolist() == expected + [-1] * (versions.shape[1] - len(expected))


def test_versions_that_are_no_integers_are_numbered_as_they_were_announced() -> None:
    plain: dict[str, Any] = {"reward": 1.0, "versions": (("a", "a"), ("a", "b")), "side": {}, "turn_rewards": {}}
    with pytest.raises(
        ExportError, match=r"weight version 'a' is neither a 32-bit integer .* give versions=run\.versions\(\)"
    ):
        tensor_dict([a_sample(**plain)])
    assert tensor_dict([a_sample(**plain)], versions=["z", "a", "b"])["versions"].tolist() == [[-1, -1, 1]]
    trained_unsure = a_sample(**{**plain, "version_index": np.array([-1, -1, 1, 1], np.int32)})
    with pytest.warns(LeftOutWarning, match="only known to lie between two: -1 there, as on prompts"):
        tensor_dict([trained_unsure], versions=["z", "a", "b"])


def test_after_areals_own_shift_the_ratio_is_one_and_the_loss_is_as_by_hand(tmp_path: Path) -> None:
    samples = recorded_group(tmp_path)
    batch = tensor_dict(samples, advantages_as_rewards=True)
    # What its actor does before the loss: mask and logprobs move to the place that predicts them.
    mask = torch.roll(batch["loss_mask"], -1, -1)
    old = torch.roll(batch["logprobs"], -1, -1) * mask
    logprobs = next_token_logprobs(batch).detach().requires_grad_()
    assert (logprobs - old)[mask.bool()].abs().max() < CLOSE
    assert (logprobs - shifted(old))[mask.bool()].abs().max() > 0.5
    # Without discount and baseline, every trained token's advantage is the reward that stands at the end.
    advantages = batch["rewards"][:, None]
    loss = -(torch.exp(logprobs - old) * advantages * mask).sum() / mask.sum()
    assert loss.item() == pytest.approx(token_mean_loss(samples), abs=CLOSE)
    loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert torch.equal(logprobs.grad != 0, mask.bool())


def test_the_reward_reaches_every_trained_token_also_where_the_last_one_does_not_train(tmp_path: Path) -> None:
    samples = ending_unscored(tmp_path)
    assert [bool(sample.trained_mask[-1]) for sample in samples] == [False, True]
    batch = tensor_dict(samples, advantages_as_rewards=True)
    # As its actor does without values and discount: the reward stands where the last token is predicted, and is
    # carried back from one trained token to the one before.
    mask = torch.roll(batch["loss_mask"], -1, -1)
    rewards = torch.zeros(mask.shape)
    rewards[torch.arange(len(samples)), batch["attention_mask"].sum(-1) - 2] = batch["rewards"]
    advantages, carried = torch.zeros(mask.shape), torch.zeros(len(samples))
    for place in reversed(range(mask.shape[1] - 1)):
        carried = torch.where(mask[:, place].bool(), carried + rewards[:, place], carried)
        advantages[:, place] = carried
    for row, sample in enumerate(samples):
        assert advantages[row][mask[row].bool()].tolist() == [sample.advantage] * sample.trained_tokens


def test_advantages_can_stand_for_rewards_where_a_baseline_over_rows_would_miscount(tmp_path: Path) -> None:
    samples = recorded_group(tmp_path, forked=True)
    with pytest.warns(LeftOutWarning, match="AReaL's baseline counts rows"):
        tensor_dict(samples)
    centred = [reward - sum(REWARDS) / len(REWARDS) for reward in REWARDS]
    given = tensor_dict(samples, advantages_as_rewards=True)["rewards"]
    assert given.tolist() == pytest.approx([*centred, centred[-1]])
    with pytest.raises(ExportError, match="areal needs an advantage"):
        tensor_dict([a_sample(reward=1.0)], advantages_as_rewards=True)


def test_routed_experts_say_which_rows_can_be_replayed() -> None:
    experts = np.arange(1, 4 * 2 * 3 + 1, dtype=np.int32).reshape(4, 2, 3)
    plain: dict[str, Any] = {"reward": 1.0, "turn_rewards": {}}
    side = {"routed_experts": SampleSide(experts, None, ((3, 4),))}
    to_the_end = {"trained_mask": np.array([0, 0, 1, 1], bool), "logprobs": np.full(4, -0.5, np.float32)}
    whole, shorter = a_sample(side=side, **plain, **to_the_end), a_sample(side=side, **plain)
    batch = tensor_dict([whole, shorter, a_sample(side={}, **plain)], versions=["7", "8"])
    assert batch["r3_routing_valid"].tolist() == [True, True, False]
    assert batch["routed_experts"][0].tolist() == [*experts[:3].tolist(), experts[2].tolist()]
    assert batch["routed_experts"][1].tolist() == [*experts[:3].tolist(), np.zeros_like(experts[0]).tolist()]
    assert not batch["routed_experts"][2].any()


def test_the_file_holds_the_batch_and_beside_it_who_each_row_is(tmp_path: Path) -> None:
    samples = recorded_group(tmp_path)
    write_samples_for("areal", samples, tmp_path / "4.npz", Choices())
    held = np.load(tmp_path / "4.npz")
    batch = {name: torch.from_numpy(held[name]) for name in held.files if not name.startswith("rolltape_")}
    for name, tensor in tensor_dict(samples).items():
        assert torch.equal(batch.pop(name), tensor)
    assert batch == {}
    assert held["rolltape_rollout"].tolist() == [sample.rollout for sample in samples]
    assert held["rolltape_advantage"].tolist() == pytest.approx([sample.advantage for sample in samples])

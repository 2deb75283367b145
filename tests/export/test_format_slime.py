"""slime's fields, as its `Sample` and its conversion to training data document them."""

import dataclasses
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import rolltape
from exported import a_sample
from framework_samples import CLOSE, REWARDS, Conversation, model_logprobs, recorded_group, shifted
from rolltape.errors import ExportError
from rolltape.export.formats import LeftOutWarning, post_process_rewards, slime_samples, write_samples_for
from rolltape.records.policy import Credit, LossWeight, cut_policy
from rolltape.records.sample import Sample, SampleSide
from rolltape.samples import samples_of_group

pytestmark = pytest.mark.filterwarnings("ignore::rolltape.export.formats.LeftOutWarning")

# The fields of slime's Sample that concern training, and what they hold.
FIELDS: dict[str, type | tuple[type, ...]] = {
    "group_index": int,
    "index": int,
    "rollout_id": int,
    "tokens": list,
    "response_length": int,
    "loss_mask": list,
    "rollout_log_probs": list,
    "rollout_routed_experts": np.ndarray,
    "rollout_top_p_token_ids": list,
    "rollout_top_p_token_offsets": list,
    "reward": float,
    "weight_versions": list,
    "status": str,
    "session_id": str,
    "metadata": dict,
}
STATUSES = {"pending", "completed", "truncated", "aborted", "failed"}


@dataclasses.dataclass
class SlimeSample:
    """As much of slime's Sample as its reward hook touches."""

    reward: float
    metadata: dict[str, Any]

    def get_reward_value(self, args: Any) -> float:
        return self.reward


def training_data(rows: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """What slime makes of its samples: masks of the response, and for each the mask's sum over its whole rollout."""
    sums: dict[int, int] = {}
    for row in rows:
        assert len(row["loss_mask"]) == row["response_length"] == len(row["rollout_log_probs"])
        sums[row["rollout_id"]] = sums.get(row["rollout_id"], 0) + sum(row["loss_mask"])
    return {
        "loss_masks": [torch.tensor(row["loss_mask"]) for row in rows],
        "rollout_log_probs": [torch.tensor(row["rollout_log_probs"]) for row in rows],
        "rollout_mask_sums": [sums[row["rollout_id"]] for row in rows],
    }


def test_every_field_is_one_of_slimes_and_of_its_type(tmp_path: Path) -> None:
    for row in slime_samples(recorded_group(tmp_path, forked=True)):
        assert {name: value for name, value in row.items() if not isinstance(value, FIELDS[name])} == {}
        assert row["status"] in STATUSES
        assert json.loads(json.dumps(row["metadata"])) == row["metadata"]


def test_response_columns_cover_what_follows_the_first_prompt(tmp_path: Path) -> None:
    samples = recorded_group(tmp_path)
    for sample, row in zip(samples, slime_samples(samples), strict=True):
        assert row["tokens"] == sample.ids.tolist()
        assert row["tokens"][-row["response_length"] :] == sample.ids[sample.prompt_tokens :].tolist()
        trained = np.array(row["loss_mask"], bool)
        assert trained.sum() == sample.trained_tokens
        given = np.array(row["rollout_log_probs"])
        computed = np.array(model_logprobs(row["tokens"]))[-row["response_length"] :]
        assert np.abs(computed - given)[trained].max() < CLOSE
        assert np.abs(computed - shifted(given).numpy())[trained].max() > 0.5
        assert not given[~trained].any()


def test_a_rollout_that_forked_counts_once_in_slimes_loss(tmp_path: Path) -> None:
    samples = recorded_group(tmp_path, forked=True)
    rows = slime_samples(samples)
    assert [row["group_index"] for row in rows] == [0, 0, 0, 0]
    assert [row["rollout_id"] for row in rows] == [0, 1, 2, 2]
    assert [row["index"] for row in rows] == [0, 1, 2, 3]
    data = training_data(rows)
    # Each sample's share of its rollout's mean is the weight that we computed.
    shares = [
        mask.sum().item() / total for mask, total in zip(data["loss_masks"], data["rollout_mask_sums"], strict=True)
    ]
    assert shares == pytest.approx([sample.loss_weight for sample in samples])


def test_weights_that_slimes_loss_does_not_give_are_said(tmp_path: Path) -> None:
    by_tokens = recorded_group(tmp_path / "tokens", forked=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*several weight versions")
        slime_samples(by_tokens)
    evenly = recorded_group(tmp_path / "even", forked=True, credit=Credit(loss_weight=LossWeight.EVEN))
    with pytest.warns(LeftOutWarning, match="weigh otherwise in their rollout than by their trained tokens: slime's"):
        slime_samples(evenly)


def test_the_reward_hook_gives_advantages_over_rollouts_not_over_samples(tmp_path: Path) -> None:
    rows = slime_samples(recorded_group(tmp_path, forked=True))
    held = [SlimeSample(row["reward"], row["metadata"]) for row in rows]
    raw, advantages = post_process_rewards(SimpleNamespace(reward_key=None), held)
    centred = [reward - sum(REWARDS) / len(REWARDS) for reward in REWARDS]
    assert raw == [*REWARDS, REWARDS[-1]]
    assert advantages == pytest.approx([*centred, centred[-1]])


def test_the_reward_hook_refuses_samples_that_have_no_advantage() -> None:
    (row,) = slime_samples([a_sample(reward=1.0, advantage=None)])
    with pytest.raises(ExportError, match=r"sample r\.0\.0\.1@\w+: no advantage, .*give credit with an advantage"):
        post_process_rewards(SimpleNamespace(reward_key=None), [SlimeSample(row["reward"], row["metadata"])])


def test_weight_versions_are_those_of_trained_tokens_in_order(tmp_path: Path) -> None:
    with pytest.warns(LeftOutWarning, match="without saying which token is whose"):
        rows = slime_samples(recorded_group(tmp_path, forked=True))
    assert [row["weight_versions"] for row in rows] == [["7", "8"], ["7"], ["7"], ["7"]]
    plain: dict[str, Any] = {"reward": 1.0, "side": {}, "turn_rewards": {}}
    with pytest.warns(LeftOutWarning, match="only known to lie between two: weight_versions lists both"):
        (row,) = slime_samples([a_sample(version_index=np.array([-1, -1, 1, 1], np.int32), **plain)])
    assert row["weight_versions"] == ["7", "8"]


def test_the_pt_file_is_what_slime_loads_as_debug_rollout_data(tmp_path: Path) -> None:
    samples = recorded_group(tmp_path)
    assert write_samples_for("slime", samples, tmp_path / "4.pt").samples == 3
    loaded = torch.load(tmp_path / "4.pt", weights_only=True)
    assert loaded["rollout_id"] == 4
    assert loaded["samples"] == slime_samples(samples)
    write_samples_for("slime", samples, tmp_path / "4.jsonl")
    lines = (tmp_path / "4.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == loaded["samples"]


def test_a_pt_file_holds_one_step(tmp_path: Path) -> None:
    two = [a_sample(reward=1.0), a_sample(reward=1.0, step=9)]
    with pytest.raises(ExportError, match="holds one step, but the samples are of 2; choose one with --step"):
        write_samples_for("slime", two, tmp_path / "both.pt")
    assert not (tmp_path / "both.pt").exists()


def test_routed_experts_have_a_row_for_each_token_that_was_fed(tmp_path: Path) -> None:
    experts = np.arange(4 * 2 * 3, dtype=np.int32).reshape(4, 2, 3)
    routed = a_sample(reward=1.0, side={"routed_experts": SampleSide(experts, None, ((3, 4),))})
    (row,) = slime_samples([routed])
    assert row["rollout_routed_experts"].tolist() == experts[:3].tolist()
    write_samples_for("slime", [routed], tmp_path / "3.pt")
    (loaded,) = torch.load(tmp_path / "3.pt", weights_only=True)["samples"]
    assert loaded["rollout_routed_experts"].dtype == torch.int32
    write_samples_for("slime", [routed], tmp_path / "3.jsonl")
    assert json.loads((tmp_path / "3.jsonl").read_text())["rollout_routed_experts"] == experts[:3].tolist()
    # slime looks at the first sample to know what all have.
    with pytest.warns(LeftOutWarning, match="routed experts are not whole in all samples"):
        mixed = slime_samples([routed, a_sample(reward=1.0, side={})])
    assert not any("rollout_routed_experts" in row for row in mixed)


def kept(rows: list[list[int]], start: int | None = None) -> dict[str, Any]:
    values = np.array([token for row in rows for token in row], np.int32)
    return {"kept_ids": {"values": values, "counts": [len(row) for row in rows], "start": start}}


def truncated_samples(folder: Path) -> list[Sample]:
    """Two turns that continue each other, cut by top-p, and a rollout that was sampled among all ids."""
    cut: dict[str, Any] = {"logprob_kind": "after_truncation"}
    with rolltape.open(folder / "run", name="exp") as tape:
        with tape.rollout(task_id="task", attempt=0) as rollout:
            talk = Conversation(rollout.session(), 0)
            first = talk.turn(prompt=3, reply=2, side_arrays=kept([[10, 11], [12]]), **cut)
            # What came before an interruption broke off without its kept ids.
            talk.turn(first, prompt=2, reply=3, side_arrays=kept([[14, 15], [16]], start=8), **cut)
            rollout.finish(reward=1.0)
        with tape.rollout(task_id="task", attempt=1) as rollout:
            Conversation(rollout.session(), 1).turn(prompt=2, reply=2)
            rollout.finish(reward=0.0)
    return list(samples_of_group(list(rolltape.read(folder / "run").rollouts())))


def test_the_ids_that_top_p_kept_follow_their_tokens_through_a_chain_of_turns(tmp_path: Path) -> None:
    samples = truncated_samples(tmp_path)
    with pytest.warns(LeftOutWarning, match="with kept ids for a part of their tokens: the other tokens are masked"):
        chained, uncut = slime_samples(samples)
    assert chained["loss_mask"] == [1, 1, 0, 0, 0, 1, 1]
    assert chained["rollout_top_p_token_ids"] == [10, 11, 12, 14, 15, 16]
    assert chained["rollout_top_p_token_offsets"] == [0, 2, 3, 3, 3, 3, 5, 6]
    assert (uncut["loss_mask"], uncut["rollout_top_p_token_offsets"]) == ([1, 1], [0, 0, 0])
    write_samples_for("slime", samples, tmp_path / "0.pt")
    assert torch.load(tmp_path / "0.pt", weights_only=True)["samples"] == [chained, uncut]


def test_logprobs_after_truncation_are_reported_only_where_kept_ids_are_not_carried(tmp_path: Path) -> None:
    samples = truncated_samples(tmp_path)
    with warnings.catch_warnings(record=True) as carried:
        warnings.simplefilter("always")
        slime_samples(samples)
    assert not any("after truncation" in str(one.message) for one in carried)
    left_out = write_samples_for("trl", samples, tmp_path / "rows.jsonl").left_out
    assert any("1 of 2 samples whose logprobs are after truncation" in sentence for sentence in left_out)


def test_tokens_without_a_logprob_are_refused_unless_slime_computes_its_own() -> None:
    lacking = a_sample(reward=1.0, logprobs=np.full(4, np.nan, np.float32), policy=cut_policy("slime").key)
    with pytest.raises(ExportError, match="slime needs a logprob for each trained token"):
        slime_samples([lacking])
    assert slime_samples([lacking], logprobs=False)[0]["rollout_log_probs"] is None


def test_logprobs_in_double_precision_stay_as_they_were() -> None:
    wide = a_sample(reward=1.0, logprobs=np.array([np.nan, np.nan, -1 / 3, -0.5]))
    assert slime_samples([wide])[0]["rollout_log_probs"] == [-1 / 3, 0.0]

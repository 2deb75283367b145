"""prime-rl's training sample, against the fields and the checks that it documents."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import rolltape
from exported import a_sample
from framework_samples import CLOSE, Conversation, causal_model, model_logprobs, recorded_group, shifted
from rolltape.errors import ExportError
from rolltape.export.formats import Choices, LeftOutWarning, training_samples, write_samples_for
from rolltape.records.sample import SampleSide
from rolltape.records.turn import LogprobKind
from rolltape.samples import samples_of_group

pytestmark = pytest.mark.filterwarnings("ignore::rolltape.export.formats.LeftOutWarning")


class RoutedExperts(msgspec.Struct):
    """prime-rl's, by its fields."""

    data: bytes
    shape: list[int]
    dtype: str


class TrainingSample(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """prime-rl's, by those of its fields that concern text."""

    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    temperatures: list[float]
    env_name: str
    ref_logprobs: list[float] | None = None
    routed_experts: RoutedExperts | None = None
    rl_weights: list[float] | None = None
    ce_weights: list[float] | None = None
    ref_kl_weights: list[float] | None = None
    advantages: list[float] | None = None


def taken(row: dict[str, Any]) -> TrainingSample:
    """A row as prime-rl takes it: every stream as long as the ids, and its bytes as many as its shape says."""
    sample = msgspec.convert(row, TrainingSample)
    streams = (sample.mask, sample.logprobs, sample.temperatures, sample.advantages)
    assert {len(stream) for stream in streams if stream is not None} == {len(sample.token_ids)}
    if sample.routed_experts is not None:
        assert sample.routed_experts.shape[0] == len(sample.token_ids)
        size = np.dtype(sample.routed_experts.dtype).itemsize
        assert len(sample.routed_experts.data) == np.prod(sample.routed_experts.shape) * size
    return sample


def test_streams_lie_along_all_ids_without_a_shift(tmp_path: Path) -> None:
    samples = recorded_group(tmp_path, forked=True)
    for sample, row in zip(samples, training_samples(samples, env_name="math"), strict=True):
        made = taken(row)
        trained = np.array(made.mask)
        assert made.token_ids == sample.ids.tolist()
        assert trained.tolist() == sample.trained_mask.tolist()
        given, computed = np.array(made.logprobs), np.array([0.0, *model_logprobs(made.token_ids)])
        assert np.abs(computed - given)[trained].max() < CLOSE
        assert np.abs(computed - shifted(given).numpy())[trained].max() > 0.5
        assert not given[~trained].any()
        assert made.advantages is not None
        assert np.array(made.advantages)[trained].tolist() == [np.float32(sample.advantage)] * sample.trained_tokens
        assert not np.array(made.advantages)[~trained].any()


def test_what_is_not_carried_is_said(tmp_path: Path) -> None:
    with pytest.warns(LeftOutWarning) as said:
        training_samples(recorded_group(tmp_path, forked=True), env_name="math")
    assert sorted(str(warning.message).partition(": samples ")[2].partition(":")[0] for warning in said) == [
        "of rollouts that forked",
        "sampled by several weight versions",
    ]


def test_each_trained_token_has_the_temperature_of_its_turn() -> None:
    warm = a_sample(advantage=1.0, logprob_kind=LogprobKind.AFTER_TEMPERATURE)
    (row,) = training_samples([warm], env_name="math")
    assert np.array(row["temperatures"])[warm.trained_mask].tolist() == [1.0]
    (row,) = training_samples([warm], env_name="math", temperature={"r.0.0.0": 0.7})
    assert np.array(row["temperatures"])[warm.trained_mask].tolist() == [0.7]
    with pytest.raises(
        ExportError, match=r"turn r\.0\.0\.0: no temperature was recorded, and prime-rl needs one; give"
    ):
        training_samples([a_sample(advantage=1.0, temperature=None)], env_name="math")


@pytest.mark.parametrize("new", [2, 0], ids=["with a prompt between the replies", "without"])
def test_logits_divided_by_the_temperature_at_their_own_place_give_every_recorded_logprob(
    tmp_path: Path, new: int
) -> None:
    with rolltape.open(tmp_path / "run", name="exp") as tape, tape.rollout(task_id="task") as rollout:
        conversation = Conversation(rollout.session(), seed=3)
        after = conversation.turn(prompt=4, reply=3, temperature=0.5)
        conversation.turn(after, prompt=new, reply=4, temperature=1.5)
        rollout.finish(reward=1.0)
    (recorded,) = rolltape.read(tmp_path / "run").rollouts()
    (sample,) = samples_of_group([recorded])
    (row,) = training_samples([sample], env_name="math")
    # As its trainer does: the logits of each place by the temperature there, then the logprob of the next id.
    ids = torch.tensor([row["token_ids"]])
    with torch.no_grad():
        scaled = causal_model()(ids).logits[0] / torch.tensor(row["temperatures"])[:, None]
    found = scaled.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
    trained = torch.tensor(row["mask"])[1:]
    assert (found - torch.tensor(row["logprobs"])[1:])[trained].abs().max() < CLOSE


def test_raw_logprobs_are_not_passed_off_as_tempered_ones() -> None:
    raw = a_sample(advantage=1.0, logprob_kind=LogprobKind.RAW)
    with pytest.raises(
        ExportError, match=r"logprobs of turn r\.0\.0\.0 are raw, but prime-rl compares them .* at temperature 0\.7"
    ):
        training_samples([raw], env_name="math", temperature=0.7)
    assert training_samples([raw], env_name="math", temperature=1.0)


def test_routed_experts_are_bytes_with_a_row_of_zeros_for_the_last_token() -> None:
    experts = np.arange(4 * 2 * 3, dtype=np.int16).reshape(4, 2, 3)
    routed = a_sample(advantage=1.0, side={"routed_experts": SampleSide(experts, None, ((3, 4),))})
    made = taken(training_samples([routed], env_name="math")[0])
    assert made.routed_experts is not None
    whole = np.frombuffer(made.routed_experts.data, made.routed_experts.dtype).reshape(made.routed_experts.shape)
    assert whole[:3].tolist() == experts[:3].tolist()
    assert not whole[3].any()


@pytest.mark.parametrize(
    "side",
    [
        SampleSide(np.ones((4, 2, 3), np.int32), None, ((0, 2),)),
        SampleSide(np.ones((4, 6), np.int32), None, ()),
        SampleSide(np.ones(4, np.int32), np.ones(4, np.int32), ()),
    ],
    ids=["not of all tokens", "flat rows", "ragged"],
)
def test_routed_experts_that_cannot_be_replayed_are_left_out_and_said(side: SampleSide) -> None:
    with pytest.warns(LeftOutWarning, match=r"with side arrays \(routed_experts\): not carried"):
        (row,) = training_samples([a_sample(advantage=1.0, side={"routed_experts": side})], env_name="math")
    assert "routed_experts" not in row


def test_lines_of_the_file_are_the_samples(tmp_path: Path) -> None:
    samples = recorded_group(tmp_path)
    written = write_samples_for("prime-rl", samples, tmp_path / "s.jsonl", Choices(env_name="math"))
    assert written == (3, [])
    lines = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert lines == training_samples(samples, env_name="math")
    experts = SampleSide(np.arange(24, dtype=np.int32).reshape(4, 2, 3), None, ((3, 4),))
    routed = a_sample(advantage=1.0, side={"routed_experts": experts})
    write_samples_for("prime-rl", [routed], tmp_path / "r.jsonl", Choices(env_name="math"))
    # Bytes are base64 in JSON, which msgspec knows to read where a field is of bytes.
    line = msgspec.json.decode((tmp_path / "r.jsonl").read_bytes(), type=TrainingSample)
    assert line == taken(training_samples([routed], env_name="math")[0])


def test_the_name_that_prime_rl_keeps_for_itself_is_refused() -> None:
    with pytest.raises(ExportError, match="env_name is 'all'"):
        training_samples([a_sample(advantage=1.0)], env_name="all")

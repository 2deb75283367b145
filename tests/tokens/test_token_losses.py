"""What is exported as masked is what the gradient of each loss shows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
from verl.workers.config import ActorConfig

from rolltape.errors import RecordError
from rolltape.tokens import (
    CrossEntropy,
    Dppo,
    Ipo,
    LossSpec,
    OnPolicyDistillation,
    PpoClip,
    TokenExporter,
    parse_loss,
)
from token_batches import exported, packed, sequence_columns

INF, NAN = float("inf"), float("nan")

# The policy-gradient term of each loss, for one token each, written down from its definition. What a loss drops is
# taken out before anything is computed of it, so that its gradient is zero and not zero times infinity.


def dppo_term(loss: Any, trainer: Tensor, c: dict[str, Tensor]) -> Tensor:
    moved = trainer.detach().exp() - c["inference_logprobs"].exp()
    dropped = torch.where(c["advantages"] > 0, moved > loss.mask_high, moved < -loss.mask_low)
    return _kept(~dropped, lambda kept: c["advantages"][kept] * (trainer - c["inference_logprobs"])[kept].exp())


def ipo_term(loss: Any, trainer: Tensor, c: dict[str, Tensor]) -> Tensor:
    moved = trainer.detach().exp() - c["inference_logprobs"].exp()
    dropped = moved.abs() > loss.threshold
    return _kept(~dropped, lambda kept: c["advantages"][kept] * (trainer - c["inference_logprobs"])[kept].exp())


def distillation_term(loss: Any, trainer: Tensor, c: dict[str, Tensor]) -> Tensor:
    dropped = trainer.detach().exp() - c["inference_logprobs"].exp() < -0.2
    signal = (c["reference_logprobs"] - trainer).detach()
    return _kept(~dropped, lambda kept: signal[kept] * (trainer - c["inference_logprobs"])[kept].exp())


def ppo_term(loss: Any, trainer: Tensor, c: dict[str, Tensor]) -> Tensor:
    ratio = (trainer - c["old_logprobs" if "old_logprobs" in c else "inference_logprobs"]).exp()
    clipped = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
    term = torch.minimum(ratio * c["advantages"], clipped * c["advantages"])
    if loss.dual_clip is not None:
        bounded = torch.maximum(term, loss.dual_clip * c["advantages"])
        term = torch.where(c["advantages"] < 0, bounded, term)
    return term.sum()


def _kept(keep: Tensor, term: Callable[[Tensor], Tensor]) -> Tensor:
    return term(keep.nonzero()[:, 0]).sum()


REFERENCES: dict[type[LossSpec], Callable[[Any, Tensor, dict[str, Tensor]], Tensor]] = {
    Dppo: dppo_term,
    Ipo: ipo_term,
    OnPolicyDistillation: distillation_term,
    PpoClip: ppo_term,
}
LOSSES: list[LossSpec] = [
    Dppo(),
    Dppo(mask_low=0.05, mask_high=0.3),
    Ipo(),
    Ipo(threshold=0.02),
    OnPolicyDistillation(),
    PpoClip(),
    PpoClip(clip_low=0.1, clip_high=0.28),
    PpoClip(clip_low=0.2, clip_high=0.28, dual_clip=1.5),
]
every_loss = pytest.mark.parametrize("loss", LOSSES, ids=repr)


def gradient(loss: LossSpec, columns: dict[str, Tensor]) -> Tensor:
    """Of the policy-gradient terms with respect to the trainer's logprobs, in the precision of the columns."""
    given = {name: values for name, values in columns.items() if values.is_floating_point()}
    trainer = given["trainer_logprobs"].clone().requires_grad_()
    (found,) = torch.autograd.grad(REFERENCES[type(loss)](loss, trainer, given), trainer)
    return found


def bare(columns: dict[str, Tensor], *without: str) -> dict[str, Tensor]:
    leave = ("old_logprobs", "rl_weights", "ce_weights", "ref_kl_weights", *without)
    return {name: values for name, values in columns.items() if name not in leave}


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("only", ["", "trainer_logprobs"], ids=["all columns", "the trainer's logprobs"])
def test_masked_is_where_the_gradient_is_zero(loss: LossSpec, dtype: torch.dtype, only: str, tmp_path: Path) -> None:
    columns = bare(sequence_columns(20_000, seed=1))
    is_half = {name: values.is_floating_point() and name.startswith(only) for name, values in columns.items()}
    half = {name: values.to(dtype) if is_half[name] else values for name, values in columns.items()}
    (record,) = exported(tmp_path, packed([half]), loss=loss)
    zero = (gradient(loss, half) == 0).numpy()
    trained = columns["trained_mask"].numpy()
    assert record.masked is not None
    assert (record.masked == (zero & trained)).all()
    assert 0.01 < record.masked[trained].mean() < 0.99, "neither all nor none, or the test shows nothing"


EDGES = [0.0, -0.1, -0.2, -1.0, -2.0, -30.0, -200.0, -INF, NAN]


@every_loss
def test_masks_hold_at_the_edges(loss: LossSpec, tmp_path: Path) -> None:
    pairs = torch.tensor(
        [
            (trainer, inference, advantage, reference)
            for trainer in EDGES
            for inference in EDGES
            for advantage in (1.0, -1.0, 0.0, -0.0, 1e-38, NAN)
            for reference in (trainer, -0.5)
        ]
    )
    columns = {
        "ids": torch.zeros(len(pairs), dtype=torch.int64),
        "trained_mask": torch.ones(len(pairs), dtype=torch.bool),
        "trainer_logprobs": pairs[:, 0],
        "inference_logprobs": pairs[:, 1],
        "advantages": pairs[:, 2],
        "reference_logprobs": pairs[:, 3],
    }
    (record,) = exported(tmp_path, packed([columns]), loss=loss)
    assert record.masked is not None
    shown = gradient(loss, columns)
    # A clipped ratio that is infinite has the gradient zero times infinity, which says nothing.
    ratio = (columns["trainer_logprobs"] - columns["inference_logprobs"]).exp()
    tells = ~ratio.isinf() if type(loss) is PpoClip else torch.ones(len(pairs), dtype=torch.bool)
    wrong = (torch.from_numpy(record.masked) != (shown == 0)) & tells
    assert not wrong.any(), [pairs[at].tolist() for at in wrong.nonzero()[:5, 0]]


def test_a_ratio_that_overflows_is_clipped(tmp_path: Path) -> None:
    columns = {
        "ids": torch.zeros(3, dtype=torch.int64),
        "trained_mask": torch.ones(3, dtype=torch.bool),
        "trainer_logprobs": torch.zeros(3),
        "inference_logprobs": torch.full((3,), -INF),
        "advantages": torch.tensor([1.0, -1.0, 0.0]),
    }
    (record,) = exported(tmp_path, packed([columns]), loss=PpoClip())
    assert record.masked is not None
    assert record.masked.tolist() == [True, False, False]


@pytest.mark.parametrize(("advantage", "side"), [(1.0, "masked_high"), (-1.0, "masked_low")])
def test_a_ratio_exactly_at_its_bound_is_not_masked(advantage: float, side: str, tmp_path: Path) -> None:
    bounds = {"masked_high": 2.0, "masked_low": 0.5}
    # log(2) and log(0.5) are chosen so that their exponential in float32 is the bound itself.
    at_bound = torch.tensor(bounds[side]).log()
    assert at_bound.exp() == bounds[side]
    beyond = torch.nextafter(at_bound, at_bound * 2)
    while beyond.exp() == bounds[side]:
        beyond = torch.nextafter(beyond, at_bound * 2)
    columns = {
        "ids": torch.zeros(2, dtype=torch.int64),
        "trained_mask": torch.ones(2, dtype=torch.bool),
        "trainer_logprobs": torch.stack([at_bound, beyond]),
        "inference_logprobs": torch.zeros(2),
        "advantages": torch.full((2,), advantage),
    }
    loss = PpoClip(clip_low=0.5, clip_high=1.0)
    (record,) = exported(tmp_path, packed([columns]), loss=loss)
    assert (gradient(loss, columns) == 0).tolist() == [False, True]
    assert record.masked is not None
    assert record.masked.tolist() == [False, True]
    assert getattr(record, side).tolist() == [False, True]


def test_a_probability_that_moved_exactly_to_the_threshold_is_not_masked(tmp_path: Path) -> None:
    columns = {
        "ids": torch.zeros(2, dtype=torch.int64),
        "trained_mask": torch.ones(2, dtype=torch.bool),
        "trainer_logprobs": torch.zeros(2),
        "inference_logprobs": torch.tensor([0.5, 0.25]).log(),
        "advantages": torch.ones(2),
    }
    for loss in (Dppo(mask_high=0.5), Ipo(threshold=0.5)):
        (record,) = exported(tmp_path / type(loss).__name__, packed([columns]), loss=loss)
        assert record.masked_high is not None
        assert record.masked_high.tolist() == [False, True]


def test_distillation_masks_one_side_alone_and_ignores_advantages(tmp_path: Path) -> None:
    columns = {
        "ids": torch.zeros(3, dtype=torch.int64),
        "trained_mask": torch.ones(3, dtype=torch.bool),
        "trainer_logprobs": torch.tensor([0.9, 0.1, 0.5]).log(),
        "inference_logprobs": torch.tensor([0.1, 0.9, 0.5]).log(),
        "reference_logprobs": torch.tensor([0.5, 0.5, 0.4]).log(),
        "advantages": torch.zeros(3),
    }
    (record,) = exported(tmp_path, packed([columns]), loss=OnPolicyDistillation())
    assert record.masked is not None
    assert record.masked_high is not None
    assert record.masked_low is not None
    assert record.masked.tolist() == record.masked_low.tolist() == [False, True, False]
    assert not record.masked_high.any()


def test_sides_are_those_of_the_advantage(tmp_path: Path) -> None:
    columns = {
        "ids": torch.zeros(5, dtype=torch.int64),
        "trained_mask": torch.tensor([1, 1, 1, 1, 0]),
        "trainer_logprobs": torch.tensor([0.9, 0.9, 0.1, 0.1, 0.9]).log(),
        "inference_logprobs": torch.tensor([0.1, 0.1, 0.9, 0.9, 0.1]).log(),
        "advantages": torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0]),
    }
    (record,) = exported(tmp_path, packed([columns]), loss=Dppo())
    assert record.masked_high is not None
    assert record.masked_low is not None
    assert record.masked_high.tolist() == [True, False, False, False, False]
    assert record.masked_low.tolist() == [False, False, False, True, False]


def test_clipping_is_by_the_old_policy_where_there_is_one(tmp_path: Path) -> None:
    columns = bare(sequence_columns(5_000, seed=3))
    columns["old_logprobs"] = columns["trainer_logprobs"] + torch.randn(5_000) * 0.3
    loss = PpoClip()
    (record,) = exported(tmp_path, packed([columns]), loss=loss)
    assert record.masked is not None
    assert record.ratio is not None
    trained = columns["trained_mask"].numpy()
    assert (record.masked == ((gradient(loss, columns) == 0).numpy() & trained)).all()
    assert torch.allclose(
        torch.from_numpy(record.ratio.copy()), (columns["trainer_logprobs"] - columns["inference_logprobs"]).exp()
    )


@pytest.mark.parametrize(("loss", "weights"), [(Dppo(), "rl_weights"), (OnPolicyDistillation(), "ref_kl_weights")])
def test_a_token_without_weight_is_masked(loss: LossSpec, weights: str, tmp_path: Path) -> None:
    columns = bare(sequence_columns(50, trained=[True] * 50))
    columns["trainer_logprobs"] = columns["inference_logprobs"] + 0.01
    columns[weights] = torch.tensor([0.0, 1.0] * 25)
    (record,) = exported(tmp_path, packed([columns]), loss=loss)
    assert record.masked is not None
    assert record.masked.tolist() == [True, False] * 25


def mixed(length: int = 1_000, seed: int = 0) -> dict[str, Tensor]:
    """A sequence whose tokens train with one of three losses each, with two at once, or with none."""
    columns = bare(sequence_columns(length, seed=seed, trained=[True] * length))
    random = torch.Generator().manual_seed(seed)
    columns["trainer_logprobs"] = columns["inference_logprobs"] + torch.randn(length, generator=random)
    for name in ("rl_weights", "ref_kl_weights", "ce_weights"):
        columns[name] = torch.rand(length, generator=random) * (torch.rand(length, generator=random) < 0.4)
    return columns


def mixed_gradient(loss: LossSpec, columns: dict[str, Tensor]) -> Tensor:
    """Of the weighted sum of the three losses, each over the tokens with its weight."""
    trainer = columns["trainer_logprobs"].clone().requires_grad_()
    total = torch.zeros(())
    terms = {"rl_weights": REFERENCES[type(loss)], "ref_kl_weights": distillation_term}
    for name, term in terms.items():
        for at in columns[name].nonzero()[:, 0].tolist():
            own = {key: values[at : at + 1] for key, values in columns.items() if values.is_floating_point()}
            total = total - columns[name][at] * term(loss, trainer[at : at + 1], own)
    total = total - (columns["ce_weights"] * trainer).sum()
    (found,) = torch.autograd.grad(total, trainer)
    return found


@pytest.mark.parametrize("loss", [Dppo(), Ipo(), PpoClip()], ids=repr)
def test_each_token_trains_with_the_losses_that_have_a_weight_there(loss: LossSpec, tmp_path: Path) -> None:
    columns = mixed()
    (record,) = exported(tmp_path, packed([columns]), loss=loss)
    assert record.masked is not None
    assert record.masked_high is not None
    assert record.masked_low is not None
    assert (record.masked == (mixed_gradient(loss, columns) == 0).numpy()).all()
    by_one = [(columns[name] != 0).numpy() for name in ("rl_weights", "ref_kl_weights", "ce_weights")]
    assert not record.masked[by_one[2]].any(), "cross-entropy drops no token"
    assert record.masked[~np.logical_or.reduce(by_one)].all()
    assert 0 < record.masked[by_one[0] & by_one[1] & ~by_one[2]].mean() < 1
    assert not ((record.masked_high | record.masked_low) & ~record.masked).any()


def test_a_token_of_another_model_has_no_mismatch(tmp_path: Path) -> None:
    columns = mixed(200)
    alone = ((columns["ce_weights"] != 0) & (columns["rl_weights"] == 0) & (columns["ref_kl_weights"] == 0)).numpy()
    (record,) = exported(tmp_path, packed([columns]), loss=Dppo())
    for name in ("log_ratio", "ratio", "mismatch_kl", "prob_delta"):
        assert (np.isnan(record.columns()[name]) == alone).all(), name
    assert 0 < alone.mean() < 1


def test_weights_that_are_all_zero_mask_every_token(tmp_path: Path) -> None:
    columns = bare(sequence_columns(20, trained=[True] * 20))
    columns["inference_logprobs"][::3] = -INF  # an infinite ratio times a weight of zero is no number
    (record,) = exported(tmp_path, packed([{**columns, "rl_weights": torch.zeros(20)}]), loss=Dppo())
    assert record.masked is not None
    assert record.masked.all()


def test_weights_that_are_all_zero_need_nothing_that_their_loss_reads(tmp_path: Path) -> None:
    columns = bare(sequence_columns(20, trained=[True] * 20), "reference_logprobs", "advantages")
    weights = {"rl_weights": torch.zeros(20), "ref_kl_weights": torch.zeros(20), "ce_weights": torch.ones(20)}
    (record,) = exported(tmp_path / "a", packed([columns | weights]), loss=Dppo())
    assert record.masked is not None
    assert not record.masked.any()
    weights["ref_kl_weights"][[3, 4]] = 0.5
    with TokenExporter(tmp_path / "b", rank=0, world_size=1, loss=Dppo()) as exporter:
        exporter.export(7, 0, *packed([columns | weights]))
    (problem,) = exporter.report().problems
    assert problem == (
        "step 7, micro step 0: 2 tokens have ref_kl_weights that are not zero, but the batch has no "
        "reference_logprobs; give it"
    )


def test_a_sequence_that_trains_outside_its_mask_by_weights_is_written(tmp_path: Path) -> None:
    sequences = [bare(sequence_columns(6, seed=seed, trained=[False] * 6)) for seed in range(2)]
    sequences[0]["ce_weights"], sequences[1]["ce_weights"] = torch.tensor([0, 0, 0, 1, 1, 0.0]), torch.zeros(6)
    (record,) = exported(tmp_path, packed(sequences), loss=Dppo())
    assert (record.micro_sequence, record.trained_tokens) == (0, 0)


def test_weights_of_reinforcement_learning_need_the_loss_that_they_are_for(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="batch has rl_weights, but the loss is OnPolicyDistillation; give the loss"):
        exported(tmp_path, packed([mixed(20)]), loss=OnPolicyDistillation())


@pytest.mark.parametrize(("low", "high", "dual"), [(0.2, 0.2, 3.0), (0.1, 0.28, 1.5)])
def test_clipping_is_that_of_verl(low: float, high: float, dual: float, tmp_path: Path) -> None:
    actor = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=dual,
    )
    columns = bare(sequence_columns(20_000, seed=5), "inference_logprobs")
    columns["old_logprobs"] = columns["trainer_logprobs"] + torch.randn(20_000) * 0.4
    columns["advantages"][::7] = 0
    trainer = columns["trainer_logprobs"].clone().requires_grad_()
    trained = columns["trained_mask"]
    loss, _ = compute_policy_loss_vanilla(
        columns["old_logprobs"][None], trainer[None], columns["advantages"][None], trained[None], config=actor
    )
    (shown,) = torch.autograd.grad(loss, trainer)
    (record,) = exported(tmp_path, packed([columns]), loss=PpoClip(clip_low=low, clip_high=high, dual_clip=dual))
    assert record.masked is not None
    assert (torch.from_numpy(record.masked.copy()) == ((shown == 0) & trained)).all()


def test_the_trainers_own_mask_takes_the_place_of_a_computed_one(tmp_path: Path) -> None:
    batch, outputs = packed([bare(sequence_columns(40, trained=[True] * 40))])
    own = torch.rand(40) < 0.5
    (record,) = exported(tmp_path, (batch, {**outputs, "masked": own}), loss=Dppo())
    assert record.masked is not None
    assert record.masked.tolist() == own.tolist()
    assert record.masked_high is None
    assert record.loss is None


@pytest.mark.parametrize("side", ["masked_high", "masked_low"])
def test_the_trainers_own_sides_are_not_written_over(side: str, tmp_path: Path) -> None:
    batch, outputs = packed([bare(sequence_columns(40, trained=[True] * 40))])
    own = torch.rand(40) < 0.5
    (record,) = exported(tmp_path, (batch, {**outputs, side: own}), loss=Dppo())
    assert getattr(record, side).tolist() == own.tolist()
    assert record.masked is None, "not said, and not to be guessed beside the trainer's own"


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if type(loss) is PpoClip], ids=repr)
def test_clipping_by_the_old_policy_needs_no_inference_logprobs(loss: LossSpec, tmp_path: Path) -> None:
    columns = bare(sequence_columns(5_000, seed=4), "inference_logprobs")
    columns["old_logprobs"] = columns["trainer_logprobs"] + torch.randn(5_000) * 0.3
    (record,) = exported(tmp_path, packed([columns]), loss=loss)
    assert record.masked is not None
    trained = columns["trained_mask"].numpy()
    assert (record.masked == ((gradient(loss, columns) == 0).numpy() & trained)).all()
    assert record.ratio is None


def test_a_loss_without_what_it_looks_at_is_refused(tmp_path: Path) -> None:
    for loss, column in (
        (Dppo(), "advantages"),
        (OnPolicyDistillation(), "reference_logprobs"),
        (Ipo(), "inference_logprobs"),
        (PpoClip(), "inference_logprobs"),
    ):
        batch, outputs = packed([bare(sequence_columns(4), column)])
        with pytest.raises(RecordError, match=f"step 7, micro step 0: .* needs {column}"):
            exported(tmp_path, (batch, outputs), loss=loss)


@pytest.mark.parametrize("loss", [*LOSSES, CrossEntropy()], ids=repr)
def test_a_specification_is_data(loss: LossSpec) -> None:
    assert parse_loss(loss.to_json()) == loss


def test_thresholds_may_be_numbers_of_numpy_and_torch() -> None:
    loss = PpoClip(clip_low=np.float32(0.5), clip_high=torch.tensor(1.0))  # type: ignore[arg-type]
    assert loss.to_json() == PpoClip(clip_low=0.5, clip_high=1.0).to_json()


def test_thresholds_are_not_negative() -> None:
    with pytest.raises(RecordError, match=r"Dppo: mask_low is -0\.2"):
        Dppo(mask_low=-0.2)
    with pytest.raises(RecordError, match="clip_high is nan"):
        PpoClip(clip_high=NAN)

"""The shipped model trains on what was collected, and on nothing else: each way to get it wrong is found out.

Two steps of the example in small. The long form, in which the reward rises, is `python -m examples.train_tiny`.
"""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from examples.train_tiny.__main__ import main
from examples.train_tiny.faults import Fault, spoiled, spoiled_rollouts
from examples.train_tiny.loss import grpo_loss
from examples.train_tiny.proof import Proof, ProofError
from examples.train_tiny.train import Training, trained_on, training
from examples.train_tiny.trainer import Recipe

import rolltape
from live_jobs import wait_until
from rolltape.cli import run as rolltape_command
from rolltape.integrations.torch import batches
from rolltape.records.sample import Sample
from rolltape.tokens import PpoClip, read_tokens

SMALL = Recipe(tasks=4, group_size=4)

FOUND_OUT = {
    Fault.MASK_SHIFTED: "which are no whole reply to its prompt",
    Fault.END_OF_TURN_DROPPED: "which are no whole reply to its prompt",
    Fault.RETOKENIZED: "trained tokens have a ratio that is not 1; at worst token",
    Fault.WRONG_TEMPERATURE: "trained tokens have a ratio that is not 1; at worst token",
    Fault.VERSIONS_SWAPPED: "trained tokens have a ratio that is not 1; at worst token .* by weights 0",
}
FOUND_BY_TURNS = {
    Fault.ADVANTAGES_MIXED: r"has the advantage .*, its group's rewards give",
    Fault.ADVANTAGES_NEGATED: r"has the advantage .*, its group's rewards give",
    Fault.WEIGHTS_ONE: r"has the weight 1\.0000, its share of the rollout is 0\.",
    Fault.SAMPLE_LEFT_OUT: "turn .* must train, and does not",
    Fault.REPLY_TWICE: "which are no whole reply to its prompt",
    Fault.UNDELIVERED: "trains, and must not",
}


class Trained(NamedTuple):
    """A training after its first step, with what was collected for that and for the next."""

    run: Path
    loop: asyncio.Runner
    training: Training
    first: list[rolltape.Group]
    first_proof: Proof
    second: list[rolltape.Group]

    def learn(self, fault: Fault | None = None) -> Proof:
        return self.loop.run(self.training.learn(1, self.second, fault))

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: weight.clone() for name, weight in self.training.trainer.model.state_dict().items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    run = tmp_path_factory.mktemp("train") / "run"
    torch.set_num_threads(2)
    with asyncio.Runner() as loop:
        entered = training(run, 1, SMALL)
        it = loop.run(entered.__aenter__())
        try:
            first = loop.run(it.collect(0))
            proof = loop.run(it.learn(0, first))
            yield Trained(run, loop, it, first, proof, loop.run(it.collect(1)))
        finally:
            loop.run(entered.__aexit__(None, None, None))


def test_what_was_collected_has_tools_several_turns_and_forks(trained: Trained) -> None:
    samples = [sample for group in trained.first for sample in group.samples]
    turns = [turn for group in trained.first for rollout in group.rollouts for turn in rollout.turns]
    assert len(trained.first) == SMALL.tasks
    assert any(sample.uses_tools for sample in samples)
    assert any(sample.siblings > 1 for sample in samples)
    assert max(len({span.turn for span in sample.spans}) for sample in samples) > 1
    assert {turn.facts.sampling["temperature"] for turn in turns} == {0.7}


def test_at_the_first_update_every_ratio_is_one_and_all_stop_tokens_train(trained: Trained) -> None:
    proof = trained.first_proof
    assert proof.worst < 1e-3
    assert proof.trained > 500
    assert proof.trained == proof.expected.tokens
    assert proof.expected.stop_tokens == proof.expected.stopped_turns > 20


def test_the_engine_samples_by_the_new_weights_under_their_version(trained: Trained) -> None:
    assert {sample.versions for group in trained.first for sample in group.samples} == {(("0", "0"),)}
    assert {sample.versions for group in trained.second for sample in group.samples} == {(("1", "1"),)}
    assert rolltape.read(trained.run).versions() == ("0", "1")


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault not in FOUND_BY_TURNS])
def test_each_fault_is_found_out_before_a_weight_changes(trained: Trained, fault: Fault) -> None:
    before = trained.weights()
    with pytest.raises(ProofError, match=f"step 1: .*{FOUND_OUT[fault]}"):
        trained.learn(fault)
    assert all(torch.equal(before[name], weight) for name, weight in trained.weights().items())


@pytest.mark.parametrize("fault", FOUND_BY_TURNS)
def test_what_must_train_is_recomputed_from_the_raw_turns(trained: Trained, fault: Fault) -> None:
    """Every ratio is 1 here, and the samples agree with themselves: only the turns tell that something is wrong."""
    rollouts = [rollout for group in trained.second for rollout in group.rollouts]
    samples = trained_on(trained.second)
    _prove(samples, Proof(1, "1", rollouts))
    with pytest.raises(ProofError, match=f"step 1: .*{FOUND_BY_TURNS[fault]}"):
        _prove(spoiled(samples, fault, ["0", "1"]), Proof(1, "1", spoiled_rollouts(rollouts, fault)))


def _prove(samples: Sequence[Sample], proof: Proof) -> None:
    for batch in batches(samples, SMALL.batch_tokens):
        proof.see(batch, batch.inference_logprobs_bl, lambda batch, version: batch.inference_logprobs_bl)
    proof.check()


def test_samples_of_two_versions_prove_right_each_by_its_own_weights(trained: Trained) -> None:
    groups = [*trained.first, *trained.second]
    samples = trained_on(groups)
    proof = Proof(1, "1", [rollout for group in groups for rollout in group.rollouts])
    trainer = trained.training.trainer
    with torch.no_grad():
        for batch in batches(samples, SMALL.batch_tokens):
            by = {version: trainer.logprobs_by(batch, version, SMALL.temperature) for version in ("0", "1")}
            proof.see(batch, by["1"], lambda batch, version, by=by: by[version])  # type: ignore[misc]
    proof.check()
    assert proof.worst < 1e-3


def test_sound_samples_train_after_all_that(trained: Trained) -> None:
    before = trained.weights()
    proof = trained.learn()
    assert proof.worst < 1e-3
    assert proof.expected.stop_tokens == proof.expected.stopped_turns
    assert any(not torch.equal(before[name], weight) for name, weight in trained.weights().items())
    wait_until(lambda: any(read_tokens(trained.run, step=1, stable_only=True)))
    assert rolltape_command(["check", str(trained.run)]) == 0
    assert rolltape_command(["tokens", str(trained.run), "check", "--advantage", "normalized"]) == 0


def test_what_the_loss_saw_at_each_update_is_exported(trained: Trained) -> None:
    wait_until(lambda: any(read_tokens(trained.run, step=0, stable_only=True)))
    records = list(read_tokens(trained.run, step=0))
    wanted = sorted(sample.id for sample in trained_on(trained.first))
    assert sorted(str(record.sample) for record in records) == sorted(wanted * SMALL.updates)
    half = 1 + max(record.micro_step for record in records) // SMALL.updates
    for record in records:
        assert record.ratio is not None
        assert record.masked is not None
        off = np.abs(record.ratio[record.trained_mask] - 1)
        if record.micro_step < half:
            assert off.max() < 1e-3
            assert not record.masked.any()
    assert max(np.abs(one.log_ratio[one.trained_mask]).max() for one in records if one.log_ratio is not None) > 1e-2


def test_a_run_from_the_command_line_ends_green_and_with_a_fault_red(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--steps", "1", "--tasks", "2", "--group-size", "4", "--run", str(tmp_path)]
    assert main(small) == 0
    assert capsys.readouterr().out.splitlines()[-2].split()[:3] == ["seed", "first", "steps"]
    assert main([*small, "--seeds", "1", "--fault", "end-of-turn-dropped"]) == 1
    assert "train_tiny: step 0: " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(small)
    assert "is there already; remove it, or give another --run" in capsys.readouterr().err


def test_the_loss_has_the_gradient_of_the_clipped_objective() -> None:
    generator = torch.Generator().manual_seed(3)
    samples = [_sample(length, generator) for length in (5, 9, 7)]
    (batch,) = batches(samples, 10_000)
    noise_bl = 0.4 * torch.randn(batch.ids_bl.shape, generator=generator)
    inference_bl = batch.inference_logprobs_bl.nan_to_num(0.0)
    clip = PpoClip(clip_low=0.2, clip_high=0.28)

    ours_bl = (inference_bl + noise_bl).requires_grad_()
    torch.autograd.backward(grpo_loss(clip, batch, ours_bl, rollouts=3))

    plain_bl = (inference_bl + noise_bl).requires_grad_()
    ratio_bl = (plain_bl - inference_bl).exp()
    advantages_bl = batch.advantages_b[:, None]
    gain_bl = torch.minimum(ratio_bl * advantages_bl, ratio_bl.clamp(0.8, 1.28) * advantages_bl)
    means_b = (gain_bl * batch.trained_bl).sum(-1) / batch.trained_bl.sum(-1)
    torch.autograd.backward(-(means_b * batch.weights_b).sum() / 3)

    assert ours_bl.grad is not None
    assert plain_bl.grad is not None
    torch.testing.assert_close(ours_bl.grad, plain_bl.grad)
    assert 0 < int((ours_bl.grad != 0).sum()) < int(batch.trained_bl.sum())


def _sample(length: int, generator: torch.Generator) -> Any:
    """As much of a sample as a batch looks at."""

    class Row(NamedTuple):
        id: str
        ids: Any
        trained_mask: Any
        logprobs: Any
        advantage: float
        loss_weight: float

    trained = np.arange(length) >= 2
    logprobs = np.where(trained, -torch.rand(length, generator=generator).numpy(), np.nan).astype(np.float32)
    advantage = float(torch.randn((), generator=generator))
    return Row(str(length), np.arange(length, dtype=np.int32), trained, logprobs, advantage, 0.5)

"""Samples as batches for PyTorch: padded or packed, the model sees the same; ranks share one source."""

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import rolltape
from framework_samples import CLOSE, causal_model, recorded_group
from live_jobs import SUMS, function_engine, job
from rank_jobs import fail, train
from rolltape.integrations.torch import SampleBatch, SampleLoader, batches, pack, pad
from rolltape.records.policy import Advantage
from rolltape.records.rollout import EventKind
from rolltape.tokens import read_tokens


def trained_logprobs(batch: SampleBatch) -> list[float]:
    """Of the model, at the trained tokens."""
    with torch.no_grad():
        logits_blv = causal_model()(**batch.model_inputs()).logits
    logprobs_bl = logits_blv[:, :-1].log_softmax(-1).gather(-1, batch.ids_bl[:, 1:, None])[..., 0]
    found: list[float] = logprobs_bl[batch.trained_bl[:, 1:]].tolist()
    return found


def test_padded_and_packed_batches_give_the_model_the_same_samples(tmp_path: Path) -> None:
    samples = recorded_group(tmp_path, forked=True)
    recorded = [float(one) for sample in samples for one in sample.logprobs[sample.trained_mask]]
    for batch in (pad(samples), pack(samples)):
        assert trained_logprobs(batch) == pytest.approx(recorded, abs=CLOSE)
        assert batch.inference_logprobs_bl[batch.trained_bl].tolist() == pytest.approx(recorded)
        weights = batch.token_weights_bl[batch.trained_bl]
        assert weights.sum().item() == pytest.approx(len({sample.rollout for sample in samples}))
        advantages = [sample.advantage for sample in samples for _ in range(sample.trained_tokens)]
        assert batch.spread(batch.advantages_b)[batch.trained_bl].tolist() == pytest.approx(advantages)
    assert pack(samples).ids_bl.shape == (1, sum(len(sample.ids) for sample in samples))


def test_batches_hold_every_sample_once_within_the_limit(tmp_path: Path) -> None:
    samples = recorded_group(tmp_path, forked=True)
    longest = max(len(sample.ids) for sample in samples)
    for packed in (False, True):
        made = list(batches(samples, 2 * longest, packed=packed))
        assert sorted(one.id for batch in made for one in batch.samples) == sorted(one.id for one in samples)
        assert len(made) > 1
        assert all(batch.ids_bl.numel() <= 2 * longest for batch in made)


def test_a_loader_goes_on_behind_the_step_of_its_checkpoint(tmp_path: Path) -> None:
    with job(tmp_path / "run", function_engine(lambda prompt, wanted: "2")) as live:
        loader = SampleLoader(live, lambda step: SUMS[:2], steps=3, max_tokens=256)
        for step in loader:
            step.done()
            if step.step == 0:
                checkpoint = json.loads(json.dumps(loader.state_dict()))
    with job(tmp_path / "run", function_engine(lambda prompt, wanted: "2")) as live:
        loader = SampleLoader(live, lambda step: SUMS[:2], steps=3, max_tokens=256)
        loader.load_state_dict(checkpoint)
        again = list(loader)
    assert [step.step for step in again] == [1, 2]
    assert [group.again for step in again for group in step.groups] == [True] * 4


def test_a_loader_leaves_out_what_nothing_is_learned_from(tmp_path: Path) -> None:
    with job(tmp_path / "run", function_engine(lambda prompt, wanted: "2")) as live:
        (step,) = SampleLoader(live, lambda step: SUMS[:1], steps=1, max_tokens=256)
        (other,) = SampleLoader(live, lambda step: SUMS[1:2], steps=1, max_tokens=256, every_sample=True)
    assert (step.batches, step.rollouts, step.rewards) == ([], 0, [1.0, 1.0])
    assert (len(other.batches), other.rollouts, other.rewards) == (1, 2, [0.0, 0.0])


def test_a_loader_gives_samples_that_the_trainer_computes_advantages_for(tmp_path: Path) -> None:
    credit = rolltape.Credit(advantage=Advantage.NONE)
    with job(tmp_path / "run", function_engine(lambda prompt, wanted: "2"), credit=credit) as live:
        (step,) = SampleLoader(live, lambda step: SUMS[:1], steps=1, max_tokens=256)
    (batch,) = step.batches
    assert (len(batch.samples), step.rollouts) == (2, 2)
    assert batch.advantages_b.isnan().all()  # which no loss can take for "nothing is to be learned"


def run_ranks(target: Callable[[int, str, int], None], folder: Path) -> None:
    """Run a function as each of two ranks, in processes of their own."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=target, args=(rank, str(folder), 2)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(180)
    assert [process.exitcode for process in processes] == [0, 0]


def test_a_first_rank_that_fails_keeps_its_error_and_tells_the_others(tmp_path: Path) -> None:
    run_ranks(fail, tmp_path)
    first, second = ((tmp_path / f"rank-{rank}.txt").read_text() for rank in range(2))
    assert first == "ValueError: the dataset is gone"
    assert second == f"GroupsError: the first rank, which collects for all, failed with {first}"


def test_ranks_share_what_the_first_one_collects_in_equally_many_batches_which_they_can_all_export(
    tmp_path: Path,
) -> None:
    run_ranks(train, tmp_path)
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    run = rolltape.read(tmp_path / "run")
    for step in range(2):
        shares = [rank[step] for rank in ranks]
        wanted = [sample.id for one in run.rollouts(step=step) for sample in rolltape.linearize(one, "exact").samples()]
        assert sorted(one for share in shares for batch in share["batches"] for one in batch) == sorted(wanted)
        assert len(shares[0]["batches"]) == len(shares[1]["batches"]) > 0
        assert {share["rollouts"] for share in shares} == {len(wanted)}
        assert shares[0]["rewards"] == shares[1]["rewards"]
        exported = [record.sample for record in read_tokens(tmp_path / "run", step=step, stable_only=True)]
        assert sorted(filter(None, exported)) == sorted(wanted)
    assert [] in [batch for step in ranks[1] for batch in step["batches"]], "a blank batch is exported too"
    states = [event.data["state"] for event in run.events() if event.kind == EventKind.GROUP]
    assert states.count("done") == len(SUMS) + len(SUMS) - 1

"""Tinker's own clients sample for agents and train on what they did, at a service that speaks Tinker's protocol."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker

import rolltape
from integrations.forking_talk import FORKING, THOUGHT
from integrations.tinker_service import logprobs_of, tinker_service
from live_jobs import SUMS, tokenizer
from rolltape.collect.settings import CollectSettings
from rolltape.export.formats import LeftOutWarning
from rolltape.gateway.request import SamplingParams
from rolltape.integrations.tinker import TinkerGroups, group_datums
from rolltape.records.rollout import Status
from rolltape.records.turn import Finish, LogprobKind
from rolltape.tiny import shipped_model


def job(run: Path, sampler: tinker.SamplingClient, **settings: Any) -> TinkerGroups:
    given: dict[str, Any] = {
        "source": "sums",
        "group_size": 2,
        "model": str(shipped_model()),
        "thinking": False,
        "sampling": SamplingParams(temperature=1.0, max_tokens=32),
        **settings,
    }
    return TinkerGroups(run, collect=CollectSettings(**given), sampler=sampler, model="tiny")


def step(training: tinker.TrainingClient, live: TinkerGroups, groups: list[rolltape.Group], version: str) -> None:
    """A training step, as the docs have it."""
    training.forward_backward(group_datums(groups), "importance_sampling").result()
    training.optim_step(tinker.AdamParams(learning_rate=1e-5)).result()
    live.use(training.save_weights_and_get_sampling_client(), version)
    for group in groups:
        group.done()


def test_the_service_trains_on_what_it_sampled(tmp_path: Path) -> None:
    with tinker_service(lambda prompt, sampler: "2" if sampler == "sampler-1" else "3") as (service, training):
        with job(tmp_path / "run", training.save_weights_and_get_sampling_client()) as live:
            for number in range(2):
                step(training, live, live.request(SUMS[:2], step=number).wait(), str(number + 1))
        assert service.steps == 2
        stop = service.sampled[0]["sampling_params"]["stop"]
        assert [one["sampling_session_id"] for one in service.sampled] == ["sampler-1"] * 4 + ["sampler-2"] * 4
    run = rolltape.read(tmp_path / "run")
    turns = [turn for rollout in run.rollouts() for turn in rollout.turns]
    asked = [[token for chunk in one["prompt"]["chunks"] for token in chunk["tokens"]] for one in service.sampled]
    assert sorted(turn.prompt_ids.tolist() for turn in turns) == sorted(asked)
    assert {turn.facts.logprob_kind for turn in turns} == {LogprobKind.AFTER_TEMPERATURE}
    for number, request in enumerate(service.trained):
        reply = [*tokenizer().encode("23"[number], add_special_tokens=False).ids, stop[0]]
        assert len(request.data) == 4
        for datum in request.data:
            columns = {name: _array(tensor) for name, tensor in datum.loss_fn_inputs.items()}
            assert columns["target_tokens"][-len(reply) :].tolist() == reply
            assert columns["logprobs"][-len(reply) :].tolist() == logprobs_of(reply).tolist()
            assert not columns["logprobs"][: -len(reply)].any()
    samples = [rolltape.linearize(rollout, "exact").sample(0) for rollout in run.rollouts(step=1)]
    assert [sample.versions for sample in samples] == [(("1", "1"),)] * 4


def test_a_reply_in_flight_keeps_the_client_and_the_version_that_it_began_with(tmp_path: Path) -> None:
    with tinker_service(lambda prompt, sampler: "2") as (service, training):
        first, second = (training.save_weights_and_get_sampling_client() for _ in range(2))
        with job(tmp_path / "run", first, group_size=1) as live:
            service.hold()
            asked = live.request(SUMS[:1], step=0)
            service.held.acquire()
            live.use(second, "1")
            service.release()
            (before,) = asked.wait()
            (after,) = live.request(SUMS[1:2], step=0).wait()
    assert [group.samples[0].versions for group in (before, after)] == [(("0", "0"),), (("1", "1"),)]


def test_a_reply_that_is_interrupted_is_given_up_at_the_service_and_sampled_by_the_next_client(tmp_path: Path) -> None:
    with tinker_service(lambda prompt, sampler: "2") as (service, training):
        first, second = (training.save_weights_and_get_sampling_client() for _ in range(2))
        with job(tmp_path / "run", first, group_size=1) as live:
            service.hold()
            asked = live.request(SUMS[:1], step=0)
            service.held.acquire()
            with live.new_weights("1"):
                live.use(second, "1")
            service.cancelled.acquire()
            service.release()
            (group,) = asked.wait()
        assert [one["sampling_session_id"] for one in service.sampled] == ["sampler-1", "sampler-2"]
    assert group.samples[0].versions == (("1", "1"),)


def test_each_sample_of_a_rollout_that_forked_is_a_datum(tmp_path: Path) -> None:
    with (
        tinker_service(lambda prompt, sampler: THOUGHT) as (_, training),
        job(tmp_path / "run", training.save_weights_and_get_sampling_client(), thinking=True) as live,
    ):
        groups = live.request([FORKING], step=0).wait()
    with pytest.warns(LeftOutWarning, match="loss_weight is not carried"):
        data = group_datums(groups)
    samples = groups[0].samples
    assert [sample.siblings for sample in samples] == [2] * 4
    for sample, datum in zip(samples, data, strict=True):
        trained = datum.loss_fn_inputs["advantages"].to_numpy() != 0
        assert trained.tolist() == sample.trained_mask[1:].tolist()
        assert set(datum.loss_fn_inputs["advantages"].to_numpy()[trained].tolist()) == {sample.advantage}


def test_attempts_that_the_service_refused_give_no_datum(tmp_path: Path) -> None:
    def say(prompt: str, sampler: str) -> str:
        if "2 + 1" in prompt:
            raise RuntimeError("the model is gone")
        return "2"

    with (
        tinker_service(say) as (_, training),
        job(tmp_path / "run", training.save_weights_and_get_sampling_client()) as live,
    ):
        whole, broken = live.request(SUMS[:2], step=0).wait()
    assert [one.status for one in broken.unfinished] == [Status.FAILED] * 2
    assert all("the model is gone" in str(one.reason) for one in broken.unfinished)
    assert (len(group_datums([whole, broken])), group_datums([broken])) == (2, [])


def test_a_reply_that_is_cut_off_ends_by_length(tmp_path: Path) -> None:
    sampling = SamplingParams(temperature=0.5, max_tokens=2)
    with (
        tinker_service(lambda prompt, sampler: "12345678") as (_, training),
        job(tmp_path / "run", training.save_weights_and_get_sampling_client(), sampling=sampling) as live,
    ):
        live.request(SUMS[:1], step=0).wait()
    turns = [turn for rollout in rolltape.read(tmp_path / "run").rollouts() for turn in rollout.turns]
    assert [(turn.facts.finish, len(turn.sampled_ids), turn.facts.logprob_kind) for turn in turns] == [
        (Finish.LENGTH, 2, None)
    ] * 2


def test_a_resumed_job_gets_what_came_after_its_checkpoint_again_without_sampling(tmp_path: Path) -> None:
    with tinker_service(lambda prompt, sampler: "2") as (service, training):
        with job(tmp_path / "run", training.save_weights_and_get_sampling_client()) as live:
            step(training, live, live.request(SUMS[:1], step=0).wait(), "1")
            checkpoint = live.state_dict()
            (trained,) = live.request(SUMS[:1], step=1).wait()
            trained.done()
        sampled = len(service.sampled)
        with job(tmp_path / "run", training.save_weights_and_get_sampling_client()) as live:
            live.load_state_dict(checkpoint)
            (again,) = live.request(SUMS[:1], step=1).wait()
        assert (again.again, len(service.sampled)) == (True, sampled)
    assert [sample.id for sample in again.samples] == [sample.id for sample in trained.samples]


def test_an_evaluation_trains_nothing_and_is_kept_apart(tmp_path: Path) -> None:
    with tinker_service(lambda prompt, sampler: "2") as (service, training):
        with job(tmp_path / "run", training.save_weights_and_get_sampling_client()) as live:
            (group,) = live.request(SUMS[:1], step=0, split="eval", group_size=1).wait()
        assert (group.source, group.rewards, service.trained) == ("sums#eval", [1.0], [])


def _array(tensor: Any) -> Any:
    kinds = {1: np.float32, 2: np.int64}
    return np.frombuffer(tensor.dense, kinds[tensor.dtype])

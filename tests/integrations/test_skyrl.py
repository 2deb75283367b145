"""SkyRL's trainers get what the tape holds, from SkyRL's own inference engines."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rolltape
from integrations.forking_talk import FORKING, THOUGHT
from integrations.skyrl_stand_in import CHECKOUT, Servers, install, skyrl_servers
from rolltape.collect.settings import CollectSettings
from rolltape.errors import GroupsError
from rolltape.export.formats import generator_output, write_samples_for
from rolltape.records.rollout import EventKind
from rolltape.samples import samples_of_group
from rolltape.tiny import shipped_model

base = install()
skyrl = import_module("rolltape.integrations.skyrl")

pytestmark = pytest.mark.filterwarnings("ignore::rolltape.export.formats.LeftOutWarning")


@contextlib.contextmanager
def generator(run: Path, servers: Servers, **given: Any) -> Iterator[Any]:
    settings = CollectSettings(source="sums", model=str(shipped_model()), thinking=given.pop("thinking", False))
    made = skyrl.RolltapeGenerator(run, servers.client, collect=settings, **given)
    try:
        yield made
    finally:
        made.close()


def batch(step: int, numbers: list[int], *, size: int = 2, phase: str = "train", **sampling: Any) -> dict[str, Any]:
    """What SkyRL gives a generator for sums of these numbers and 1, each prompt `size` times."""
    places = [(number, at) for number in numbers for at in range(size)]
    return {
        "prompts": [[{"role": "user", "content": f"What is {number} + 1?"}] for number, _ in places],
        "env_classes": ["sums"] * len(places),
        "env_extras": [{"reward_spec": {"ground_truth": str(number + 1)}} for number, _ in places],
        "sampling_params": {"temperature": 1.0, "max_tokens": 24, "logprobs": 1, "min_tokens": 1, **sampling},
        "trajectory_ids": [base.TrajectoryID(f"uid-{number}", at) for number, at in places],
        "batch_metadata": base.BatchMetadata(global_step=step, training_phase=phase),
    }


def ask(made: Any, given: dict[str, Any]) -> dict[str, Any]:
    output: dict[str, Any] = asyncio.run(made.generate(given))
    if CHECKOUT:
        validate = import_module("skyrl.train.utils.trainer_utils").validate_generator_output
        validate(len(given["prompts"]), output, step_wise=output["is_last_step"] is not None)
    return output


def talks(size: int = 2) -> dict[str, Any]:
    return {**batch(1, [1], size=size), "prompts": [FORKING] * size, "env_extras": None}


def talk_task(prompt: Any, extras: Any) -> Any:
    return prompt


def test_a_batch_gives_the_rows_that_the_tape_holds_in_the_order_of_the_prompts(tmp_path: Path) -> None:
    with skyrl_servers(lambda prompt: "3") as servers, generator(tmp_path / "run", servers) as made:
        output = ask(made, batch(1, [2, 5]))
        asked = servers.asked
    assert output["rewards"] == [1.0, 1.0, 0.0, 0.0]
    assert (output["is_last_step"], output["trajectory_ids"]) == (None, None)
    assert output["rollout_metrics"] == {"generate/rolltape_failed": 0}
    run = rolltape.read(tmp_path / "run")
    held = {row.id: rolltape.linearize(run.rollout(row.id), "exact").sample(0) for row in run.index()}
    rows = zip(output["prompt_token_ids"], output["response_ids"], output["loss_masks"], strict=True)
    assert sorted((prompt, reply, mask) for prompt, reply, mask in rows) == sorted(
        (one.ids[: one.prompt_tokens].tolist(), one.ids[one.prompt_tokens :].tolist(), [1] * one.trained_tokens)
        for one in held.values()
    )
    assert output["rollout_logprobs"] == [[-0.5] * len(reply) for reply in output["response_ids"]]
    assert {one["sampling_params"]["max_tokens"] for one in asked} == {24}
    assert sorted(one["token_ids"] for one in asked) == sorted(output["prompt_token_ids"])


def test_every_sample_of_a_rollout_that_forked_is_a_step_of_its_trajectory(tmp_path: Path) -> None:
    with (
        skyrl_servers(lambda prompt: THOUGHT) as servers,
        generator(tmp_path / "run", servers, step_wise=True, to_task=talk_task, thinking=True) as made,
    ):
        output = ask(made, talks())
    assert output["is_last_step"] == [False, True, False, True]
    assert [one.repetition_id for one in output["trajectory_ids"]] == [0, 0, 1, 1]
    assert len(set(output["rewards"])) == 2
    assert output["rewards"][::2] == output["rewards"][1::2]


def test_without_step_wise_training_the_tape_says_how_much_of_forked_rollouts_is_left_out(tmp_path: Path) -> None:
    with (
        skyrl_servers(lambda prompt: THOUGHT) as servers,
        generator(tmp_path / "run", servers, to_task=talk_task, thinking=True) as made,
    ):
        output = ask(made, talks())
        ask(made, {**talks(), "batch_metadata": base.BatchMetadata(global_step=2, training_phase="train")})
    run = rolltape.read(tmp_path / "run")
    samples = samples_of_group(list(run.rollouts(step=1)), "exact", versions=run.versions())
    left_out = sum(sample.trained_tokens for sample in samples) - sum(map(sum, output["loss_masks"]))
    (done,) = [
        event.data["reason"]
        for event in run.events()
        if event.kind == EventKind.GROUP and event.data["state"] == "done"
    ]
    assert len(output["response_ids"]) == 2
    assert left_out > 0
    assert done == f"{left_out} tokens of forked rollouts are left out: SkyRL takes one row for each"


def test_an_attempt_that_failed_does_not_train_and_leaves_the_baseline_as_it_is(tmp_path: Path) -> None:
    replies = iter(["3", "3", "no idea"])

    def say(prompt: str) -> str:
        with contextlib.suppress(StopIteration):
            return next(replies)
        raise RuntimeError("out of memory")

    with skyrl_servers(say) as servers, generator(tmp_path / "run", servers) as made:
        output = ask(made, batch(1, [2], size=4))
    failed = [at for at, mask in enumerate(output["loss_masks"]) if not any(mask)]
    assert len(failed) == 1
    assert sorted(output["rewards"]) == [0.0, pytest.approx(2 / 3), 1.0, 1.0]
    assert output["rewards"][failed[0]] == pytest.approx(2 / 3)
    assert output["stop_reasons"][failed[0]] == "error"
    assert output["rollout_metrics"] == {"generate/rolltape_failed": 1}


def test_weights_that_change_during_a_reply_are_both_on_the_tape(tmp_path: Path) -> None:
    with skyrl_servers(lambda prompt: "3") as servers, generator(tmp_path / "run", servers) as made:

        async def train() -> None:
            servers.hold()
            asked = asyncio.ensure_future(made.generate(batch(1, [2], size=1)))
            await asyncio.to_thread(servers.arrived.acquire)
            servers.client.increment_weight_version()
            servers.release()
            await asked
            await made.generate(batch(2, [2], size=1))

        asyncio.run(train())
    run = rolltape.read(tmp_path / "run")
    samples = [rolltape.linearize(rollout, "exact").sample(0) for step in (1, 2) for rollout in run.rollouts(step=step)]
    assert [sample.versions for sample in samples] == [(("0", "1"),), (("1", "1"),)]


def test_an_evaluation_has_a_split_and_sampling_parameters_of_its_own(tmp_path: Path) -> None:
    with skyrl_servers(lambda prompt: "3") as servers, generator(tmp_path / "run", servers) as made:
        ask(made, batch(1, [2]))
        output = ask(made, batch(1, [2], size=1, phase="eval", temperature=0.0))
        temperatures = [one["sampling_params"]["temperature"] for one in servers.asked]
    assert (output["rewards"], temperatures) == ([1.0], [1.0, 1.0, 0.0])
    assert sorted(str(row.source) for row in rolltape.read(tmp_path / "run").index()) == ["sums", "sums", "sums#eval"]


def test_closing_ends_the_gateways_of_training_and_evaluation(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with skyrl_servers(lambda prompt: "3") as servers:
        with generator(tmp_path / "run", servers) as made:
            ask(made, batch(1, [2]))
            ask(made, batch(1, [2], size=1, phase="eval", temperature=0.0))
            live = [thread for thread in set(threading.enumerate()) - before if thread.name == "rolltape-live"]
        assert [thread.is_alive() for thread in live] == [False, False]


def test_a_resumed_job_gets_its_step_and_its_evaluation_again_from_the_tape(tmp_path: Path) -> None:
    with skyrl_servers(lambda prompt: "3") as servers:
        with generator(tmp_path / "run", servers) as made:
            evaluated = ask(made, batch(2, [2], size=1, phase="eval"))
            ask(made, batch(1, [2]))
            second = ask(made, batch(2, [3]))
            ask(made, batch(3, [4]))
        sampled = len(servers.asked)
        with generator(tmp_path / "run", servers) as made:
            evaluated_again = ask(made, batch(2, [2], size=1, phase="eval"))
            again = ask(made, batch(2, [3]))
        assert len(servers.asked) == sampled
    assert again["response_ids"] == second["response_ids"]
    assert evaluated_again["response_ids"] == evaluated["response_ids"]


def test_a_batch_without_ids_is_refused(tmp_path: Path) -> None:
    with (
        skyrl_servers(lambda prompt: "3") as servers,
        generator(tmp_path / "run", servers) as made,
        pytest.raises(GroupsError, match="SkyRL gave no trajectory_ids"),
    ):
        ask(made, {**batch(1, [2]), "trajectory_ids": None})


def test_the_format_has_the_columns_of_step_wise_training(tmp_path: Path) -> None:
    with (
        skyrl_servers(lambda prompt: THOUGHT) as servers,
        generator(tmp_path / "run", servers, step_wise=True, to_task=talk_task, thinking=True) as made,
    ):
        live = ask(made, talks())
    run = rolltape.read(tmp_path / "run")
    samples = list(samples_of_group(list(run.rollouts()), "exact", versions=run.versions()))
    output = generator_output(samples)
    names = ("prompt_token_ids", "response_ids", "loss_masks", "rewards", "rollout_logprobs", "is_last_step")
    assert {name: output[name] for name in names} == {name: live[name] for name in names}
    assert generator_output(samples, logprobs=False)["rollout_logprobs"] is None
    write_samples_for("skyrl", samples, tmp_path / "rows.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [line["trajectory_id"]["repetition_id"] for line in lines] == [0, 0, 1, 1]
    assert [line["is_last_step"] for line in lines] == live["is_last_step"]


if CHECKOUT:  # it looks at SkyRL's own code

    def test_skyrls_trainer_gives_each_step_the_advantage_of_its_rollout(tmp_path: Path) -> None:
        with (
            skyrl_servers(lambda prompt: THOUGHT) as servers,
            generator(tmp_path / "run", servers, step_wise=True, to_task=talk_task, thinking=True) as made,
        ):
            output = ask(made, talks())
        run = rolltape.read(tmp_path / "run")
        samples = list(samples_of_group(list(run.rollouts()), "exact", versions=run.versions()))
        trainer = import_module("skyrl.train.trainer").RayPPOTrainer
        config = import_module("skyrl.train.config").SkyRLTrainConfig()
        config.generator.step_wise_trajectories, config.generator.n_samples_per_prompt = True, 2
        config.trainer.train_batch_size = config.trainer.policy_mini_batch_size = 1
        config.trainer.critic.model.path = None
        config.trainer.algorithm.advantage_estimator, config.trainer.algorithm.grpo_norm_by_std = "grpo", False
        config.trainer.algorithm.zero_variance_filter = False
        job = SimpleNamespace(
            cfg=config,
            all_metrics={},
            tokenizer=SimpleNamespace(pad_token_id=0),
            dispatch=SimpleNamespace(get_lcm_dp_size=lambda: 1),
        )
        output, uids = trainer.postprocess_generator_output(
            job, output, [one.instance_id for one in output["trajectory_ids"]]
        )
        data = trainer.convert_to_training_input(job, output, uids)
        data["values"] = None
        data = trainer.compute_advantages_and_returns(job, data)
        for at, sample in enumerate(samples):
            trained = data["loss_mask"][at].bool()
            assert int(trained.sum()) == sample.trained_tokens
            assert data["rollout_logprobs"][at][trained].tolist() == sample.logprobs[sample.trained_mask].tolist()
            assert data["advantages"][at][trained].tolist() == [sample.advantage] * sample.trained_tokens

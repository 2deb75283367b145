"""TRL trains for real on what is collected while it runs: three optimizer steps of the shipped model on the CPU."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import pytest
import torch
from trl import GRPOTrainer

import rolltape
from importing import imported
from rolltape.errors import GroupsError
from rolltape.importers import guess
from rolltape.integrations import LiveGroups
from rolltape.integrations.trl import SampleGRPOTrainer, TrlRollouts
from rolltape.records.policy import Advantage
from rolltape.records.rollout import EventKind, Status
from trl_jobs import arguments, live_groups, load_model, sample_row, samples_of_step, talks, tokenizer, trained_rows

pytestmark = [
    pytest.mark.filterwarnings("ignore:You are using 'rollout_func'"),
    pytest.mark.filterwarnings("ignore::rolltape.export.formats.LeftOutWarning"),
]


class Watched(SampleGRPOTrainer):
    """Keeps what its losses were computed from, and the losses."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seen: list[dict[str, Any]] = []
        self.losses: list[float] = []
        super().__init__(*args, **kwargs)

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        loss = super()._compute_loss(model, inputs)
        self.seen.append(inputs)
        self.losses.append(loss.item())
        return loss


class Training(NamedTuple):
    run: Path
    trainer: Watched
    before: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    folder = tmp_path_factory.mktemp("trl")
    torch.set_num_threads(2)
    model = load_model()
    with live_groups(folder / "run", model) as live:
        rollouts = TrlRollouts(live, talks(6, breaks_one_in=4))
        trainer = Watched(
            model,
            rollouts=rollouts,
            args=arguments(folder / "out", loss_type="grpo", log_completions=True),
            train_dataset=rollouts.dataset,
            processing_class=tokenizer(),
        )
        before = copy.deepcopy(model.state_dict())
        trainer.train()
        yield Training(folder / "run", trainer, before)


def test_completions_as_trl_logs_them_are_imported(training: Training, tmp_path: Path) -> None:
    logged = Path(training.trainer.args.output_dir) / "completions"
    assert list(guess(logged)) == ["trl"]
    report = imported("trl", logged, tmp_path / "run")
    assert report.imported == sum(len(pq.read_table(file)) for file in logged.glob("*.parquet")) > 0
    rows = [row for file in sorted(logged.glob("*.parquet")) for row in pq.read_table(file).to_pylist()]
    found = list(rolltape.read(tmp_path / "run").rollouts())
    assert sorted(one.head.step for one in found) == sorted(row["step"] for row in rows)
    assert sorted(one.head.extra["advantage"] for one in found) == sorted(row["advantage"] for row in rows)


def test_the_weights_change_in_three_steps(training: Training) -> None:
    assert training.trainer.state.global_step == 3
    after = training.trainer.model.state_dict()
    assert any(not torch.equal(weights, after[name]) for name, weights in training.before.items())


def test_every_sample_trains_in_the_step_it_was_collected_for_and_nothing_else_does(training: Training) -> None:
    for step, inputs in enumerate(training.trainer.seen):
        wanted = [sample_row(sample) for sample in samples_of_step(training.run, step) if sample.trained_tokens]
        rows = trained_rows(inputs)
        assert sorted(row[:2] for row in rows) == sorted(row[:2] for row in wanted)
        assert len(wanted) > 0


def test_some_rollouts_forked_and_some_failed(training: Training) -> None:
    rollouts = [one for step in range(3) for one in rolltape.read(training.run).rollouts(step=step)]
    samples = [sample for step in range(3) for sample in samples_of_step(training.run, step)]
    assert {rollout.status for rollout in rollouts} == {Status.FINISHED, Status.FAILED}
    assert any(sample.siblings > 1 for sample in samples)


def test_the_ratio_of_each_first_update_is_one_and_is_by_the_recorded_logprobs(training: Training) -> None:
    for inputs in training.trainer.seen:
        mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        assert (inputs["importance_sampling_ratio"][mask] - 1).abs().max() < 1e-3
    logged = [
        entry for entry in training.trainer.state.log_history if "sampling/importance_sampling_ratio/max" in entry
    ]
    assert len(logged) == 3
    for entry in logged:
        assert entry["sampling/importance_sampling_ratio/min"] == pytest.approx(1.0, abs=1e-3)
        assert entry["sampling/importance_sampling_ratio/max"] == pytest.approx(1.0, abs=1e-3)


def test_the_loss_is_a_mean_over_rollouts_whose_samples_share_a_weight(training: Training) -> None:
    """With a ratio of 1 a token's part of the loss is its advantage: the rest is how rows are weighed."""
    for step, loss in enumerate(training.trainer.losses):
        by_hand = -sum((sample.advantage or 0.0) * sample.loss_weight for sample in samples_of_step(training.run, step))
        assert loss == pytest.approx(by_hand / 8, abs=1e-3)


def test_the_loss_goes_through_the_ratio(training: Training) -> None:
    inputs = dict(training.trainer.seen[-1])
    trainer = training.trainer
    with torch.no_grad():
        once = GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
        inputs["importance_sampling_ratio"] = 2 * inputs["importance_sampling_ratio"]
        twice = GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
    assert twice.item() == pytest.approx(2 * once.item(), rel=1e-4)
    assert once.item() != 0


def test_all_groups_are_done_and_versions_are_the_steps(training: Training) -> None:
    run = rolltape.read(training.run)
    states = [event.data["state"] for event in run.events() if event.kind == EventKind.GROUP]
    assert states.count("given") == states.count("done") == 6
    assert list(run.versions()) == ["0", "1", "2"]
    for step in range(3):
        assert {sample.versions for sample in samples_of_step(training.run, step)} == {((str(step), str(step)),)}


class Plain(GRPOTrainer):  # type: ignore[misc]
    """TRL's own trainer, which keeps what its `rollout_func` returned."""

    given: dict[str, list[Any]]
    rollout_func: Any

    def _generate(self, prompts: Any) -> Any:
        rollout_func = self.rollout_func

        def keep(prompts: Any, trainer: Any) -> dict[str, list[Any]]:
            self.given = rollout_func(prompts, trainer)
            return self.given

        self.rollout_func = keep
        try:
            return super()._generate(prompts)
        finally:
            self.rollout_func = rollout_func


def plain_trainer(live: LiveGroups, model: Any, folder: Path, tasks: list[dict[str, Any]], **given: Any) -> Plain:
    rollouts = TrlRollouts(live, tasks)
    return Plain(
        model,
        rollout_func=rollouts,
        reward_funcs=rollouts.reward,
        train_dataset=rollouts.dataset,
        callbacks=[rollouts],
        args=arguments(folder, num_generations=2, per_device_train_batch_size=2, **given),
        processing_class=tokenizer(),
    )


def test_trls_own_trainer_gets_one_row_a_rollout_and_the_tape_says_what_is_left_out(tmp_path: Path) -> None:
    model = load_model()
    with live_groups(tmp_path / "run", model) as live:
        trainer = plain_trainer(live, model, tmp_path / "out", talks(1), max_steps=1)
        trainer.train()
    samples = samples_of_step(tmp_path / "run", 0)
    most = [
        max(one.trained_tokens for one in samples if one.rollout == rollout) for rollout in trainer.given["rollout"]
    ]
    assert [sum(mask) for mask in trainer.given["env_mask"]] == most
    left_out = sum(sample.trained_tokens for sample in samples) - sum(most)
    (done,) = [
        event.data["reason"]
        for event in rolltape.read(tmp_path / "run").events()
        if event.kind == EventKind.GROUP and event.data["state"] == "done"
    ]
    assert left_out > 0
    assert done == f"{left_out} tokens of forked rollouts are left out: TRL takes one row for each"


def test_a_training_that_is_resumed_gets_what_came_after_its_checkpoint_again(tmp_path: Path) -> None:
    tasks = talks(3)
    model = load_model()
    with live_groups(tmp_path / "run", model) as live:
        plain_trainer(live, model, tmp_path / "out", tasks, max_steps=2, save_strategy="steps", save_steps=1).train()
    rollouts = len(list(rolltape.read(tmp_path / "run").rollouts()))
    model = load_model()
    with live_groups(tmp_path / "run", model) as live:
        trainer = plain_trainer(live, model, tmp_path / "out", tasks, max_steps=3)
        trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    run = rolltape.read(tmp_path / "run")
    assert trainer.state.global_step == 3
    assert len(list(run.rollouts(step=1))) == 2
    assert len(list(run.rollouts())) == rollouts + 2
    states = [event.data["state"] for event in run.events() if event.kind == EventKind.GROUP]
    assert states == ["given", "done", "given", "done", "rewound", "given", "done", "given", "done"]


def test_an_evaluation_that_comes_again_is_read_from_the_tape_and_ends_no_training_step(tmp_path: Path) -> None:
    tasks, model, rewards = talks(1), load_model(), []
    for _ in range(2):
        with live_groups(tmp_path / "run", model) as live:
            trainer = plain_trainer(live, model, tmp_path / "out", tasks, max_steps=1, per_device_eval_batch_size=2)
            trainer.evaluate(trainer.train_dataset)
            rewards.append(trainer.given["rollout"])
    assert rewards[0] == rewards[1]
    run = rolltape.read(tmp_path / "run")
    assert {row.head.split for row in run.index()} == {"eval"}
    assert [event.data["state"] for event in run.events() if event.kind == EventKind.GROUP] == ["given", "given"]


def test_a_training_by_our_advantages_is_refused_where_there_are_none(tmp_path: Path) -> None:
    model = load_model()
    with live_groups(tmp_path / "run", model, rolltape.Credit(advantage=Advantage.NONE)) as live:
        rollouts = TrlRollouts(live, talks(1))
        trainer = SampleGRPOTrainer(
            model,
            rollouts=rollouts,
            args=arguments(tmp_path / "out", num_generations=2, per_device_train_batch_size=2, max_steps=1),
            train_dataset=rollouts.dataset,
            processing_class=tokenizer(),
        )
        with pytest.raises(GroupsError, match="no advantage, but SampleGRPOTrainer trains by those of LiveGroups"):
            trainer.train()

"""TRL: rollouts for its `GRPOTrainer`, and a trainer that uses every sample of a rollout.

    live = LiveGroups("runs/exp1", collect=settings, engine="vllm:http://127.0.0.1:8000")
    rollouts = TrlRollouts(live, tasks)
    trainer = SampleGRPOTrainer(model, rollouts=rollouts, args=args, train_dataset=rollouts.dataset)
    trainer.train()

`GRPOTrainer` itself accepts a `TrlRollouts` as its `rollout_func`. docs/how-to/train/trl.md shows both.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object  # type: ignore[import-untyped]
from datasets import Dataset  # type: ignore[import-untyped]
from transformers import TrainerCallback
from trl import GRPOTrainer

from rolltape.collect.tasks import Task
from rolltape.errors import GroupsError
from rolltape.export.formats.fitting import Fact
from rolltape.export.formats.trl import FORM, row
from rolltape.groups import Group
from rolltape.integrations.attempts import report_left_out, samples_by_attempt
from rolltape.integrations.live import LiveGroups, first_rank_failed, with_id
from rolltape.integrations.steps import TaskNames
from rolltape.records.sample import Sample
from rolltape.tape.rundir import write_whole

_EVERY_SAMPLE = FORM.without(Fact.FORKED)
_STATE_FILE = "rolltape.json"  # in each checkpoint
# Loss types that average over rows: over each row's mean over tokens, or over its sum.
_ROW_MEANS, _ROW_SUMS = frozenset({"grpo", "sapo"}), frozenset({"dr_grpo", "luspo"})

Row = dict[str, Any]  # the fields of one completion, as `row` returns them


class TrlRollouts(TrainerCallback):
    """Rollouts for TRL's `GRPOTrainer`: its `rollout_func`, its dataset, its reward function, and a callback.

    Example:

        rollouts = TrlRollouts(live, [{"id": "add", "prompt": "What is 47 + 38?", "answer": 85}])
        trainer = GRPOTrainer(
            model,
            rollout_func=rollouts,
            reward_funcs=rollouts.reward,
            train_dataset=rollouts.dataset,
            callbacks=[rollouts],
            args=GRPOConfig(num_generations=8, temperature=1.0),
        )

    TRL requests `num_generations` completions of each prompt, which become the attempts of one group. An attempt that
    failed, or has nothing to train, is a placeholder: one token that does not train, without a reward if it failed.
    `GRPOTrainer` uses one row for each attempt. From a rollout with several samples it gets the one with the most
    trained tokens. A warning, and the group's event on the tape, state how many tokens are left out.
    `SampleGRPOTrainer` uses all samples.

    Evaluations are collected under the split "eval". The weight version is the number of optimizer steps. The callback
    marks groups as done when TRL has used them, and saves with each checkpoint which groups are done. A training that
    is resumed from a checkpoint gets the later groups again.

    With several ranks, the first one collects for all.
    """

    def __init__(
        self,
        live: LiveGroups,
        tasks: Iterable[Mapping[str, Any] | Task],
        *,
        load_weights: Callable[[Any, str], None] | None = None,
    ) -> None:
        """Prepare rollouts; nothing runs yet.

        Arguments:
            live: The source of groups. It need not be started; only the first rank uses it.
            tasks: All tasks that are trained or evaluated on. In the trainer's dataset, the prompt of a task is its
                "prompt" if that is unique, else its id.
            load_weights: Called with the model and the new version when the weights have changed, before rollouts are
                collected and while no reply is in flight. None: the engine has the trainer's weights anyway, as TRL's
                vLLM and a `TransformersEngine` do.
        """
        self._live = live
        self._load_weights = load_weights
        given = [with_id(task) for task in tasks]
        prompts = Counter(_key(task.data.get("prompt")) for task in given)
        self._tasks = {_key(_prompt(task, prompts)): task for task in given}
        self.dataset = Dataset.from_list([{"prompt": _prompt(task, prompts)} for task in given])
        self._trainer: Any = None
        self._version: str | None = None
        self._names = TaskNames()
        self._in_use: list[Group] = []  # that TRL trains on
        self._left_out: dict[str, str] = {}  # by group: a sentence on what TRL does not get

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """The completions of prompts, one row for each, as a `rollout_func` returns them."""
        rows = [given[0] for given in self.collect(prompts, trainer, every_sample=False)]
        return {name: [one[name] for one in rows] for name in rows[0]}

    @staticmethod
    def reward(completions: Any, reward: list[float | None], **_: Any) -> list[float | None]:
        """The reward function: rewards as they were recorded, None for rollouts that failed."""
        return reward

    def collect(self, prompts: Sequence[Any], trainer: Any, *, every_sample: bool = True) -> list[list[Row]]:
        """The rows of each prompt's rollout: one, or with `every_sample` one per sample. All ranks must call it."""
        self._trainer = trainer
        ranks, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
        everyone = gather_object(list(prompts)) if ranks > 1 else list(prompts)
        answer: list[Any] = [None]
        if rank == 0:
            try:
                answer = [self._collect(everyone, trainer, every_sample)]
            except Exception as error:
                if ranks > 1:  # the others wait for an answer
                    broadcast_object_list([first_rank_failed(error)])
                raise
        if ranks > 1:
            broadcast_object_list(answer)
        if isinstance(answer[0], Exception):
            raise answer[0]
        own: list[list[Row]] = answer[0][rank * len(prompts) : (rank + 1) * len(prompts)]
        return own

    def _collect(self, prompts: Sequence[Any], trainer: Any, every_sample: bool) -> list[list[Row]]:
        trains, step = trainer.model.training, trainer.state.global_step
        size = trainer.num_generations if trains else trainer.num_generations_eval
        tasks = [self._find_task(prompts[at : at + size]) for at in range(0, len(prompts), size)]
        split = None if trains else "eval"
        if trains:
            self.mark_done()
        self._take_over_weights(trainer, str(step))
        named = [self._names.name(task, step, split) for task in tasks]
        groups = self._live.request(named, step=step, split=split, group_size=size).wait()
        by_task = {group.task_id: group for group in groups}
        missing = [task.id for task in named if task.id not in by_task]
        if missing:
            raise GroupsError(f"step {step}: no group was given of task {missing[0]!r}, but TRL needs rows for each")
        rows = [one for task in named for one in self._group_rows(by_task[task.id], size, trainer, every_sample)]
        if trains:
            self._in_use += groups
        return rows

    def _find_task(self, prompts: Sequence[Any]) -> Task:
        keys = {_key(prompt) for prompt in prompts}
        if len(keys) > 1:
            raise GroupsError(
                f"prompts {prompts[0]!r} and others are mixed where TRL has the completions of one prompt"
            )
        try:
            return self._tasks[keys.pop()]
        except KeyError:
            raise GroupsError(
                f"no task has the prompt {prompts[0]!r}; train and evaluate on rows of `TrlRollouts.dataset`"
            ) from None

    def _take_over_weights(self, trainer: Any, version: str) -> None:
        if version == self._version:
            return
        if self._load_weights is None or self._version is None:
            self._live.announce(version)
        else:
            with self._live.new_weights(version):
                self._load_weights(trainer.model, version)
        self._version = version

    def _group_rows(self, group: Group, size: int, trainer: Any, every_sample: bool) -> list[list[Row]]:
        """The rows of each attempt of a group, the one with the most trained tokens first."""
        _check_temperature(group.samples, trainer.args.temperature)
        samples = samples_by_attempt(group, _EVERY_SAMPLE if every_sample else FORM)
        if not every_sample and (report := report_left_out(group, samples.values(), "TRL", "SampleGRPOTrainer")):
            self._left_out[group.id] = report
        rows: dict[int, list[Row]] = {}
        for rollout in group.rollouts:
            kept = samples[rollout.head.attempt][: None if every_sample else 1]
            blank = _placeholder(trainer, group.id, rollout.id, rollout.reward)
            rows[rollout.head.attempt] = [row(sample) for sample in kept] or [blank]
        return [rows.get(attempt) or [_placeholder(trainer, group.id, None, None)] for attempt in range(size)]

    def mark_done(self) -> None:
        """Mark the groups that TRL has so far as done."""
        for group in self._in_use:
            group.done(self._left_out.pop(group.id, None))
        self._in_use.clear()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Go back to the checkpoint that the training is resumed from."""
        path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / _STATE_FILE
        if state.is_world_process_zero and state.global_step and path.exists():
            self._live.load_state_dict(json.loads(path.read_text()))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Mark groups as done once TRL has used all that it generated."""
        trainer = self._trainer
        if trainer is not None and trainer._step % (args.steps_per_generation * args.num_iterations) == 0:
            self.mark_done()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save which groups are done beside the checkpoint."""
        if state.is_world_process_zero:
            path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / _STATE_FILE
            write_whole(path, json.dumps(self._live.state_dict()).encode())

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Mark the last groups as done."""
        self.mark_done()


class SampleGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """TRL's `GRPOTrainer`, trained on every sample of every rollout, by recorded logprobs and our advantages.

    Example:

        trainer = SampleGRPOTrainer(model, rollouts=rollouts, args=args, train_dataset=rollouts.dataset)

    What is different:
    - Further samples of rollouts that forked are separate rows, so a micro-batch may be larger than
      `per_device_train_batch_size`. Losses that are means over rows count a rollout once, and its samples by their
      `loss_weight`.
    - Advantages are those of `LiveGroups`, over the rollouts of a group; `scale_rewards` has no effect on them.
    - `vllm_importance_sampling_correction` (on by default) compares with the recorded logprobs, with every engine.
    """

    use_vllm: bool

    def __init__(self, *args: Any, rollouts: TrlRollouts, **kwargs: Any) -> None:
        """All arguments are those of `GRPOTrainer`, except `rollouts`, which also replaces its `rollout_func`."""
        kwargs = {"reward_funcs": rollouts.reward, "rollout_func": self._give_rows, **kwargs}
        kwargs["callbacks"] = [*(kwargs.get("callbacks") or ()), rollouts]
        super().__init__(*args, **kwargs)
        self._rollouts = rollouts
        self._rows: list[Row] = []
        if not self.use_vllm:
            # TRL corrects only by logprobs of vLLM, and syncs vLLM's weights before it generates.
            self.use_vllm, self.vllm_generation, self._last_loaded_step = True, _NothingToSync(), -1

    def _give_rows(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        return {name: [one[name] for one in self._rows] for name in self._rows[0]}

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        collected = self._rollouts.collect([one["prompt"] for one in inputs], self)
        further = [(given, one) for given, rows in zip(inputs, collected, strict=True) for one in rows[1:]]
        blanks = self._count_rows(len(inputs) + len(further)) - len(inputs) - len(further)
        self._rows = [
            *(rows[0] for rows in collected),
            *({**one, "reward": None} for _, one in further),  # its rollout is rewarded once
            *[_placeholder(self, None, None, None)] * blanks,
        ]
        copies = [dict(given) for given, _ in further] + [dict(inputs[0]) for _ in range(blanks)]
        output: dict[str, Any] = super()._generate_and_score_completions([*inputs, *copies])
        advantages = [self._scaled_advantage(one, len(self._rows) / len(inputs)) for one in self._rows]
        output["advantages"] = torch.tensor(advantages, device=self.accelerator.device)
        return output

    def _count_rows(self, rows: int) -> int:
        """How many rows this rank must return: as many as all others, in whole groups, divisible into steps."""
        steps = self.args.steps_per_generation if self.model.training else 1
        size = self.num_generations if self.model.training else self.num_generations_eval
        most: int = max(gather_object([rows]))
        while most % steps or most % size:
            most += 1
        return most

    def _scaled_advantage(self, one: Row, rows_per_rollout: float) -> float:
        """A row's advantage, scaled so that a mean over rows becomes a mean over rollouts."""
        advantage = one["advantage"]
        if advantage is None:
            raise GroupsError(
                f"sample {one['sample']}: no advantage, but SampleGRPOTrainer trains by those of LiveGroups; give it a "
                "credit that has them, such as rolltape.Credit()"
            )
        if self.loss_type in _ROW_MEANS:
            return float(advantage * one["loss_weight"] * rows_per_rollout)
        return float(advantage * rows_per_rollout if self.loss_type in _ROW_SUMS else advantage)


class _NothingToSync:
    """Replaces TRL's vLLM: the engine has the trainer's weights, or `load_weights` updates them."""

    def sync_weights(self) -> None:
        return


def _prompt(task: Task, prompts: Counter[str]) -> Any:
    """The prompt of a task in TRL's dataset: its own prompt if that is unique, else its id."""
    prompt = task.data.get("prompt")
    return prompt if isinstance(prompt, str) and prompts[_key(prompt)] == 1 else task.id


def _key(prompt: Any) -> str:
    return json.dumps(prompt, sort_keys=True)


def _check_temperature(samples: Iterable[Sample], temperature: float) -> None:
    for sample in samples:
        if sample.temperature not in (None, temperature):
            raise GroupsError(
                f"sample {sample.id} was sampled at temperature {sample.temperature:g}, and TRL computes logprobs at "
                f"{temperature:g}; give GRPOConfig the temperature of the collection"
            )


def _placeholder(trainer: Any, group: str | None, rollout: str | None, reward: float | None) -> Row:
    """A row that trains nothing. If it has no reward, TRL leaves it out of its baseline."""
    end = trainer._tokenizer.eos_token_id
    return {
        "prompt_ids": [end],
        "completion_ids": [end],
        "logprobs": [0.0],
        "env_mask": [0],
        "reward": reward,
        "advantage": 0.0,
        "loss_weight": 0.0,
        "group": group,
        "rollout": rollout,
        "sample": None,
    }

"""slime: a rollout function that runs agents through the gateway, in front of slime's own SGLang servers.

    --rollout-function-path rolltape.integrations.slime.generate_rollout
    --custom-reward-post-process-path rolltape.export.formats.post_process_rewards
    --custom-config-path rolltape.yaml

`rolltape.yaml` has one key, `rolltape`: the run, and the fields of `CollectSettings`. docs/how-to/train/slime.md has an
example. With `--custom-generate-function-path rolltape.integrations.slime.generate`, slime's own rollout function runs,
with its filters and its over-sampling, and an agent runs in place of each single reply.
"""

import asyncio
import atexit
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import msgspec

from rolltape.collect.functions import function_named
from rolltape.collect.settings import CollectSettings, settings_in_config
from rolltape.collect.tasks import Task
from rolltape.errors import GroupsError
from rolltape.export.formats.slime import slime_samples
from rolltape.gateway.request import SamplingParams
from rolltape.groups import Group
from rolltape.integrations.attempts import blank_reward, log_unfinished
from rolltape.integrations.live import LiveGroups, with_id
from rolltape.integrations.steps import StepPositions, TaskNames

# slime's names of sampling parameters, and ours.
_EVALUATION_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_new_tokens": "max_tokens",
}

_jobs: dict[int, "SlimeRollouts"] = {}  # by the identity of slime's arguments; a process has one


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """For `--rollout-function-path`, and `--eval-function-path`: the rollouts of a training step, or an evaluation.

    Each prompt of the data source is a task, attempted `n_samples_per_prompt` times. The samples are nested as slime
    needs them: by prompt, by rollout, and then the samples of a rollout that forked.
    """
    job = _job(args)
    return job.evaluate(rollout_id) if evaluation else job.train(rollout_id, data_source)


async def generate(args: Any, sample: Any, sampling_params: Mapping[str, Any], evaluation: bool = False) -> Any:
    """For `--custom-generate-function-path`: the samples of one attempt, as part of its prompt's group.

    slime requests all samples of a prompt at the same time. The first request starts the group, and each gets its own
    attempt. In an evaluation, each sample is a group by itself, with the sampling parameters that slime gives.
    """
    job = _job(args)
    parts = await (job.evaluation_attempt(sample, sampling_params) if evaluation else job.attempt(sample))
    return parts if len(parts) > 1 else parts[0]


def prompt_task(sample: Any) -> dict[str, Any]:
    """A sample of slime's data source as a task: its prompt or messages, its label as the answer, its metadata."""
    prompt = sample.prompt
    opening = {"prompt": prompt} if isinstance(prompt, str) else {"messages": list(prompt)}
    answer = {} if sample.label is None else {"answer": sample.label}
    return {**opening, **answer, **(sample.metadata or {})}


class SlimeRollouts:
    """The rollouts of one slime job. `generate_rollout` and `generate` make one from slime's arguments."""

    def __init__(self, args: Any) -> None:
        given = getattr(args, "rolltape", None)
        if not isinstance(given, Mapping) or "run" not in given:
            raise GroupsError(
                "slime's arguments have no rolltape.run; write `rolltape: {run: runs/exp1}` into a YAML file, and give "
                "it by --custom-config-path"
            )
        self._args = args
        self._run = str(given["run"])
        self._policy = str(given.get("policy", "exact"))
        self._to_task: Callable[[Any], Mapping[str, Any]] = (
            function_named(given["to_task"]) if "to_task" in given else prompt_task
        )
        self._settings = _settings(args, given)
        self._engine = f"sglang:http://{args.sglang_router_ip}:{args.sglang_router_port}"
        self._training = self._open(self._settings, "slime")
        self._evaluating: dict[tuple[str, SamplingParams], LiveGroups] = {}  # by split
        self._names = TaskNames()
        self._given: dict[tuple[int, Any], asyncio.Future[list[Group]]] = {}  # of `generate`: by step and prompt
        self._positions = StepPositions(self._training, "slime")
        atexit.register(self.close)

    def _open(self, settings: CollectSettings, consumer: str) -> LiveGroups:
        return LiveGroups(self._run, collect=settings, engine=self._engine, policy=self._policy, consumer=consumer)

    def close(self) -> None:
        """End the gateway, and all running attempts."""
        for live in (self._training, *self._evaluating.values()):
            live.close()
        self._evaluating.clear()

    def train(self, rollout_id: int, data_source: Any) -> Any:
        """The rollouts of a training step. The groups of the earlier step are then marked as done."""
        self._begin(rollout_id)
        prompts: list[list[Any]] = data_source.get_samples(self._args.rollout_batch_size)
        tasks = [self._task(group[0], number, rollout_id) for number, group in enumerate(prompts)]
        size = self._args.n_samples_per_prompt
        groups = self._training.request(tasks, step=rollout_id, group_size=size).wait()
        for group in groups:
            self._positions.train_on(group)
        by_task = {group.task_id: group for group in groups}
        samples = [self._attempts(by_task.get(task.id), group) for task, group in zip(tasks, prompts, strict=True)]
        failed = sum(len(group.unfinished) for group in groups)
        base = import_module("slime.rollout.base_types")
        return base.RolloutFnTrainOutput(samples=samples, metrics={"rollout/rolltape_failed": failed})

    def evaluate(self, rollout_id: int) -> Any:
        """The rollouts of all evaluation datasets, each with its name as the split."""
        data = {}
        for dataset in getattr(self._args, "eval_datasets", None) or []:
            samples = _evaluation_samples(self._args, dataset)
            sampling = msgspec.structs.replace(
                self._settings.sampling,
                temperature=dataset.temperature,
                top_p=dataset.top_p,
                top_k=dataset.top_k,
                max_tokens=dataset.max_response_len,
            )
            live = self._evaluation(dataset.name, sampling)
            tasks = [self._task(sample, number, rollout_id, dataset.name) for number, sample in enumerate(samples)]
            size = dataset.n_samples_per_eval_prompt
            groups = live.request(tasks, step=rollout_id, split=dataset.name, group_size=size).wait()
            by_task = {group.task_id: group for group in groups}
            found: list[Any] = []
            for task, sample in zip(tasks, samples, strict=True):
                copies = [_numbered(sample, len(found) + at) for at in range(size)]
                found += [parts[0] for parts in self._attempts(by_task.get(task.id), copies)]
            kind = import_module("slime.utils.types").Sample.Status
            data[dataset.name] = {
                "rewards": [sample.reward for sample in found],
                "truncated": [sample.status == kind.TRUNCATED for sample in found],
                "samples": found,
            }
        return import_module("slime.rollout.base_types").RolloutFnEvalOutput(data=data)

    async def attempt(self, sample: Any) -> list[Any]:
        """The samples of one attempt of a group. The first call for the group requests it."""
        step, size = _current_step(), self._args.n_samples_per_prompt
        self._begin(step)
        key = (step, sample.group_index)
        if key not in self._given:
            asked = self._training.request([self._task(sample, sample.group_index, step)], step=step, group_size=size)
            self._given[key] = asyncio.ensure_future(asked)
        groups = await asyncio.shield(self._given[key])
        for group in groups:
            self._positions.train_on(group)
        place = sample.index % size
        copies = [sample if at == place else _numbered(sample, sample.index - place + at) for at in range(size)]
        return self._attempts(groups[0] if groups else None, copies)[place]

    async def evaluation_attempt(self, sample: Any, sampling_params: Mapping[str, Any]) -> list[Any]:
        """The samples of one attempt at a prompt of an evaluation.

        slime numbers the prompts of each dataset from 0, so the content of a prompt names its task.
        """
        step = _current_step()
        given = {name: sampling_params[key] for key, name in _EVALUATION_SAMPLING.items() if key in sampling_params}
        live = self._evaluation("eval", msgspec.structs.replace(self._settings.sampling, **given))
        groups = await live.request([self._task(sample, None, step, "eval")], step=step, split="eval", group_size=1)
        return self._attempts(groups[0] if groups else None, [sample])[0]

    def _begin(self, step: int) -> None:
        """At the first request of a step, mark earlier groups as done. A job that was resumed goes back to the step."""
        if self._positions.begin(step):
            self._given = {key: value for key, value in self._given.items() if key[0] == step}

    def _task(self, sample: Any, number: Any, step: int, split: str | None = None) -> Task:
        """A task with an id: its own, the number of its prompt in the step, or that of its content without a number."""
        task = dict(self._to_task(sample))
        if task.get("id") is None and number is not None:
            task["id"] = f"prompt-{number}"
        return self._names.name(with_id(task), step, split)

    def _evaluation(self, split: str, sampling: SamplingParams) -> LiveGroups:
        if (split, sampling) not in self._evaluating:
            settings = msgspec.structs.replace(self._settings, sampling=sampling, kept_ids=False)
            number = sum(other == split for other, _ in self._evaluating)
            consumer = f"slime-{split}-{number}" if number else f"slime-{split}"
            self._evaluating[split, sampling] = self._open(settings, consumer)
        return self._evaluating[split, sampling]

    def _attempts(self, group: Group | None, prompts: Sequence[Any]) -> list[list[Any]]:
        """slime's samples of each attempt. An attempt that failed or has nothing to train gets a blank sample."""
        by_attempt: dict[int, list[Any]] = {}
        if group is not None:
            attempts = {rollout.id: rollout.head.attempt for rollout in group.rollouts}
            for row, sample in zip(slime_samples(group.samples), group.samples, strict=True):
                at = attempts[sample.rollout]
                by_attempt.setdefault(at, []).append(_filled(prompts[at], self._with_kept_ids(row)))
            log_unfinished(group)
        return [
            by_attempt.get(at) or [_filled(prompt, self._with_kept_ids(_blank(*blank_reward(group, at))))]
            for at, prompt in enumerate(prompts)
        ]

    def _with_kept_ids(self, row: dict[str, Any]) -> dict[str, Any]:
        """A row with the fields for kept ids, which slime needs in all samples if it samples with top-p."""
        if self._args.rollout_top_p == 1.0:
            return row
        none = {"rollout_top_p_token_ids": [], "rollout_top_p_token_offsets": [0] * (row["response_length"] + 1)}
        return none | row


def _current_step() -> int:
    """The step that slime's own rollout function is at."""
    return int(import_module("slime.rollout.sample_hooks")._current_rollout_id or 0)


def _job(args: Any) -> SlimeRollouts:
    if id(args) not in _jobs:
        _jobs[id(args)] = SlimeRollouts(args)
    return _jobs[id(args)]


def _settings(args: Any, given: Mapping[str, Any]) -> CollectSettings:
    """The settings of `rolltape.yaml`, with slime's own arguments as defaults."""
    own = {
        "source": "slime",
        "model": args.hf_checkpoint,
        "group_size": args.n_samples_per_prompt,
        "kept_ids": args.rollout_top_p != 1.0,
        "sampling": {
            "temperature": args.rollout_temperature,
            "top_p": args.rollout_top_p,
            "top_k": args.rollout_top_k,
            "max_tokens": args.rollout_max_response_len,
        },
    }
    if getattr(args, "rollout_max_context_len", None):
        own["context_budget"] = args.rollout_max_context_len
    return settings_in_config(given, own, "rolltape in slime's custom config")


def _evaluation_samples(args: Any, dataset: Any) -> list[Any]:
    """The samples of an evaluation dataset, one for each prompt, read by slime itself."""
    data, processing = import_module("slime.utils.data"), import_module("slime.utils.processing_utils")
    tokenizer = processing.load_tokenizer(args.hf_checkpoint, trust_remote_code=True)
    loaded = data.Dataset(
        dataset.path,
        tokenizer=tokenizer,
        processor=None,
        max_length=args.eval_max_prompt_len,
        prompt_key=dataset.input_key,
        label_key=dataset.label_key,
        metadata_key=dataset.metadata_key,
        tool_key=dataset.tool_key,
        apply_chat_template=False,
    )
    samples: list[Any] = loaded.samples
    return samples


def _numbered(sample: Any, index: int) -> Any:
    """A sample of the same prompt, under another number."""
    fields = {name: getattr(sample, name) for name in ("prompt", "label", "metadata", "group_index")}
    return type(sample)(**fields, index=index)


def _filled(prompt: Any, row: Mapping[str, Any]) -> Any:
    """slime's sample of a prompt, with the recorded data. Samples of one rollout share its number."""
    own = {
        "prompt": prompt.prompt,
        "label": prompt.label,
        "group_index": prompt.group_index,
        "index": prompt.index,
        "rollout_id": prompt.index,
        "metadata": {**(prompt.metadata or {}), **row["metadata"]},
    }
    return type(prompt).from_dict({**row, **own})


def _blank(reward: float, is_own: bool) -> dict[str, Any]:
    """The row of a sample that trains nothing, so that slime has one for each attempt."""
    return {
        "tokens": [0, 0],
        "response_length": 1,
        "loss_mask": [0],
        "rollout_log_probs": [0.0],
        "reward": reward,
        "status": "completed" if is_own else "failed",
        "remove_sample": True,
        "metadata": {"rolltape": {"sample": None, "advantage": 0.0, "loss_weight": 0.0}},
    }

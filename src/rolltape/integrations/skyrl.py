"""SkyRL: a generator that runs agents through the gateway, in front of SkyRL's own inference engines.

    class AgentExp(BasePPOExp):
        def get_generator(self, cfg, tokenizer, inference_engine_client):
            settings = rolltape.CollectSettings(source="math", model=cfg.trainer.policy.model.path, max_turns=8)
            step_wise = cfg.generator.step_wise_trajectories
            return RolltapeGenerator("runs/exp1", inference_engine_client, collect=settings, step_wise=step_wise)

Each prompt of SkyRL's dataset is a task, attempted `n_samples_per_prompt` times. To install it: `pip install skyrl`.
"""

import asyncio
import atexit
from collections.abc import Callable, Mapping, Sequence
from os import PathLike, fspath
from typing import Any

import msgspec

from rolltape.collect.settings import CollectSettings
from rolltape.errors import EngineFault, GroupsError
from rolltape.export.formats import skyrl as form
from rolltape.gateway.engines.function import FunctionEngine
from rolltape.gateway.engines.protocol import Generated, Generation
from rolltape.gateway.engines.sampled import FINISHES, parse_finish, sampled_ids, sampled_logprobs, sampling_fields
from rolltape.gateway.request import SamplingParams
from rolltape.groups import Group
from rolltape.integrations.attempts import blank_reward, report_left_out, samples_by_attempt
from rolltape.integrations.live import LiveGroups
from rolltape.integrations.steps import StepPositions
from rolltape.records.policy import Credit, CutPolicy
from rolltape.records.sample import Sample
from rolltape.records.turn import LogprobKind

try:
    from skyrl.train.generators.base import GeneratorInterface
except ModuleNotFoundError as missing:
    if missing.name != "skyrl":
        raise  # it is installed, and something it needs is missing
    raise ImportError("rolltape.integrations.skyrl needs SkyRL; pip install skyrl") from missing

ToTask = Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]  # a prompt and its env_extras → a task
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_tokens")  # of SkyRL's sampling parameters


class SkyrlEngine(FunctionEngine):
    """Samples with SkyRL's inference engine client. Each reply has the client's weight version on the tape.

    SkyRL freezes replies while it updates weights, and they continue under the new weights. The version of such a reply
    is recorded as between the two.
    """

    def __init__(self, client: Any, *, context: int | None = None) -> None:
        applies = (*_SAMPLING, "seed")
        name = "SkyRL's inference engine client"
        super().__init__(self._sample, name=name, model=client.model_name, context=context, applies=applies)
        self._client = client

    async def _sample(self, prompt_ids: list[int], wanted: Generation) -> Generated:
        where = f"{self.name}, generation {wanted.id}"
        before = self._version()
        sampling = sampling_fields(msgspec.structs.replace(wanted.sampling, stop=None))
        sampling |= {"logprobs": 1, "stop_token_ids": list(wanted.stop_ids), "skip_special_tokens": False}
        given = {"prompt_token_ids": [prompt_ids], "sampling_params": sampling, "session_ids": [wanted.session]}
        output = await self._client.generate(given)
        if len(output["response_ids"]) != 1:
            raise EngineFault(f"{where}: one reply was asked for, but {len(output['response_ids'])} came")
        ids = sampled_ids(output["response_ids"][0], where)
        logprobs = (output.get("response_logprobs") or [None])[0]
        return Generated(
            ids=ids,
            logprobs=None if logprobs is None else sampled_logprobs(logprobs, ids, where),
            finish=parse_finish(output["stop_reasons"][0], FINISHES, where),
            first_version=before,
            last_version=self._version(),
            logprob_kind=LogprobKind.RAW,  # vLLM's default, which SkyRL does not change
        )

    def _version(self) -> str | None:
        version = getattr(self._client, "weight_version", None)
        return None if version is None else str(version)


class RolltapeGenerator(GeneratorInterface):  # type: ignore[misc]
    """A generator for SkyRL's trainers: agents' rollouts in place of replies to prompts.

    With `step_wise` (SkyRL's `generator.step_wise_trajectories`) every sample of a rollout is a row of its trajectory.
    Without it, SkyRL gets one row for each attempt: the sample with the most trained tokens. A warning, and the group's
    event on the tape, state how many tokens are left out.

    An attempt that failed is a row that does not train. SkyRL needs a reward for it, so it gets the mean of its group's
    other rewards, which does not change their baseline.

    A step's groups are done when SkyRL requests the next step. A job that resumes at a step gets the groups that were
    collected for it from the tape. Evaluations are collected under the split "eval".
    """

    def __init__(
        self,
        run: str | PathLike[str],
        client: Any,
        *,
        collect: CollectSettings,
        step_wise: bool = False,
        to_task: ToTask | None = None,
        policy: CutPolicy | str = "exact",
        credit: Credit | None = None,
        context: int | None = None,
    ) -> None:
        """Name the run; nothing starts before SkyRL requests rollouts.

        Arguments:
            run: The run's folder.
            client: SkyRL's inference engine client.
            collect: What to collect. SkyRL sets the sampling parameters and the group size.
            step_wise: Whether SkyRL trains step-wise.
            to_task: Makes a task from a SkyRL prompt and its `env_extras`. By default, the task has the prompt's
                messages, the extras, and the ground truth as the answer.
            policy: How rollouts are cut into samples.
            credit: Which numbers samples carry; SkyRL computes advantages itself.
            context: The most tokens of prompt and reply together.
        """
        self._run = fspath(run)
        self._settings = collect
        self._step_wise = step_wise
        self._to_task = to_task or prompt_task
        self._policy, self._credit = policy, credit
        self._engine = SkyrlEngine(client, context=context)
        self._lives: dict[tuple[bool, SamplingParams], LiveGroups] = {}
        self._positions: StepPositions | None = None  # None: no request yet
        self._left_out: dict[str, str] = {}  # by group: a sentence on what SkyRL does not get
        atexit.register(self.close)

    def close(self) -> None:
        """End the gateway, and all running attempts."""
        for live in self._lives.values():
            live.close()
        self._lives.clear()

    async def generate(self, input_batch: Any, disable_tqdm: bool = False) -> Any:
        """The rollouts of a batch, as SkyRL's `GeneratorOutput`."""
        self._engine.loop = asyncio.get_running_loop()  # SkyRL's client belongs to it
        trajectories, about = input_batch["trajectory_ids"], input_batch["batch_metadata"]
        if trajectories is None or about is None:
            raise GroupsError("SkyRL gave no trajectory_ids or no batch_metadata, by which rollouts are found")
        trains = about.training_phase == "train"
        live = self._live(trains, input_batch["sampling_params"] or {})
        if trains:
            self._positions = self._positions or StepPositions(live, "skyrl")
            self._positions.begin(about.global_step)
        extras = input_batch["env_extras"] or [{}] * len(trajectories)
        tasks: dict[str, Mapping[str, Any]] = {}
        for trajectory, prompt, extra in zip(trajectories, input_batch["prompts"], extras, strict=True):
            if trajectory.instance_id not in tasks:
                tasks[trajectory.instance_id] = {**self._to_task(prompt, extra), "id": trajectory.instance_id}
        size = 1 + max(trajectory.repetition_id for trajectory in trajectories)
        split = None if trains else "eval"
        groups = await live.request(tasks.values(), step=about.global_step, split=split, group_size=size)
        output = self._output(groups, trajectories)
        for group in groups:
            left_out = self._left_out.pop(group.id, None)
            if trains and self._positions is not None:
                self._positions.train_on(group, left_out)
        return output

    def _live(self, trains: bool, given: Mapping[str, Any]) -> LiveGroups:
        """The `LiveGroups` for these sampling parameters. SkyRL uses different ones for evaluations."""
        known = SamplingParams(**{name: given[name] for name in _SAMPLING if given.get(name) is not None})
        sampling = known.over(self._settings.sampling)
        key = (trains, sampling)
        if key not in self._lives:
            self._lives[key] = LiveGroups(
                self._run,
                collect=msgspec.structs.replace(self._settings, sampling=sampling),
                engine=self._engine,
                policy=self._policy,
                credit=self._credit,
                consumer="skyrl" if trains else "skyrl-eval",
            )
        return self._lives[key]

    def _output(self, groups: Sequence[Group], trajectories: Sequence[Any]) -> dict[str, Any]:
        by_task = {group.task_id: group for group in groups}
        samples = {group.task_id: self._samples(group) for group in groups}
        rows: list[dict[str, Any]] = []
        for trajectory in trajectories:
            found = samples.get(trajectory.instance_id, {}).get(trajectory.repetition_id, [])
            kept = [form.row(sample, trajectory, is_last=sample is found[-1]) for sample in found]
            rows += kept or [_blank(by_task.get(trajectory.instance_id), trajectory)]
        output: dict[str, Any] = form.columns(rows)
        if not self._step_wise:
            output |= {"is_last_step": None, "trajectory_ids": None}
        failed = sum(len(group.unfinished) for group in groups)
        return {
            **output,
            "rollout_metrics": {"generate/rolltape_failed": failed},
            "trajectory_generation_times": None,
            "trajectory_time_splits": None,
            "rollout_expert_indices": None,
            "env_metrics": None,
        }

    def _samples(self, group: Group) -> dict[int, list[Sample]]:
        """The samples that SkyRL gets, by attempt."""
        found = samples_by_attempt(group, form.FORM)
        if self._step_wise:
            return {at: sorted(samples, key=lambda sample: sample.index) for at, samples in found.items()}
        if report := report_left_out(group, found.values(), "SkyRL", "generator.step_wise_trajectories"):
            self._left_out[group.id] = report
        return {at: samples[:1] for at, samples in found.items()}


def prompt_task(prompt: Any, extras: Mapping[str, Any]) -> dict[str, Any]:
    """A SkyRL prompt as a task: its messages, its extras, and the ground truth as the answer."""
    opening = {"prompt": prompt} if isinstance(prompt, str) else {"messages": list(prompt)}
    truth = (extras.get("reward_spec") or extras.get("reward_model") or {}).get("ground_truth")
    return {**opening, **({} if truth is None else {"answer": truth}), **extras}


def _blank(group: Group | None, trajectory: Any) -> dict[str, Any]:
    """A row that trains nothing, so that SkyRL has one for each attempt."""
    reward, is_own = blank_reward(group, trajectory.repetition_id)
    return {
        "prompt_token_ids": [0],
        "response_ids": [0],
        "reward": reward,
        "loss_mask": [0],
        "stop_reason": "stop" if is_own else "error",
        "rollout_logprobs": [0.0],
        "trajectory_id": trajectory,
        "is_last_step": True,
    }

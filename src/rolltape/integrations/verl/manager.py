"""The agent loop manager of a verl job."""

import atexit
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from importlib import import_module
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from verl import DataProto
from verl.utils.ray_utils import auto_await

from rolltape.collect.functions import function_named
from rolltape.collect.settings import settings_in_config
from rolltape.collect.tasks import Task
from rolltape.errors import GroupsError
from rolltape.export.formats.arrays import VersionNumbers, as_tensors
from rolltape.export.formats.verl import arrays
from rolltape.groups import Group
from rolltape.integrations.attempts import report_left_out
from rolltape.integrations.background import BackgroundLoop
from rolltape.integrations.live import LiveGroups, with_id
from rolltape.integrations.steps import StepPositions, TaskNames
from rolltape.integrations.verl.engine import client_engine, server_logprob_kind
from rolltape.integrations.verl.rows import (
    Row,
    failed_attempt,
    finished_attempts,
    loop_output,
    plain,
    prompt_task,
    row_at,
)
from rolltape.records.sample import Sample

log = logging.getLogger("rolltape.integrations")


class RolltapeManager:
    """The agent loop manager of a verl job: `generate_sequences` returns the rollouts of a batch of prompts.

    It accepts both forms that verl's trainers use. For a `DataProto` whose rows are attempts, it returns a `DataProto`
    with the same rows. The prompts of a `TensorDict` are collected in the background, and their samples are put into
    verl's TransferQueue.
    """

    def __init__(
        self,
        config: Any,
        llm_client: Any,
        teacher_client: Any = None,
        reward_loop_worker_handles: Any = None,
    ) -> None:
        """verl calls it. Rewards come from our environments, so verl's own reward workers are not used."""
        block = OmegaConf.to_container(OmegaConf.create(config.get("rolltape") or {}), resolve=True)
        given = {str(name): value for name, value in block.items()} if isinstance(block, dict) else {}
        if "run" not in given:
            raise GroupsError("verl's config has no rolltape.run; add +rolltape.run=runs/exp1")
        rollout = config.actor_rollout_ref.rollout
        if teacher_client is not None:
            raise GroupsError("verl's config enables distillation, and its teacher's logprobs are not recorded")
        if rollout.get("enable_rollout_routing_replay"):
            raise GroupsError(
                "enable_rollout_routing_replay is on, but routed experts are not taken from verl's client"
            )
        self._rollout = rollout
        self._client = llm_client
        self._run = str(given["run"])
        self._policy = str(given.get("policy", "exact"))
        self._to_task: Callable[[Row], Mapping[str, Any]] = (
            function_named(given["to_task"]) if "to_task" in given else prompt_task
        )
        self._model = str(config.actor_rollout_ref.model.path)
        self._live = {
            False: self._open(given, rollout, "verl"),
            True: self._open(given, rollout.val_kwargs, "verl-val"),
        }
        self._positions = StepPositions(self._live[False], "verl")
        self._names = TaskNames()
        self._publishing: BackgroundLoop | None = None
        self._published: list[Future[None]] = []
        atexit.register(self.close)

    @classmethod
    def create(cls, *args: Any, **kwargs: Any) -> "RolltapeManager":
        """Make a manager, as verl calls it."""
        return cls(*args, **kwargs)

    def close(self) -> None:
        """End the gateway, and all running attempts."""
        if self._publishing is not None:
            self._publishing.close()
        for live in self._live.values():
            live.close()

    @auto_await  # type: ignore[untyped-decorator]
    async def generate_sequences(self, prompts: Any) -> DataProto | None:
        """Run the rollouts of a batch of prompts, as the class describes."""
        if isinstance(prompts, DataProto):
            return await self._answer(prompts)
        self._publish_later(prompts)
        return None

    async def _answer(self, prompts: DataProto) -> DataProto:
        """An output row for each input row: a rollout's sample with the most trained tokens, or a blank sample."""
        began = time.monotonic()
        if "__do_sample__" in prompts.non_tensor_batch:
            raise GroupsError("algorithm.adv_estimator is remax, which samples greedily beside; use rolltape or grpo")
        validates = bool(prompts.meta_info.get("validate", False))
        rows = [{name: values[at] for name, values in prompts.non_tensor_batch.items()} for at in range(len(prompts))]
        keys = [row.get("uid", at) for at, row in enumerate(rows)]
        firsts: dict[Any, Row] = {}
        for key, row in zip(keys, rows, strict=True):
            firsts.setdefault(key, row)
        step = max(0, int(prompts.meta_info.get("global_steps", 0)))
        tasks = dict(zip(firsts, self._begin(firsts.values(), step, validates), strict=True))
        groups = await self._live[validates].request(
            tasks.values(), step=step, split="val" if validates else None, group_size=self._attempts(validates)
        )
        by_task = {group.task_id: self._take(group, validates) for group in groups}
        seen: Counter[Any] = Counter()
        chosen: list[Sample] = []
        turns = []
        for key in keys:
            attempts = by_task.get(tasks[key].id) or [failed_attempt(None)]
            attempt = attempts[seen[key] % len(attempts)]  # verl repeats rows to get a divisible number
            seen[key] += 1
            chosen.append(attempt[1][0])
            turns.append(attempt[0])
        batch = self._tensors(chosen)
        others = {
            "__num_turns__": np.array(turns, dtype=np.int32),
            "multi_modal_inputs": np.array([{} for _ in chosen], dtype=object),
            "sample": np.array([sample.id for sample in chosen], dtype=object),
            **self._bounds(chosen),
        }
        timing = {"agent_loop/generate_sequences/max": time.monotonic() - began}
        return DataProto.from_dict(batch, others, {"timing": timing, "reward_extra_keys": []})

    def _publish_later(self, prompts: Any) -> None:
        """Collect in the background, prompt by prompt."""
        rows = [row_at(prompts, at) for at in range(len(prompts))]
        validates = bool(rows[0].get("validate", False))
        step = int(rows[0]["global_steps"])
        self._publishing = self._publishing or BackgroundLoop("rolltape-verl")
        self._published = [one for one in self._published if not one.done()]
        for row, task in zip(rows, self._begin(rows, step, validates), strict=True):
            self._published.append(self._publishing.submit(self._publish(row, task, step, validates)))

    def wait(self) -> None:
        """Wait until all prompts that were given as a `TensorDict` are in the queue."""
        while self._published:
            self._published.pop(0).result()

    async def _publish(self, row: Row, task: Task, step: int, validates: bool) -> None:
        """Put all samples of a prompt's rollouts into the queue, and then the prompt's final status."""
        queue = import_module("transfer_queue")
        uid, partition = row["uid"], "val" if validates else "train"
        await queue.async_kv_put(key=uid, partition_id=partition, tag={"status": "running"})
        status = "failure"
        try:
            size = int(row.get("__rollout_n__", self._attempts(validates)))
            for group in await self._live[validates].request(
                [task], step=step, split="val" if validates else None, group_size=size
            ):
                keys, fields, tags = self._queue_rows(group, row, step)
                if keys:
                    together = import_module("verl.utils.tensordict_utils").list_of_dict_to_tensordict(fields)
                    await queue.async_kv_batch_put(keys=keys, fields=together, tags=tags, partition_id=partition)
                    status = "finished"
                if not validates:
                    group.done()
        except Exception:
            log.exception("verl's prompt %s, task %s: its rollouts could not be collected", uid, task.id)
        await queue.async_kv_put(key=uid, partition_id=partition, tag={"status": status})

    def _queue_rows(self, group: Group, row: Row, step: int) -> tuple[list[str], list[Row], list[Row]]:
        """Keys, fields and tags of a group's samples. Failed attempts have no samples."""
        keys, fields, tags = [], [], []
        kept = {
            name: value for name, value in row.items() if name not in ("validate", "__rollout_n__", "__do_sample__")
        }
        for attempt, (turns, samples) in finished_attempts(group).items():
            for index, sample in enumerate(samples):
                output = loop_output(sample, turns)
                field = {**output.as_dict(), **kept, "session_id": attempt, "multi_modal_inputs": {}}
                field["loss_mask"] = field["response_mask"]
                field["input_ids"] = torch.cat([field["prompts"], field["responses"]])
                field["position_ids"] = torch.arange(len(field["input_ids"]))
                keys.append(f"{row['uid']}_{attempt}_{index}")
                fields.append(field)
                lengths = {"prompt_len": len(field["prompts"]), "response_len": len(field["responses"])}
                bounds = {name: output.extra_fields[name] for name in ("min_global_steps", "max_global_steps")}
                seq_len = len(field["input_ids"])
                tags.append({"status": "success", **lengths, "seq_len": seq_len, "global_steps": step, **bounds})
        return keys, fields, tags

    def _begin(self, rows: Iterable[Row], step: int, validates: bool) -> list[Task]:
        """The tasks of rows. The first call of a step marks earlier groups as done."""
        if not validates:
            self._positions.begin(step)
        tasks = [with_id(plain(self._to_task(plain(row)))) for row in rows]
        return [self._names.name(task, step, "val" if validates else None) for task in tasks]

    def _take(self, group: Group, validates: bool) -> list[tuple[int, list[Sample]]]:
        """The number of turns and the samples of each attempt. What verl does not get of the group is noted."""
        attempts = finished_attempts(group)
        if not validates:
            left_out = report_left_out(group, [samples for _, samples in attempts.values()], "verl", "its trainer v1")
            self._positions.train_on(group, left_out)
        return [attempts.get(at) or failed_attempt(group.mean_reward) for at in range(self._attempts(validates))]

    def _tensors(self, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
        batch = arrays(
            samples,
            pad_id=self._pad_id(),
            prompt_length=max(self._rollout.prompt_length, *(sample.prompt_tokens for sample in samples)),
            response_length=max(
                self._rollout.response_length, *(len(sample.ids) - sample.prompt_tokens for sample in samples)
            ),
        )
        del batch["advantages"], batch["returns"]  # verl's trainer computes them
        batch["reward_baselines"] = batch["rm_scores"].sum(1) - np.array([s.advantage for s in samples], np.float32)
        return as_tensors(batch)

    def _bounds(self, samples: Sequence[Sample]) -> dict[str, Any]:
        bounds = [VersionNumbers().bounds(sample) or (None, None) for sample in samples]
        return {
            "min_global_steps": np.array([oldest for oldest, _ in bounds], dtype=object),
            "max_global_steps": np.array([newest for _, newest in bounds], dtype=object),
        }

    def _attempts(self, validates: bool) -> int:
        return int(self._rollout.val_kwargs.n if validates else self._rollout.n)

    def _pad_id(self) -> int:
        tokenizer = import_module("verl.utils").hf_tokenizer(self._model)
        return int(tokenizer.pad_token_id or 0)

    def _open(self, given: Mapping[str, Any], sampling: Any, consumer: str) -> LiveGroups:
        rollout = self._rollout
        own = {
            "source": "verl",
            "model": self._model,
            "group_size": int(rollout.n),
            "sampling": {
                "temperature": float(sampling.temperature),
                "top_p": float(sampling.top_p),
                "top_k": int(sampling.top_k),
                "max_tokens": int(rollout.response_length),
            },
            "context_budget": int(rollout.get("max_model_len") or rollout.prompt_length + rollout.response_length),
        }
        settings = settings_in_config(given, own, "rolltape in verl's config")
        engine = client_engine(self._client, server_logprob_kind(rollout, sampling))
        return LiveGroups(self._run, collect=settings, engine=engine, policy=self._policy, consumer=consumer)

"""AReaL: a rollout workflow that runs agents through the gateway, in front of AReaL's own inference engine.

    trainer.train(
        workflow="rolltape.integrations.areal.RolltapeWorkflow",
        workflow_kwargs={"run": "runs/exp1", "collect": {"model": model_path, "group_size": 8}},
    )

`collect` has the fields of `CollectSettings`. docs/how-to/train/areal.md has an example.
"""

import asyncio
import atexit
from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any

import msgspec

try:
    from areal import workflow_context
    from areal.api import ModelRequest, RolloutWorkflow
    from areal.api.cli_args import GenerationHyperparameters
    from areal.utils import stats_tracker
except ImportError as error:
    raise ImportError(
        f"{error}; rolltape.integrations.areal runs inside AReaL: install rolltape where areal is"
    ) from error

from rolltape.collect.functions import function_named
from rolltape.collect.settings import CollectSettings, settings_in_config
from rolltape.collect.tasks import Task
from rolltape.export.formats.areal import tensor_dict
from rolltape.gateway.engines.function import FunctionEngine
from rolltape.gateway.engines.protocol import Generated, Generation
from rolltape.gateway.engines.sampled import FINISHES, parse_finish, sampled_ids, sampled_logprobs
from rolltape.integrations.attempts import log_unfinished
from rolltape.integrations.live import LiveGroups, with_id
from rolltape.integrations.steps import StepPositions, TaskNames
from rolltape.records.turn import LogprobKind, Segment

_MAX_CONTEXT = 1_000_000_000  # the gateway enforces the context; AReaL's own limit is on prompt and reply together


class RolltapeWorkflow(RolloutWorkflow):  # type: ignore[misc]
    """A workflow whose episode is a whole group: all attempts at a task, as one batch of samples.

    AReaL's own number of samples (`gconfig.n_samples`) stays at 1; `collect` sets the group's size. An episode without
    any sample to train returns None, which AReaL counts as rejected.
    """

    def __init__(
        self,
        run: str,
        collect: CollectSettings | Mapping[str, Any],
        *,
        policy: str = "exact",
        advantages_as_rewards: bool = True,
        to_task: str | Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
        logprob_kind: str | None = None,
    ) -> None:
        """Name the run; nothing starts before the first episode.

        Arguments:
            run: The run's folder.
            collect: A `CollectSettings`, or its fields; `source` is "areal" if it names none.
            policy: How rollouts are cut into samples.
            advantages_as_rewards: Put our advantages where AReaL has rewards; turn its `reward_norm` off. With False
                rewards are given, and AReaL computes its baseline over the rows of an episode.
            to_task: A function, or its name as in "python:module:function", from a row of AReaL's dataset to a task.
                None: the row is the task.
            logprob_kind: The distribution of the logprobs of AReaL's servers.
        """
        if not isinstance(collect, CollectSettings):
            collect = settings_in_config(collect, {"source": "areal"}, "collect", other_keys=())
        self._key = (run, policy, logprob_kind, msgspec.json.encode(collect))
        self._settings = collect
        self._advantages_as_rewards = advantages_as_rewards
        self._to_task: Callable[[Mapping[str, Any]], Mapping[str, Any]] = (
            function_named(to_task) if isinstance(to_task, str) else to_task or dict
        )

    async def arun_episode(self, engine: Any, data: Mapping[str, Any]) -> dict[str, Any] | None:
        """The samples of all attempts at a task, as AReaL's workflows return them, or None if nothing trains."""
        source = _source(self._key, self._settings, engine)
        split = "eval" if workflow_context.get().is_eval else None
        step = max(0, int(engine.get_version()))
        task = source.begin(self._to_task(data), step, split)
        groups = await source.live.request([task], step=step, split=split)
        scope = stats_tracker.get(workflow_context.stat_scope())
        for group in groups:
            for reward in group.rewards:
                if reward is not None:
                    scope.scalar(reward=reward)
            log_unfinished(group)
            if split is None:
                group.done()
        samples = [sample for group in groups for sample in group.samples]
        if not samples:
            return None
        return tensor_dict(samples, advantages_as_rewards=self._advantages_as_rewards)


def engine_of(inference_engine: Any, logprob_kind: LogprobKind | str | None = None) -> FunctionEngine:
    """AReaL's inference engine as an engine behind the gateway. Call it in the event loop of AReaL's workflows."""

    async def sample(prompt_ids: list[int], wanted: Generation) -> Generated:
        sampling = wanted.sampling
        temperature = 1.0 if sampling.temperature is None else sampling.temperature
        settings = GenerationHyperparameters(
            n_samples=1,
            max_new_tokens=sampling.max_tokens,
            max_tokens=_MAX_CONTEXT,
            greedy=temperature == 0,
            temperature=temperature or 1.0,
            top_p=1.0 if sampling.top_p is None else sampling.top_p,
            top_k=_MAX_CONTEXT if sampling.top_k in (None, -1) else sampling.top_k,
            stop_token_ids=list(wanted.stop_ids),
        )
        # Requests with the same rid go to the same server, which has the session's prefix.
        response = await inference_engine.agenerate(
            ModelRequest(rid=wanted.session, input_ids=prompt_ids, gconfig=settings)
        )
        where = f"AReaL's engine, generation {wanted.id}"
        ids = sampled_ids([int(token) for token in response.output_tokens], where)
        finish = "stop" if response.stop_reason == "tool_calls" else response.stop_reason
        return Generated(
            ids=ids,
            logprobs=sampled_logprobs(response.output_logprobs, ids, where),
            finish=parse_finish(finish, FINISHES, where),
            segments=_segments(response.output_versions),
            logprob_kind=None if logprob_kind is None else LogprobKind(logprob_kind),
        )

    return FunctionEngine(sample, name="AReaL's engine")


def close_all() -> None:
    """End all gateways of this process, and all running attempts. It is called when the process ends."""
    while _sources:
        _sources.popitem()[1].live.close()


class _Source:
    """The groups of one run by one inference engine. AReaL makes a new workflow for each episode; they share this."""

    def __init__(self, key: tuple[Any, ...], settings: CollectSettings, engine: Any) -> None:
        run, policy, logprob_kind, _ = key
        self.engine = engine  # kept, so that no other engine gets its id()
        self.loop = asyncio.get_running_loop()
        self.live = LiveGroups(
            run, collect=settings, engine=engine_of(engine, logprob_kind), policy=policy, consumer="areal"
        )
        self._positions = StepPositions(self.live, "areal")
        self._names = TaskNames()

    def begin(self, given: Mapping[str, Any], step: int, split: str | None) -> Task:
        """The task that AReaL requests at a version. The first task of a version marks earlier groups as done."""
        if split is None:
            self._positions.begin(step)
        return self._names.name(with_id(given), step, split)


_sources: dict[tuple[Any, ...], _Source] = {}
atexit.register(close_all)


def _source(key: tuple[Any, ...], settings: CollectSettings, engine: Any) -> _Source:
    here = (*key, id(engine))
    found = _sources.get(here)
    if found is not None and found.loop is not asyncio.get_running_loop():
        _sources.pop(here).live.close()  # AReaL's engine was ended and begun again
    if here not in _sources:
        _sources[here] = _Source(key, settings, engine)
    return _sources[here]


def _segments(versions: list[int]) -> tuple[Segment, ...]:
    found, start = [], 0
    for version, tokens in groupby(versions):
        stop = start + len(list(tokens))
        found.append(Segment(start, stop, str(version), str(version)))
        start = stop
    return tuple(found)

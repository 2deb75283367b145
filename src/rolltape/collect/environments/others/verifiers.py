"""The environment `verifiers:NAME`: an installed verifiers environment with its own tasks, agent loop and rewards.

verifiers runs the whole attempt: its harness asks the model through its own interception server, which forwards each
request to the session of the gateway. Its rewards and metrics become the reward and its terms.
"""

import asyncio
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from pydantic import ValidationError

from rolltape.collect.environments.held import HeldOpen
from rolltape.collect.environments.protocol import AGENT, Answer, Connection, Ended, Episode, Message, Opening, Score
from rolltape.collect.environments.task_fields import system_messages, user_message
from rolltape.collect.functions import describe_raised, search_here
from rolltape.collect.tasks import Task
from rolltape.errors import CollectError, TaskError
from rolltape.records.rollout import StopReason

_ATTEMPTS_PER_SERVER = 64  # verifiers keeps an HTTP client of 0.8 MB for every session until its server is closed
_LIMITS = {
    "max_turns": StopReason.MAX_TURNS,
    "max_input_tokens": StopReason.CONTEXT_OVERFLOW,
    "max_total_tokens": StopReason.CONTEXT_OVERFLOW,
    "max_output_tokens": StopReason.MAX_TOKENS,
    "agent_timeout": StopReason.TIMEOUT,
}
# The session's limits, which verifiers sees as errors of its model provider.
_REFUSALS = {429: StopReason.MAX_TURNS}
_OVERFLOW = "context_length_exceeded"


class VerifiersEnvironment:
    """A taskset with its harness, or the environment of a TOML file with a table `env`, as for `vf-eval`."""

    calls_user_code = True

    def __init__(self, name: str) -> None:
        """`name` is a taskset that can be imported, or a .toml file."""
        self.name = f"verifiers:{name}"
        search_here()
        try:
            self._config = _load_config(name)
            self._taskset = vf.load_taskset(self._config.taskset)
        except ValidationError as error:
            raise TaskError(f"{self.name}: {_describe_invalid(error)}; correct it") from None
        except Exception as error:
            raise TaskError(f"{self.name} cannot be loaded: {describe_raised(error)}") from error
        self._role = _find_policy(self.name, self._config)
        self._task_type = type(self._taskset).task_type()
        self._servers: list[_Server] = []

    def tasks(self, split: str | None) -> Iterator[Task]:
        if split is not None:
            raise TaskError(f"{self.name} has no splits; name one in the taskset's own settings, in a .toml file")
        for at, task in enumerate(self._taskset):
            data = task.data.model_dump(mode="json", exclude_defaults=True)
            yield Task(id=task.data.id or str(at), environment=self.name, data=data)

    @property
    def is_endless(self) -> bool:
        """Whether its taskset is infinite."""
        return not self._taskset.bounded

    def check(self, task: Task) -> None:
        self._parse(task)

    def begin(self, task: Task, seed: int) -> Episode:
        return VerifiersEpisode(self, self._parse(task))

    async def run(self, task: Any, connection: Connection, max_turns: int) -> Any:
        """Run one episode of verifiers, through a session of the gateway."""
        context = vf.ModelContext(
            model=connection.model,
            client=vf.EvalClientConfig(base_url=connection.openai_base_url, api_key_var="ROLLTAPE_SESSION_KEY"),
        )
        server = await self._find_server(max_turns)
        try:
            return await server.environment.run_episode(task, context)
        finally:
            await self._leave(server)

    def policy_trace(self, episode: Any) -> Any:
        """The trace of the policy's own run in an episode."""
        traces = [trace for trace in episode.traces if trace.agent.name == self._role]
        if not traces and episode.errors:
            raise CollectError(f"{self.name}: {_describe(episode.errors[-1])}")
        if len(traces) != 1:
            raise CollectError(
                f"{self.name}: its agent {self._role} ran {len(traces)} times; it can be collected if it runs once"
            )
        return traces[0]

    async def close(self) -> None:
        """End the servers."""
        servers, self._servers = self._servers, []
        for server in servers:
            await server.held.close()

    def _parse(self, task: Task) -> Any:
        try:
            data = self._task_type.data_type().model_validate(task.data)
        except ValidationError as error:
            raise TaskError(f"it is not a task of {self.name}: {_describe_invalid(error)}; correct it") from None
        return self._task_type(data, self._config.taskset.task)

    async def _find_server(self, max_turns: int) -> "_Server":
        """The newest server, or a new one when that has had its maximum of attempts."""
        if not self._servers or self._servers[-1].begun >= _ATTEMPTS_PER_SERVER:
            self._servers.append(_Server(_limit_turns(self._config, self._role, max_turns)))
        server = self._servers[-1]
        server.begun += 1
        server.running += 1
        try:
            await server.ready()
        except BaseException:
            server.running -= 1
            if server.has_failed and server in self._servers:
                self._servers.remove(server)  # the next attempt starts another one
            raise
        return server

    async def _leave(self, server: "_Server") -> None:
        server.running -= 1
        if not server.running and server.begun >= _ATTEMPTS_PER_SERVER and server in self._servers:
            self._servers.remove(server)
            await server.held.close()


class _Server:
    """An environment of verifiers with the servers that its attempts share."""

    def __init__(self, config: Any) -> None:
        self.environment = vf.load_environment(config)
        self.begun = 0
        self.running = 0
        self.held: HeldOpen[None] = HeldOpen(self.environment.serving())
        self._opening: asyncio.Task[None] | None = None

    @property
    def has_failed(self) -> bool:
        """Whether they could not be started."""
        return self._opening is not None and self._opening.done() and self._opening.exception() is not None

    async def ready(self) -> None:
        """Wait until the servers run; raises the error of their start."""
        if self._opening is None:
            self._opening = asyncio.create_task(self.held.open())
        await asyncio.shield(self._opening)


class VerifiersEpisode:
    """One attempt. verifiers runs and scores it; this keeps its result."""

    seats = (AGENT,)
    calls_user_code = True

    def __init__(self, environment: VerifiersEnvironment, task: Any) -> None:
        self._environment = environment
        self._task = task
        self._trace: Any = None
        self._stop = StopReason.COMPLETED
        self._running: asyncio.Task[Any] | None = None

    def opening(self, seat: str) -> Opening:
        """The messages with which its harness begins, for a preview. The harness may add instructions and tools."""
        data = self._task.data
        system = system_messages(data.system_prompt)
        if isinstance(data.prompt, str):
            return Opening(messages=[*system, user_message(data.prompt)])
        messages = (message.model_dump(mode="json", exclude_none=True) for message in data.prompt or ())
        return Opening(messages=[*system, *messages])

    def next_seat(self) -> str | None:
        return AGENT if self._trace is None else None

    async def answer(self, seat: str, reply: Message) -> Answer:
        raise CollectError(f"{self._environment.name} has an agent loop of its own; it takes no replies from an agent")

    async def drive(
        self, connections: Mapping[str, Connection], max_turns: int, timeout_s: float
    ) -> Mapping[str, Ended]:
        timeout = self._task.data.timeout
        agent_s = timeout_s if timeout.agent is None else min(timeout.agent, timeout_s)
        task = self._task.with_data(timeout=timeout.model_copy(update={"agent": agent_s}))
        run = self._environment.run(task, connections[AGENT], max_turns)
        self._running = asyncio.ensure_future(run)
        episode = await self._running
        trace = self._environment.policy_trace(episode)
        self._stop = _find_stop(self._environment.name, trace, episode)
        self._trace = trace
        return {AGENT: Ended(stop_reason=self._stop, text=trace.last_reply)}

    async def score(self, seat: str, ended: Ended) -> Score:
        rewards = {name: reward for name, reward in self._trace.rewards.items() if reward is not None}
        metrics = {name: value for name, value in self._trace.metrics.items() if value is not None}
        terms = {name: reward.value for name, reward in rewards.items()}
        terms |= {f"metric:{name}" if name in terms else name: value for name, value in metrics.items()}
        data = {
            "verifiers_trace": self._trace.id,
            "stop_condition": self._trace.stop_condition,
            "rewards": {name: {"score": reward.score, "weight": reward.weight} for name, reward in rewards.items()},
        }
        return Score(reward=self._trace.reward, terms=terms, reward_data=data)

    async def close(self) -> None:
        """Cancel a run, and wait until its processes have ended."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})


def _find_stop(name: str, trace: Any, episode: Any) -> StopReason:
    """Why an attempt ended; raises CollectError if the policy did not cause the end."""
    error = trace.last_error if not trace.ok else None
    if error is not None:
        if error.type == "ProviderError" and _OVERFLOW in error.message:
            return StopReason.CONTEXT_OVERFLOW
        if error.type == "ProviderError" and error.status_code in _REFUSALS:
            return _REFUSALS[error.status_code]
        raise CollectError(f"{name}: {_describe(error)}")
    if not trace.ok or episode.errors:
        raise CollectError(f"{name}: {_describe(episode.errors[-1]) if episode.errors else trace.stop_condition}")
    if trace.stop_condition in _LIMITS:
        return _LIMITS[trace.stop_condition]
    if trace.is_timeout:
        raise CollectError(f"{name}: it took too long ({trace.stop_condition})")
    return StopReason.MAX_TOKENS if trace.is_truncated else StopReason.COMPLETED


def _describe(error: Any) -> str:
    return f"{error.type}: {error.message}"


def _describe_invalid(error: ValidationError) -> str:
    """The problems that pydantic found, on one line."""
    found = (f"{'.'.join(map(str, one['loc']))}: {one['msg'][:1].lower()}{one['msg'][1:]}" for one in error.errors())
    return "; ".join(found)


def _load_config(name: str) -> Any:
    """The settings of an environment. By default it runs on this machine, and its harness executes no code."""
    raw: dict[str, Any] = {"taskset": {"id": name}}
    if name.endswith(".toml"):
        read = tomllib.loads(Path(name).read_text(encoding="utf-8"))
        raw = dict(read.get("env", read))
    taskset = (raw.get("taskset") or {}).get("id", "")
    has_own_harness = vf.default_harness_id(taskset) == taskset
    for role, default in _roles(vf.env_config_type(taskset, raw.get("id") or "")).items():
        given = raw[role] = dict(raw.get(role) or {})
        if "runtime" not in default.model_fields_set:
            given.setdefault("runtime", {"type": "subprocess"})
        if default.harness is None and not has_own_harness:
            given.setdefault("harness", {"id": "null"})
    return vf.resolve_env_config(raw)


def _roles(config: Any) -> dict[str, Any]:
    """The agents that a kind of settings declares, with their defaults."""
    fields = config.model_fields.items()
    return {name: field.default for name, field in fields if isinstance(field.default, vf.AgentConfig)}


def _find_policy(name: str, config: Any) -> str:
    """The one agent that is the policy: all others have their own endpoints."""
    roles = [role for role in _roles(type(config)) if getattr(config, role).client is None]
    if len(roles) != 1:
        which = ", ".join(roles) or "none"
        raise TaskError(
            f"{name}: agents without an endpoint of their own: {which}; there must be one, so give the others a client "
            "in a .toml file"
        )
    return roles[0]


def _limit_turns(config: Any, role: str, max_turns: int) -> Any:
    agent = getattr(config, role)
    turns = max_turns if agent.max_turns is None else min(agent.max_turns, max_turns)
    return config.model_copy(update={role: agent.model_copy(update={"max_turns": turns})})

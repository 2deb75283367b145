"""Episodes of stepped worlds: a reply is an action, and the next observation is the next message.

`gymnasium` and `openenv` are such environments. They differ in their `World`.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Protocol

import msgspec

from rolltape.collect.environments.message import ErrorCounts, ErrorHandling, Then
from rolltape.collect.environments.protocol import AGENT, Answer, Ended, Message, Opening, Score
from rolltape.collect.environments.task_fields import parse_fields, system_messages, user_message
from rolltape.collect.functions import PREFIX, call_function, function_named
from rolltape.collect.tasks import Task
from rolltape.errors import CollectError, TaskError
from rolltape.records.jsonable import shown
from rolltape.records.messages import content_text
from rolltape.records.rollout import StopReason

_SEEDS = 2**31


class StepFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a task of this kind."""

    prompt: str | None = None  # before the first observation; None for the world's own text
    system: str | None = None
    seed: Annotated[int, msgspec.Meta(ge=0)] | None = None  # None to make it from the attempt, so that attempts differ
    options: dict[str, Any] = {}  # the world's own
    observation: str | None = None  # "python:module:function": an observation → its text
    action: str | None = None  # "python:module:function": a reply's text → an action; ValueError if it is none
    malformed: Then | ErrorHandling = "tell"  # replies that are not an action


class UnreadableAction(Exception):
    """A reply is not an action; the message for the model has the reason."""


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    observation: Any
    info: Mapping[str, Any] = {}
    reward: float = 0.0
    done: bool = False
    cut: bool = False  # the world ended the episode at a limit of its own


class World(Protocol):
    """One attempt's copy of a world."""

    async def open(self, seed: int) -> StepResult:
        """Start it, and return the first observation."""

    def rules(self) -> str:
        """The prompt of a task that has none."""

    def describe(self, result: StepResult) -> str:
        """An observation as text."""

    def parse(self, text: str) -> Any:
        """A reply as an action; raises UnreadableAction."""

    async def step(self, action: Any) -> StepResult:
        """Act; raises UnreadableAction if the world refuses the action as malformed."""

    async def close(self) -> None:
        """End it."""


def seed_tasks(environment: str, split: str | None) -> Iterator[Task]:
    """A task for each seed, from 0, for an environment that has no tasks of its own."""
    if split is not None:
        raise TaskError(f"{environment} has no splits; leave --split out")
    return (Task(id=f"seed-{n}", environment=environment, data={"seed": n}) for n in itertools.count())


def parse_step_fields(task: Task) -> StepFields:
    """The fields of a task; TaskError if one is wrong."""
    fields = parse_fields(task, StepFields)
    for name in (fields.observation, fields.action):
        if name is not None:
            if not name.startswith(PREFIX):
                raise TaskError(f"{shown(name)} is not a function; write python:module:function")
            function_named(name)
    return fields


class SteppedEpisode:
    """One attempt in a world."""

    seats = (AGENT,)

    def __init__(self, fields: StepFields, world: World, seed: int) -> None:
        self._fields = fields
        self._world = world
        self._seed = seed % _SEEDS if fields.seed is None else fields.seed
        self._observation = _function(fields.observation)
        self._action = _function(fields.action)
        self._errors = ErrorCounts(malformed=fields.malformed)
        self._first: str | None = None  # None if it is not open
        self._over = False

    async def open(self) -> None:
        """Start the world."""
        self._first = await self._describe(await self._world.open(self._seed))

    async def close(self) -> None:
        """End it."""
        await self._world.close()

    def opening(self, seat: str) -> Opening:
        first = "(the first observation)" if self._first is None else self._first
        rules = self._world.rules() if self._fields.prompt is None else self._fields.prompt
        messages = [*system_messages(self._fields.system), user_message("\n".join(filter(None, (rules, first))))]
        return Opening(messages=messages)

    def next_seat(self) -> str | None:
        return None if self._over else AGENT

    async def answer(self, seat: str, reply: Message) -> Answer:
        text = content_text(reply.get("content"))
        try:
            action = await self._parse(text)
            result = await self._world.step(action)
        except UnreadableAction as error:
            return self._correct(text, str(error))
        self._over = result.done or result.cut
        return Answer(
            messages=[] if self._over else [user_message(await self._describe(result))],
            done=self._over,
            reward=result.reward,
            stop_reason=StopReason.MAX_TURNS if result.cut and not result.done else StopReason.COMPLETED,
            env_state={"action": str(action), "observation": str(result.observation)},
        )

    async def score(self, seat: str, ended: Ended) -> Score:
        return Score(reward=0.0, reward_data={"seed": self._seed, **self._errors.counts})  # the steps were rewarded

    def _correct(self, text: str, wrong: str) -> Answer:
        answer = self._errors.correct(wrong, text)
        self._over = answer.done
        return answer

    async def _describe(self, result: StepResult) -> str:
        if self._observation is None:
            return self._world.describe(result)
        text = await call_function(self._observation, result.observation, dict(result.info))
        if not isinstance(text, str):
            raise CollectError(f"{self._fields.observation} returned {shown(text)}; return text")
        return text

    async def _parse(self, text: str) -> Any:
        if self._action is None:
            return self._world.parse(text)
        try:
            return await call_function(self._action, text)
        except ValueError as error:
            raise UnreadableAction(str(error)) from None


def _function(name: str | None) -> Callable[..., Any] | None:
    return None if name is None else function_named(name)

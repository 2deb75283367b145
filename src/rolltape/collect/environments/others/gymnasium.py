"""The environment `gymnasium:ID`: a Gymnasium environment whose observations and actions are text.

Discrete and text spaces are converted to text here. For other spaces a task names functions.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import gymnasium
from gymnasium.spaces import Discrete, Space, Text

from rolltape.collect.environments.others.stepped import (
    StepFields,
    SteppedEpisode,
    StepResult,
    UnreadableAction,
    parse_step_fields,
    seed_tasks,
)
from rolltape.collect.environments.protocol import Episode
from rolltape.collect.functions import call_function, describe_raised, search_here
from rolltape.collect.tasks import Task
from rolltape.errors import TaskError

_NUMBER = re.compile(r"-?\d+")
_MAX_DIGITS = 20  # an action has fewer
_HIGHLIGHTED = re.compile(r"\x1b\[[0-9;]*m(.*?)\x1b\[0m", re.DOTALL)
_OTHER_CODES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_DRAWN = "ansi"  # the render mode that gives text


class GymnasiumEnvironment:
    """A registered environment. Its tasks are seeds: all attempts at a task begin alike."""

    is_endless = True

    def __init__(self, name: str) -> None:
        """`name` is an id of Gymnasium's registry, if necessary with its module before a colon."""
        self.name = f"gymnasium:{name}"
        self._id = name
        search_here()
        try:
            made = gymnasium.make(name)
        except Exception as error:
            raise TaskError(f"{self.name} cannot be made: {describe_raised(error)}") from error
        self._observations: Space[Any] = made.observation_space
        self._actions: Space[Any] = made.action_space
        self._is_drawn = _DRAWN in (made.metadata.get("render_modes") or ())
        with contextlib.suppress(Exception):  # user code may raise anything; only the spaces were needed
            made.close()

    def tasks(self, split: str | None) -> Iterator[Task]:
        """A task for each seed, from 0."""
        return seed_tasks(self.name, split)

    def check(self, task: Task) -> None:
        fields = parse_step_fields(task)
        if fields.observation is None and not self._is_drawn and not _has_text(self._observations):
            raise TaskError(
                f"observations of {self.name} are {self._observations}, which has no text of its own; add "
                '"observation": "python:module:function"'
            )
        if fields.action is None and not _has_text(self._actions):
            raise TaskError(
                f"actions of {self.name} are {self._actions}, which has no text of its own; add "
                '"action": "python:module:function"'
            )

    def begin(self, task: Task, seed: int) -> Episode:
        fields = parse_step_fields(task)
        return SteppedEpisode(fields, _GymnasiumWorld(self._id, fields, self._actions, is_drawn=self._is_drawn), seed)


class _GymnasiumWorld:
    def __init__(self, name: str, fields: StepFields, actions: Space[Any], *, is_drawn: bool) -> None:
        self._name = name
        self._options = ({"render_mode": _DRAWN} if is_drawn else {}) | fields.options
        self._actions = actions
        self._env: gymnasium.Env[Any, Any] | None = None

    async def open(self, seed: int) -> StepResult:
        # In threads: making an environment may load files, and steps may take long.
        self._env = await call_function(gymnasium.make, self._name, **self._options)
        self._actions = self._env.action_space
        observation, info = await call_function(self._env.reset, seed=seed)
        return StepResult(observation=observation, info=info)

    def rules(self) -> str:
        actions = self._actions
        if isinstance(actions, Discrete):
            first, last = int(actions.start), int(actions.start + actions.n) - 1
            return f"Your actions are the numbers from {first} to {last}. Answer with the number of one."
        return "Answer with your action."

    def describe(self, result: StepResult) -> str:
        drawn = None if self._env is None or self._env.render_mode != _DRAWN else self._env.render()
        drawing = [_without_codes(drawn)] if isinstance(drawn, str) else []
        seen = result.observation
        return "\n".join([*drawing, seen if isinstance(seen, str) else f"Observation: {seen}"])

    def parse(self, text: str) -> Any:
        actions = self._actions
        if not isinstance(actions, Discrete):
            action: Any = text.strip()
            wrong = f"{action!r} is not an action."
        else:
            last = next(iter(reversed(_NUMBER.findall(text))), None)
            # Python refuses to convert numbers of thousands of digits, which a repeating model may write.
            action = int(last) if last is not None and len(last) <= _MAX_DIGITS else None
            wrong = "There is no number in your answer." if last is None else f"{last[:_MAX_DIGITS]} is not an action."
        if action is None or not actions.contains(action):
            raise UnreadableAction(f"{wrong} {self.rules()}")
        return action

    async def step(self, action: Any) -> StepResult:
        assert self._env is not None
        observation, reward, is_over, is_cut, info = await call_function(self._env.step, action)
        return StepResult(
            observation=observation, info=info, reward=float(reward), done=bool(is_over), cut=bool(is_cut)
        )

    async def close(self) -> None:
        if self._env is not None:
            await call_function(self._env.close)


def _has_text(space: Space[Any]) -> bool:
    return isinstance(space, Discrete | Text)


def _without_codes(drawn: str) -> str:
    """A drawing without terminal codes. Highlighted text is put into brackets."""
    return _OTHER_CODES.sub("", _HIGHLIGHTED.sub(r"[\1]", drawn)).strip("\n")

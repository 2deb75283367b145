"""Environments: they ask a task, answer the model's replies, and score an attempt."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module

from rolltape.collect.environments.game import GameEnvironment
from rolltape.collect.environments.games import Game
from rolltape.collect.environments.harbor import HarborEnvironment
from rolltape.collect.environments.judge import Judge
from rolltape.collect.environments.message import MessageEnvironment
from rolltape.collect.environments.preference import PreferenceEnvironment
from rolltape.collect.environments.protocol import (
    AGENT,
    Answer,
    Ended,
    Environment,
    Episode,
    GroupEnvironment,
    Message,
    Opening,
    Score,
    Tool,
    check_episode,
)
from rolltape.collect.environments.rubric import RubricEnvironment
from rolltape.collect.environments.single import DistillEnvironment, ProblemEnvironment
from rolltape.collect.environments.tools import ToolAnswer
from rolltape.collect.functions import (
    PREFIX,
    call_environment,
    call_environment_from_thread,
    describe_raised,
    function_named,
)
from rolltape.collect.tasks import Task
from rolltape.errors import MissingExtra, TaskError
from rolltape.extras import import_extra

__all__ = [
    "AGENT",
    "ENVIRONMENT_NAMES",
    "Answer",
    "Ended",
    "Environment",
    "Environments",
    "Episode",
    "Game",
    "GroupEnvironment",
    "Message",
    "Opening",
    "Score",
    "Tool",
    "ToolAnswer",
    "environment_named",
    "is_of_other_project",
    "opened",
]

log = logging.getLogger("rolltape.collect")

_CLOSE_S = 60.0  # the time for an episode to close what it opened

_KINDS: tuple[type[Environment], ...] = (
    ProblemEnvironment,
    DistillEnvironment,
    MessageEnvironment,
    GameEnvironment,
)
_JUDGED: dict[str, type[RubricEnvironment | PreferenceEnvironment]] = {
    kind.name: kind for kind in (RubricEnvironment, PreferenceEnvironment)
}
_BY_NAME: dict[str, Environment] = {kind.name: kind() for kind in _KINDS}

ENVIRONMENT_NAMES = (*_BY_NAME, *_JUDGED)

# Environments of other projects, by the part of their names before the colon: "verifiers:NAME". Each has a module in
# `others` with this class, and its package is an extra of the same name.
_OTHERS = {
    "gymnasium": "GymnasiumEnvironment",
    "openenv": "OpenEnvEnvironment",
    "verifiers": "VerifiersEnvironment",
}


def environment_named(name: str, judge: Judge | None = None) -> Environment:
    """The environment of that name, or one made by calling what "python:module:Class" names; TaskError if none.

    `judge` has the defaults for fields that a task's own judge leaves out.
    """
    if name in _BY_NAME:
        return _BY_NAME[name]
    if name == HarborEnvironment.name:  # named only by tasks of Harbor
        return HarborEnvironment()
    if name in _JUDGED:
        return _JUDGED[name](judge)
    if is_of_other_project(name):
        return _of_other_project(name)
    if not name.startswith(PREFIX):
        there = ", ".join([*ENVIRONMENT_NAMES, *(f"{kind}:NAME" for kind in _OTHERS)])
        raise TaskError(f"there is no environment {name!r}; there are {there}, and python:module:Class")
    try:
        made = function_named(name)()
    except TaskError:
        raise
    except Exception as error:
        raise TaskError(f"{name} cannot be made: {describe_raised(error)}; correct it") from error
    missing = [part for part in ("name", "check", "begin") if not hasattr(made, part)]
    if missing:
        raise TaskError(f"{name} makes something without {', '.join(missing)}; see docs/how-to/collect/environments.md")
    return made  # type: ignore[no-any-return]


def is_of_other_project(name: str) -> bool:
    """Whether a name is that of another project's environment. As a source, the name means the environment's tasks."""
    return name.partition(":")[0] in _OTHERS and ":" in name


def _of_other_project(name: str) -> Environment:
    kind, _, own_name = name.partition(":")
    if not own_name:
        raise TaskError(f"{name!r} has nothing after its colon; name an environment of {kind}")
    try:
        import_extra(kind, kind)
        module = import_module(f"rolltape.collect.environments.others.{kind}")
    except MissingExtra as error:
        raise TaskError(f"{name}: {error}") from None
    except ImportError as error:
        raise TaskError(f"{name}: {kind} is installed but cannot be imported: {error}; install what it lacks") from None
    made: Environment = getattr(module, _OTHERS[kind])(own_name)
    return made


@asynccontextmanager
async def opened(environment: Environment, episode: Episode) -> AsyncIterator[None]:
    """Open what an episode needs within the block, and always close it."""
    try:
        if hasattr(episode, "open"):
            await call_environment(environment.name, episode.open)
        yield
    finally:
        if hasattr(episode, "close"):
            try:
                async with asyncio.timeout(_CLOSE_S):
                    await call_environment(environment.name, episode.close)
            except Exception as error:  # user code may raise anything; the attempt has ended anyway
                log.warning("environment %s: an episode could not be closed", environment.name, exc_info=error)


class Environments:
    """The environments that tasks name, each made once."""

    def __init__(self, default: str, judge: Judge | None = None) -> None:
        """`default` is for tasks that name no environment; `judge` has defaults for the judges of tasks."""
        self._default = default
        self._judge = judge
        self._made: dict[str, Environment] = {}

    def of(self, task: Task) -> Environment:
        return self.named(task.environment or self._default)

    def named(self, name: str) -> Environment:
        if name not in self._made:
            self._made[name] = environment_named(name, self._judge)
        return self._made[name]

    def seats(self, task: Task) -> tuple[str, ...]:
        """The seats of a task's episodes. To be called in a thread without an event loop."""
        environment = self.of(task)
        try:
            episode = call_environment_from_thread(environment.name, environment.begin, task, 0)
            return tuple(check_episode(episode).seats)
        except Exception:  # noqa: BLE001 - anybody's environment; its attempts will fail with the reason
            return (AGENT,)

    async def close(self) -> None:
        """Close the environments that have a `close`, when no attempt runs."""
        for environment in self._made.values():
            if hasattr(environment, "close"):
                try:
                    await call_environment(environment.name, environment.close)
                except Exception as error:  # the collection has ended anyway
                    log.warning("environment %s could not be closed", environment.name, exc_info=error)

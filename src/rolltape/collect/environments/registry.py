"""Environments by name."""

from rolltape.collect.environments.distill import Distill
from rolltape.collect.environments.game import GameEnvironment
from rolltape.collect.environments.message import MessageEnvironment
from rolltape.collect.environments.preference import Preference
from rolltape.collect.environments.problem import Problem
from rolltape.collect.environments.protocol import Environment
from rolltape.collect.environments.rubric import Rubric
from rolltape.collect.functions import PREFIX, function_named
from rolltape.errors import TaskError

_KINDS: tuple[type[Environment], ...] = (Problem, Distill, Rubric, Preference, MessageEnvironment, GameEnvironment)
_BY_NAME: dict[str, Environment] = {kind.name: kind() for kind in _KINDS}

ENVIRONMENT_NAMES = frozenset(_BY_NAME)


def environment_named(name: str) -> Environment:
    """The environment of that name, or one made by calling what "python:module:Class" names; else TaskError."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    if not name.startswith(PREFIX):
        there = ", ".join(sorted(ENVIRONMENT_NAMES))
        raise TaskError(f"there is no environment {name!r}; there are {there}, and python:module:Class")
    made = function_named(name)()
    missing = [part for part in ("name", "check", "begin") if not hasattr(made, part)]
    if missing:
        raise TaskError(f"{name} makes something without {', '.join(missing)}; see docs/environments.md")
    return made  # type: ignore[no-any-return]

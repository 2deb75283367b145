"""Environments by name."""

from rolltape.collect.environments.distill import Distill
from rolltape.collect.environments.game import GameEnvironment
from rolltape.collect.environments.judge import Judge
from rolltape.collect.environments.message import MessageEnvironment
from rolltape.collect.environments.preference import Preference
from rolltape.collect.environments.problem import Problem
from rolltape.collect.environments.protocol import Environment
from rolltape.collect.environments.rubric import Rubric
from rolltape.collect.functions import PREFIX, function_named
from rolltape.errors import TaskError

_KINDS: tuple[type[Environment], ...] = (Problem, Distill, MessageEnvironment, GameEnvironment)
_JUDGED: dict[str, type[Rubric | Preference]] = {kind.name: kind for kind in (Rubric, Preference)}
_BY_NAME: dict[str, Environment] = {kind.name: kind() for kind in _KINDS}

ENVIRONMENT_NAMES = frozenset({*_BY_NAME, *_JUDGED})


def environment_named(name: str, judge: Judge | None = None) -> Environment:
    """The environment of that name, or one made by calling what "python:module:Class" names; else TaskError.

    `judge` says what tasks that are judged leave open.
    """
    if name in _BY_NAME:
        return _BY_NAME[name]
    if name in _JUDGED:
        return _JUDGED[name](judge)
    if not name.startswith(PREFIX):
        there = ", ".join(sorted(ENVIRONMENT_NAMES))
        raise TaskError(f"there is no environment {name!r}; there are {there}, and python:module:Class")
    made = function_named(name)()
    missing = [part for part in ("name", "check", "begin") if not hasattr(made, part)]
    if missing:
        raise TaskError(f"{name} makes something without {', '.join(missing)}; see docs/environments.md")
    return made  # type: ignore[no-any-return]

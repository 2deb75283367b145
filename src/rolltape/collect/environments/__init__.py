"""Environments: how a task is asked, how the model's replies are answered, and what an attempt is worth."""

from rolltape.collect.environments.games import Game
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
)
from rolltape.collect.environments.registry import ENVIRONMENT_NAMES, Environments, environment_named
from rolltape.collect.environments.tools import ToolAnswer

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
]

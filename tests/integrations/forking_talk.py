"""A task whose rollouts fork: the model's template drops the thoughts of the first reply from the second prompt."""

from collections.abc import Generator, Mapping
from typing import Any

FORKING = {"id": "talk", "prompt": "What is 1 + 1?", "environment": "message", "episode": f"python:{__name__}:talk"}
THOUGHT = "let me see\n</think>\n\n2"  # a reply; the template has opened the thought


def talk(task: Mapping[str, Any], seed: int) -> Generator[str, str, float]:
    """Ask twice; the attempts have different rewards."""
    yield task["prompt"]
    yield "Are you sure?"
    return float(seed % 2)

"""Prompts alone: what the model says is kept, and nothing is rewarded."""

from rolltape.collect.environments.fields import fields_of
from rolltape.collect.environments.prompts import Prompted, check_prompt
from rolltape.collect.environments.protocol import Ended, Episode, Score
from rolltape.collect.environments.single import SingleReply
from rolltape.collect.tasks import Task


class Distill:
    """Asks, and gives no reward."""

    name = "distill"

    def check(self, task: Task) -> None:
        check_prompt(fields_of(task, Prompted))

    def begin(self, task: Task, seed: int) -> Episode:
        return SingleReply(fields_of(task, Prompted), _unrewarded)


async def _unrewarded(ended: Ended) -> Score:
    return Score(reward=None)

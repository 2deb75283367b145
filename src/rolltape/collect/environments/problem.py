"""A question with a reference answer, or something to do whose outcome a checker can tell."""

from functools import partial

from rolltape.collect.environments.checks import Check, Checked, checked, checks_of
from rolltape.collect.environments.fields import entry_of, fields_of
from rolltape.collect.environments.prompts import check_prompt
from rolltape.collect.environments.protocol import Ended, Episode, Score
from rolltape.collect.environments.scoring import score_of_unfinished
from rolltape.collect.environments.single import SingleReply
from rolltape.collect.tasks import Task


class Problem:
    """Asks once and checks the last text, or the files that the agent left."""

    name = "problem"

    def check(self, task: Task) -> None:
        fields = fields_of(task, Checked)
        check_prompt(fields)
        checks_of(fields)

    def begin(self, task: Task, seed: int) -> Episode:
        fields = fields_of(task, Checked)
        return SingleReply(fields, partial(_score, task, fields, checks_of(fields)))


async def _score(task: Task, fields: Checked, checks: tuple[Check, ...], ended: Ended) -> Score:
    return score_of_unfinished(fields, ended.stop_reason) or await checked(checks, entry_of(task), ended)

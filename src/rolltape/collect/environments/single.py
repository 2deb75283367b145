"""Environments that ask once: `problem` checks the reply, `distill` only records it. Both use `SingleReply`."""

from collections.abc import Awaitable, Callable
from functools import partial

from rolltape.collect.environments.protocol import AGENT, Answer, Ended, Episode, Message, Opening, Score
from rolltape.collect.environments.scoring import AnswerCheck, CheckFields, parse_checks, run_checks, score_unfinished
from rolltape.collect.environments.task_fields import (
    PromptFields,
    build_opening,
    check_prompt,
    copy_entry,
    parse_fields,
)
from rolltape.collect.tasks import Task


class SingleReply:
    """An episode of one reply, scored by the given function."""

    seats = (AGENT,)

    def __init__(self, fields: PromptFields, score: Callable[[Ended], Awaitable[Score]]) -> None:
        self._fields = fields
        self._score = score
        self._answered = False

    def opening(self, seat: str) -> Opening:
        return build_opening(self._fields)

    def next_seat(self) -> str | None:
        return None if self._answered else AGENT

    async def answer(self, seat: str, reply: Message) -> Answer:
        self._answered = True
        return Answer(done=True, reward=None)

    async def score(self, seat: str, ended: Ended) -> Score:
        return await self._score(ended)


class ProblemEnvironment:
    """A question with a reference answer, or work whose outcome a checker can verify."""

    name = "problem"

    def check(self, task: Task) -> None:
        fields = parse_fields(task, CheckFields)
        check_prompt(fields)
        parse_checks(fields)

    def begin(self, task: Task, seed: int) -> Episode:
        fields = parse_fields(task, CheckFields)
        return SingleReply(fields, partial(_score_problem, task, fields, parse_checks(fields)))


async def _score_problem(task: Task, fields: CheckFields, checks: tuple[AnswerCheck, ...], ended: Ended) -> Score:
    return score_unfinished(fields, ended.stop_reason) or await run_checks(checks, copy_entry(task), ended)


class DistillEnvironment:
    """Only prompts: the replies are recorded, and nothing is rewarded."""

    name = "distill"

    def check(self, task: Task) -> None:
        check_prompt(parse_fields(task, PromptFields))

    def begin(self, task: Task, seed: int) -> Episode:
        return SingleReply(parse_fields(task, PromptFields), _no_reward)


async def _no_reward(ended: Ended) -> Score:
    return Score(reward=None)

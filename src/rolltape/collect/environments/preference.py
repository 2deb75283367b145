"""Rewarded by comparison: when all attempts of a group have ended, a judge or a function says which are better."""

from collections.abc import Mapping
from functools import partial
from random import Random
from typing import Literal

import msgspec

from rolltape.collect.environments.comparing import Comparison, by_function, by_judge
from rolltape.collect.environments.fields import entry_of, fields_of
from rolltape.collect.environments.judge import Judge, judge_of
from rolltape.collect.environments.left import left_by
from rolltape.collect.environments.prompts import check_path, check_prompt
from rolltape.collect.environments.protocol import Ended, Episode, Score
from rolltape.collect.environments.scoring import Rewarded, score_of_unfinished
from rolltape.collect.environments.shown import asked
from rolltape.collect.environments.single import SingleReply
from rolltape.collect.functions import function_named
from rolltape.collect.tasks import Task
from rolltape.errors import TaskError


class PreferenceFields(Rewarded, frozen=True, kw_only=True):
    """Fields of a task of this kind."""

    compare: Literal["pairwise", "listwise"] = "pairwise"
    better: str = "the reply that answers the request better"  # what the judge is to prefer
    judge: Judge | str | None = None
    function: str | None = None  # "python:module:function" instead of a judge
    both_orders: bool = False  # ask a judge about each pair twice, either one first
    file: str | None = None  # compare this file of the working directory instead of the last text


class Preference:
    """Asks once, and compares. The reward is the share of the others that an attempt beats, a tie counting half."""

    name = "preference"

    def __init__(self, judge: Judge | None = None) -> None:
        """`judge` says what tasks leave open of theirs."""
        self._judge = judge

    def check(self, task: Task) -> None:
        fields = fields_of(task, PreferenceFields)
        check_prompt(fields)
        if fields.file is not None:
            check_path(fields.file, "its file")
        if fields.function is None:
            judge_of(fields.judge, self._judge)
        elif fields.judge is not None:
            raise TaskError("it has both a judge and a function to compare with; keep one of them")
        else:
            function_named(fields.function)

    def begin(self, task: Task, seed: int) -> Episode:
        fields = fields_of(task, PreferenceFields)
        return SingleReply(fields, partial(_to_be_compared, fields))

    async def compare(self, task: Task, attempts: Mapping[str, Ended], seed: int) -> Mapping[str, Score]:
        fields = fields_of(task, PreferenceFields)
        settled = {rollout: score_of_unfinished(fields, ended.stop_reason) for rollout, ended in attempts.items()}
        # The mapping's order is that of completion, and must not decide anything.
        compared = sorted(rollout for rollout, score in settled.items() if score is None)
        left = {rollout: attempts[rollout] for rollout in compared}
        comparison = await _comparison(fields, self._judge, task, left, Random(seed))
        beaten = len(attempts) - len(compared)
        return {rollout: score or _score(rollout, comparison, beaten) for rollout, score in settled.items()}


async def _to_be_compared(fields: PreferenceFields, ended: Ended) -> Score:
    if fields.file is None and ended.messages:
        return Score(reward=None)  # the last reply, which is on the tape
    return Score(reward=None, compared=_left(fields, ended))


def _left(fields: PreferenceFields, ended: Ended) -> str:
    left = left_by(ended, fields.file)
    return left.missing or left.text


async def _comparison(
    fields: PreferenceFields, judge: Judge | None, task: Task, attempts: Mapping[str, Ended], rng: Random
) -> Comparison:
    if len(attempts) < 2:
        return Comparison(matches=[])
    listwise = fields.compare == "listwise"
    # Without a folder what it left was looked at when it ended, and is its text.
    texts = {
        rollout: ended.text if ended.folder is None else _left(fields, ended) for rollout, ended in attempts.items()
    }
    if fields.function is not None:
        given = {rollout: msgspec.structs.replace(attempts[rollout], text=text) for rollout, text in texts.items()}
        return await by_function(fields.function, entry_of(task), given, listwise=listwise)
    rounds = 2 if fields.both_orders else 1
    return await by_judge(
        judge_of(fields.judge, judge), asked(fields), fields.better, texts, rng, listwise=listwise, rounds=rounds
    )


def _score(rollout: str, comparison: Comparison, beaten: int) -> Score:
    """The share of points won; each attempt that ran into a limit is beaten by every one that did not."""
    matches = [match for match in comparison.matches if rollout in match.pair]
    points = [points for match in matches if (points := match.points_of(rollout)) is not None]
    data = {"comparisons": [match.to_data(rollout) for match in matches], **comparison.data}
    if beaten:
        data["unfinished_others"] = beaten
    if points or beaten:
        return Score(reward=(sum(points) + beaten) / (len(points) + beaten), reward_data=data)
    why = matches[0].ungraded if matches else "its group has no other attempt to compare it with"
    return Score(reward=None, ungraded=why, reward_data=data)

"""The environment `rubric`: a judge grades the reply against criteria."""

import math
from functools import partial
from typing import Annotated, Any

import msgspec

from rolltape.collect.environments.judge import (
    Judge,
    UnreadableAnswer,
    connect_judge,
    find_object,
    mark_text,
    render_request,
    resolve_judge,
)
from rolltape.collect.environments.protocol import Ended, Episode, Score
from rolltape.collect.environments.scoring import SubmissionFields, read_submission, score_unfinished
from rolltape.collect.environments.single import SingleReply
from rolltape.collect.environments.task_fields import parse_fields
from rolltape.collect.tasks import Task
from rolltape.errors import TaskError
from rolltape.records.jsonable import shown

_INSTRUCTIONS = "You grade a reply to a request, criterion by criterion."


class Criterion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One criterion and its weight."""

    name: str
    text: str = ""  # its description, if the name is not enough
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0


class RubricFields(SubmissionFields, frozen=True, kw_only=True):
    """Fields of a task of this kind."""

    criteria: list[str | Criterion] = []
    scale: tuple[float, float] = (0.0, 10.0)  # of a grade: worst and best
    judge: Judge | str | None = None

    @property
    def named(self) -> list[Criterion]:
        return [one if isinstance(one, Criterion) else Criterion(one) for one in self.criteria]


class Grade(msgspec.Struct, frozen=True):
    """A judge's grade for one criterion."""

    grade: float
    reason: str = ""


class RubricEnvironment:
    """Asks once; a judge grades the reply. The reward is the weighted mean of the grades, from 0 to 1."""

    name = "rubric"

    def __init__(self, judge: Judge | None = None) -> None:
        """`judge` has the defaults for fields that a task's own judge leaves out."""
        self._judge = judge

    def check(self, task: Task) -> None:
        fields = parse_fields(task, RubricFields)
        fields.check()
        names = [one.name for one in fields.named]
        if not names:
            raise TaskError('it has no criteria; add "criteria", a list of texts')
        repeated = {name for name in names if names.count(name) > 1}
        if repeated:
            raise TaskError(f"its criteria {', '.join(sorted(repeated))} appear twice; give each its own name")
        worst, best = fields.scale
        if not worst < best:
            raise TaskError(f"its scale goes from {worst:g} to {best:g}; give the worst grade, then a better one")
        resolve_judge(fields.judge, self._judge)

    def begin(self, task: Task, seed: int) -> Episode:
        fields = parse_fields(task, RubricFields)
        return SingleReply(fields, partial(_score, fields, resolve_judge(fields.judge, self._judge)))


async def _score(fields: RubricFields, judge: Judge, ended: Ended) -> Score:
    unfinished = score_unfinished(fields, ended.stop_reason)
    if unfinished is not None:
        return unfinished
    submission = read_submission(ended, fields.file)
    if submission.missing is not None:
        return Score(reward=0.0, reward_data={"why": submission.missing})
    async with connect_judge(judge) as client:
        verdict = await client.ask(_INSTRUCTIONS, _question(fields, submission.text), partial(_parse_grades, fields))
    if verdict.value is None:
        return Score(reward=None, ungraded=verdict.ungraded, reward_data={"judge": verdict.to_data()})
    worst, best = fields.scale
    terms = {name: (given.grade - worst) / (best - worst) for name, given in verdict.value.items()}
    weights = {one.name: one.weight for one in fields.named}
    return Score(
        reward=sum(terms[name] * weight for name, weight in weights.items()) / sum(weights.values()),
        terms=terms,
        reward_data={
            "grades": {name: given.grade for name, given in verdict.value.items()},
            "reasons": {name: given.reason for name, given in verdict.value.items()},
            "judge": verdict.to_data(),
        },
    )


def _question(fields: RubricFields, reply: str) -> list[str]:
    worst, best = fields.scale
    criteria = "\n".join(f"- {one.name}: {one.text}" if one.text else f"- {one.name}" for one in fields.named)
    form = msgspec.json.encode({one.name: {"reason": "...", "grade": best} for one in fields.named}).decode()
    how = (
        f"Grade each criterion from {worst:g} (not met at all) to {best:g} (fully met), and give a short reason. "
        f"Answer with a JSON object in this form and nothing else:\n{form}"
    )
    return [render_request(fields), mark_text("reply", reply), f"Criteria:\n{criteria}", how]


def _parse_grades(fields: RubricFields, answer: str) -> dict[str, Grade]:
    given = find_object(answer)
    return {one.name: _parse_grade(one.name, given.get(one.name), fields.scale) for one in fields.named}


def _parse_grade(name: str, given: Any, scale: tuple[float, float]) -> Grade:
    if not isinstance(given, dict):
        given = {"grade": given}
    grade, reason = given.get("grade"), given.get("reason", "")
    if isinstance(grade, bool) or not isinstance(grade, int | float) or not math.isfinite(grade):
        why = "there is no grade" if grade is None else f"the grade {shown(grade)} is not a number"
        raise UnreadableAnswer(f"{name}: {why}")
    if not scale[0] <= grade <= scale[1]:
        raise UnreadableAnswer(f"{name}: the grade {grade:g} is not between {scale[0]:g} and {scale[1]:g}")
    return Grade(float(grade), reason if isinstance(reason, str) else str(reason))

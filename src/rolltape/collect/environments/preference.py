"""The environment `preference`: once all attempts of a group have ended, a judge or a function compares them."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations
from random import Random
from typing import Any, Literal

import msgspec

from rolltape.collect.environments.judge import (
    Judge,
    JudgeClient,
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
from rolltape.collect.environments.task_fields import copy_entry, parse_fields
from rolltape.collect.functions import call_function, function_named
from rolltape.collect.tasks import Task
from rolltape.errors import RecordError, TaskError
from rolltape.records.jsonable import as_float, shown

_MAX_QUESTIONS = 8  # at once, to one judge about one group
_POINTS = {"A": 1.0, "B": 0.0, "tie": 0.5}
_SAME = "the same text"
_INSTRUCTIONS = "You compare replies to a request."


class PreferenceFields(SubmissionFields, frozen=True, kw_only=True):
    """Fields of a task of this kind."""

    compare: Literal["pairwise", "listwise"] = "pairwise"
    better: str = "the reply that answers the request better"  # what the judge should prefer
    judge: Judge | str | None = None
    function: str | None = None  # "python:module:function" instead of a judge
    both_orders: bool = False  # ask a judge about each pair twice, either one first


class PairResult(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of two attempts."""

    pair: tuple[str, str]  # rollout ids, in the order in which they were shown
    first: float | None  # the first one's points: 1 better, 0.5 equal, 0 worse; None if undecided
    reason: str = ""
    judge: dict[str, Any] | None = None
    ungraded: str | None = None

    def points(self, rollout: str) -> float | None:
        """The points of one of the two."""
        return self.first if self.first is None or rollout == self.pair[0] else 1 - self.first

    def to_data(self, rollout: str) -> dict[str, Any]:
        """The comparison for the record of one of the two."""
        against = self.pair[1] if rollout == self.pair[0] else self.pair[0]
        data = {"against": against, "points": self.points(rollout), "reason": self.reason, "judge": self.judge}
        return {name: value for name, value in data.items() if value not in (None, "")}


class GroupResult(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of a group."""

    pairs: Sequence[PairResult]
    data: Mapping[str, Any] = {}  # for the record of every attempt: the ranking


class PreferenceEnvironment:
    """Asks once, and compares. The reward is the share of other attempts that an attempt beats; a tie counts half."""

    name = "preference"

    def __init__(self, judge: Judge | None = None) -> None:
        """`judge` has the defaults for fields that a task's own judge leaves out."""
        self._judge = judge

    def check(self, task: Task) -> None:
        fields = parse_fields(task, PreferenceFields)
        fields.check()
        if fields.function is None:
            resolve_judge(fields.judge, self._judge)
        elif fields.judge is not None:
            raise TaskError("it has both a judge and a function to compare with; keep one of them")
        else:
            function_named(fields.function)

    def begin(self, task: Task, seed: int) -> Episode:
        fields = parse_fields(task, PreferenceFields)
        return SingleReply(fields, partial(_defer_score, fields))

    async def compare(self, task: Task, attempts: Mapping[str, Ended], seed: int) -> Mapping[str, Score]:
        fields = parse_fields(task, PreferenceFields)
        unfinished = {rollout: score_unfinished(fields, ended.stop_reason) for rollout, ended in attempts.items()}
        # The mapping is in order of completion, which must not influence the result.
        finished = sorted(rollout for rollout, score in unfinished.items() if score is None)
        compared = {rollout: attempts[rollout] for rollout in finished}
        result = await _compare(fields, self._judge, task, compared, Random(seed))
        beaten = len(attempts) - len(finished)
        return {rollout: score or _score(rollout, result, beaten) for rollout, score in unfinished.items()}


async def _defer_score(fields: PreferenceFields, ended: Ended) -> Score:
    if fields.file is None and ended.messages:
        return Score(reward=None)  # the last reply, which is on the tape
    return Score(reward=None, compared=_read_text(fields, ended))


def _read_text(fields: PreferenceFields, ended: Ended) -> str:
    submission = read_submission(ended, fields.file)
    return submission.missing or submission.text


async def _compare(
    fields: PreferenceFields, judge: Judge | None, task: Task, attempts: Mapping[str, Ended], rng: Random
) -> GroupResult:
    if len(attempts) < 2:
        return GroupResult(pairs=[])
    listwise = fields.compare == "listwise"
    # Without a folder, the attempt's file was read when it ended, and is now its text.
    texts = {
        rollout: ended.text if ended.folder is None else _read_text(fields, ended)
        for rollout, ended in attempts.items()
    }
    if fields.function is not None:
        given = {rollout: msgspec.structs.replace(attempts[rollout], text=text) for rollout, text in texts.items()}
        return await _by_function(fields.function, copy_entry(task), given, listwise=listwise)
    judge = resolve_judge(fields.judge, judge)
    request = render_request(fields)
    async with connect_judge(judge) as client:
        if listwise:
            # A judge may favor positions, so it sees texts in random order.
            distinct = sorted(set(texts.values()))
            return await _rank(client, request, fields.better, texts, rng.sample(distinct, len(distinct)))
        drawn = [pair if rng.random() < 0.5 else pair[::-1] for pair in combinations(texts, 2)]
        shown_pairs = drawn if not fields.both_orders else [each for pair in drawn for each in (pair, pair[::-1])]
        slots = asyncio.Semaphore(_MAX_QUESTIONS)

        async def compare_pair(one: str, other: str) -> PairResult:
            if texts[one] == texts[other]:
                return PairResult(pair=(one, other), first=0.5, reason=_SAME)
            async with slots:
                return await _judge_pair(client, request, fields.better, (one, other), (texts[one], texts[other]))

        return GroupResult(pairs=await asyncio.gather(*(compare_pair(*pair) for pair in shown_pairs)))


async def _by_function(
    name: str, entry: Mapping[str, Any], attempts: Mapping[str, Ended], *, listwise: bool
) -> GroupResult:
    """Pairwise, the function returns a number above 0 if the first is better; listwise, a number for each attempt."""
    function = function_named(name)
    pairs = list(combinations(attempts, 2))
    if not listwise:
        results = [await call_function(function, entry, attempts[one], attempts[other]) for one, other in pairs]
        leads = [as_float(result, f"{name}: the comparison") for result in results]
    else:
        given = list(await call_function(function, entry, list(attempts.values())))
        if len(given) != len(attempts):
            raise RecordError(f"{name} returned {len(given)} numbers for {len(attempts)} attempts; return one for each")
        numbers = {rollout: as_float(one, name) for rollout, one in zip(attempts, given, strict=True)}
        leads = [numbers[one] - numbers[other] for one, other in pairs]
    if any(math.isnan(lead) for lead in leads):
        raise RecordError(f"{name} compared by NaN, which has no order; return other numbers")
    return GroupResult(
        pairs=[PairResult(pair=pair, first=_points(lead)) for pair, lead in zip(pairs, leads, strict=True)]
    )


async def _judge_pair(
    client: JudgeClient, request: str, better: str, pair: tuple[str, str], texts: tuple[str, str]
) -> PairResult:
    form = (
        f"Which is {better}, A or B? Give a short reason. Answer with a JSON object in this form and nothing else:\n"
        '{"reason": "...", "better": "A"}, or "B", or "tie"'
    )
    replies = [f"Reply {letter}:\n{mark_text('reply', text)}" for letter, text in zip("AB", texts, strict=True)]
    verdict = await client.ask(_INSTRUCTIONS, [request, *replies, form], _parse_better)
    if verdict.value is None:
        return PairResult(pair=pair, first=None, judge=verdict.to_data(), ungraded=verdict.ungraded)
    first, reason = verdict.value
    return PairResult(pair=pair, first=first, reason=reason, judge=verdict.to_data())


async def _rank(
    client: JudgeClient, request: str, better: str, texts: Mapping[str, str], order: Sequence[str]
) -> GroupResult:
    """Have a judge rank the distinct texts, which it sees in `order`. Equal texts are a tie."""
    pairs = list(combinations(texts, 2))
    if len(order) == 1:
        return GroupResult(pairs=[PairResult(pair=pair, first=0.5, reason=_SAME) for pair in pairs])
    form = (
        f"Rank the replies, first {better}. Give a short reason. Answer with a JSON object in this form and nothing "
        f'else, the best first:\n{{"reason": "...", "ranking": {list(range(1, len(order) + 1))}}}'
    )
    replies = [f"Reply {number}:\n{mark_text('reply', text)}" for number, text in enumerate(order, 1)]
    verdict = await client.ask(_INSTRUCTIONS, [request, *replies, form], partial(_parse_ranking, len(order)))
    data: dict[str, Any] = {"judge": verdict.to_data()}
    if verdict.value is None:
        undecided = [PairResult(pair=pair, first=None, ungraded=verdict.ungraded) for pair in pairs]
        return GroupResult(pairs=undecided, data=data)
    ranking, reason = verdict.value
    rank_by_text = {order[number - 1]: rank for rank, number in enumerate(ranking)}
    ranks = {rollout: rank_by_text[text] for rollout, text in texts.items()}
    return GroupResult(
        pairs=[PairResult(pair=(one, other), first=_points(ranks[other] - ranks[one])) for one, other in pairs],
        data=data | {"ranking": sorted(ranks, key=lambda rollout: ranks[rollout]), "reason": reason},
    )


def _points(lead: float) -> float:
    return 0.5 if lead == 0 else float(lead > 0)


def _parse_better(answer: str) -> tuple[float, str]:
    given = find_object(answer)
    better = given.get("better")
    if not isinstance(better, str) or better not in _POINTS:
        raise UnreadableAnswer(f'"better" is {shown(better)}, and not "A", "B" or "tie"')
    return _POINTS[better], str(given.get("reason", ""))


def _parse_ranking(count: int, answer: str) -> tuple[Sequence[int], str]:
    given = find_object(answer)
    ranking = given.get("ranking")
    if not isinstance(ranking, list) or sorted(map(str, ranking)) != sorted(map(str, range(1, count + 1))):
        raise UnreadableAnswer(f'"ranking" is {shown(ranking)}, and not each number from 1 to {count} once')
    return [int(number) for number in ranking], str(given.get("reason", ""))


def _score(rollout: str, result: GroupResult, beaten: int) -> Score:
    """The share of points won. Each attempt that ran into a limit is beaten by every one that did not."""
    own = [one for one in result.pairs if rollout in one.pair]
    points = [points for one in own if (points := one.points(rollout)) is not None]
    data = {"comparisons": [one.to_data(rollout) for one in own], **result.data}
    if beaten:
        data["unfinished_others"] = beaten
    if points or beaten:
        return Score(reward=(sum(points) + beaten) / (len(points) + beaten), reward_data=data)
    why = own[0].ungraded if own else "its group has no other attempt to compare it with"
    return Score(reward=None, ungraded=why, reward_data=data)

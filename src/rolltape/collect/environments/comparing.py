"""Attempts of a group → which of two is better, for every two."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations
from random import Random
from typing import Any

import msgspec

from rolltape.collect.environments.judge import Ask, Judge, Unreadable, asking, last_object, verdict_of
from rolltape.collect.environments.protocol import Ended
from rolltape.collect.environments.shown import marked, to_judge
from rolltape.collect.functions import function_named
from rolltape.collect.threads import called
from rolltape.errors import RecordError
from rolltape.records.jsonable import as_float, shown

_AT_ONCE = 8  # questions to one judge about one group
_WORTH = {"A": 1.0, "B": 0.0, "tie": 0.5}
_SAME = "the same text"
_INSTRUCTIONS = "You compare replies to a request."


class Match(msgspec.Struct, frozen=True, kw_only=True):
    """Two attempts compared."""

    pair: tuple[str, str]  # rollout ids, in the order in which they were shown
    first: float | None  # the first one's points: 1 better, 0.5 as good, 0 worse; None: nobody could say
    reason: str = ""
    judge: dict[str, Any] | None = None
    ungraded: str | None = None

    def points_of(self, rollout: str) -> float | None:
        return self.first if self.first is None or rollout == self.pair[0] else 1 - self.first

    def to_data(self, rollout: str) -> dict[str, Any]:
        """For the record of one of the two."""
        against = self.pair[1] if rollout == self.pair[0] else self.pair[0]
        data = {"against": against, "points": self.points_of(rollout), "reason": self.reason, "judge": self.judge}
        return {name: value for name, value in data.items() if value not in (None, "")}


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """A group compared."""

    matches: Sequence[Match]
    data: Mapping[str, Any] = {}  # of a ranking: what was said of all of them at once


async def by_function(
    name: str, entry: Mapping[str, Any], attempts: Mapping[str, Ended], *, listwise: bool
) -> Comparison:
    """A user's function decides: of two, by a number above 0 if the first is better; of all, by a number for each."""
    function = function_named(name)
    pairs = list(combinations(attempts, 2))
    if not listwise:
        results = [await called(function, entry, attempts[one], attempts[other]) for one, other in pairs]
        leads = [as_float(result, f"{name}: the comparison") for result in results]
    else:
        given = list(await called(function, entry, list(attempts.values())))
        if len(given) != len(attempts):
            raise RecordError(f"{name} returned {len(given)} numbers for {len(attempts)} attempts; return one for each")
        numbers = {rollout: as_float(one, name) for rollout, one in zip(attempts, given, strict=True)}
        leads = [numbers[one] - numbers[other] for one, other in pairs]
    if any(math.isnan(lead) for lead in leads):
        raise RecordError(f"{name} compared by NaN, which is neither more nor less; return other numbers")
    return Comparison(matches=[Match(pair=pair, first=_points(lead)) for pair, lead in zip(pairs, leads, strict=True)])


async def by_judge(
    judge: Judge, request: str, better: str, texts: Mapping[str, str], rng: Random, *, listwise: bool, rounds: int
) -> Comparison:
    """A judge decides; in which order it sees them is drawn, since judges favour places. Equal texts are as good."""
    async with asking(judge) as ask:
        if listwise:
            distinct = sorted(set(texts.values()))
            return await _ranked(judge, ask, request, better, texts, rng.sample(distinct, len(distinct)))
        drawn = [pair if rng.random() < 0.5 else pair[::-1] for pair in combinations(texts, 2)]
        shown_pairs = drawn if rounds == 1 else [either for pair in drawn for either in (pair, pair[::-1])]
        room = asyncio.Semaphore(_AT_ONCE)

        async def compared(one: str, other: str) -> Match:
            if texts[one] == texts[other]:
                return Match(pair=(one, other), first=0.5, reason=_SAME)
            async with room:
                return await _compared(judge, ask, request, better, (one, other), (texts[one], texts[other]))

        return Comparison(matches=await asyncio.gather(*(compared(*pair) for pair in shown_pairs)))


async def _compared(
    judge: Judge, ask: Ask, request: str, better: str, pair: tuple[str, str], texts: tuple[str, str]
) -> Match:
    how = (
        f"Which is {better}, A or B? Give a short reason. Answer with a JSON object in this form and nothing else:\n"
        '{"reason": "...", "better": "A"}, or "B", or "tie"'
    )
    replies = [f"Reply {letter}:\n{marked('reply', text)}" for letter, text in zip("AB", texts, strict=True)]
    verdict = await verdict_of(judge, ask, to_judge(_INSTRUCTIONS, [request, *replies, how]), _read_better)
    if verdict.value is None:
        return Match(pair=pair, first=None, judge=verdict.to_data(), ungraded=verdict.ungraded)
    first, reason = verdict.value
    return Match(pair=pair, first=first, reason=reason, judge=verdict.to_data())


async def _ranked(
    judge: Judge, ask: Ask, request: str, better: str, texts: Mapping[str, str], order: Sequence[str]
) -> Comparison:
    """`order`: each distinct text, as the judge is to see them."""
    pairs = list(combinations(texts, 2))
    if len(order) == 1:
        return Comparison(matches=[Match(pair=pair, first=0.5, reason=_SAME) for pair in pairs])
    how = (
        f"Rank the replies, first {better}. Give a short reason. Answer with a JSON object in this form and nothing "
        f'else, the best first:\n{{"reason": "...", "ranking": {list(range(1, len(order) + 1))}}}'
    )
    replies = [f"Reply {number}:\n{marked('reply', text)}" for number, text in enumerate(order, 1)]
    messages = to_judge(_INSTRUCTIONS, [request, *replies, how])
    verdict = await verdict_of(judge, ask, messages, partial(_read_ranking, len(order)))
    data: dict[str, Any] = {"judge": verdict.to_data()}
    if verdict.value is None:
        return Comparison(
            matches=[Match(pair=pair, first=None, ungraded=verdict.ungraded) for pair in pairs], data=data
        )
    ranking, reason = verdict.value
    place_of = {order[number - 1]: place for place, number in enumerate(ranking)}
    places = {rollout: place_of[text] for rollout, text in texts.items()}
    return Comparison(
        matches=[Match(pair=(one, other), first=_points(places[other] - places[one])) for one, other in pairs],
        data=data | {"ranking": sorted(places, key=lambda rollout: places[rollout]), "reason": reason},
    )


def _points(lead: float) -> float:
    return 0.5 if lead == 0 else float(lead > 0)


def _read_better(answer: str) -> tuple[float, str] | Unreadable:
    given = last_object(answer)
    if isinstance(given, Unreadable):
        return given
    better = given.get("better")
    if not isinstance(better, str) or better not in _WORTH:
        return Unreadable(f'"better" is {shown(better)}, and not "A", "B" or "tie"')
    return _WORTH[better], str(given.get("reason", ""))


def _read_ranking(count: int, answer: str) -> tuple[Sequence[int], str] | Unreadable:
    given = last_object(answer)
    if isinstance(given, Unreadable):
        return given
    ranking = given.get("ranking")
    if not isinstance(ranking, list) or sorted(map(str, ranking)) != sorted(map(str, range(1, count + 1))):
        return Unreadable(f'"ranking" is {shown(ranking)}, and not each number from 1 to {count} once')
    return [int(number) for number in ranking], str(given.get("reason", ""))

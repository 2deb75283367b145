"""Groups whose attempts are rewarded by comparison, once all of them have ended."""

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from rolltape.collect.attempt import Result, told
from rolltape.collect.environments.protocol import Ended, Environment, GroupEnvironment, Score
from rolltape.collect.plan import Identity, Known
from rolltape.collect.sources import Source
from rolltape.collect.tasks import Task, seed_of
from rolltape.errors import NoSuchRollout
from rolltape.records.rollout import Rollout, Status, StopReason
from rolltape.tape.tape import Tape
from rolltape.traces import amend

log = logging.getLogger("rolltape.collect")

EnvironmentOf = Callable[[Task], Environment]


class Groups:
    """The groups that are not compared yet, as far as their environments compare."""

    def __init__(self, tape: Tape, source: Source, identity: Identity, size: int) -> None:
        self._tape = tape
        self._source = source
        self._identity = identity
        self._size = size
        self._held: dict[int, list[Result]] = {}  # by place of the task: what ended just now

    def take_up(self, known: Known, environment_of: EnvironmentOf) -> None:
        """Have those compared that were whole before, and of which some still have no reward."""
        for place, task in enumerate(self._source if known.unrewarded else ()):
            if compares(environment_of(task)):
                keys = [bytes.fromhex(self._identity.of(task, attempt)) for attempt in range(self._size)]
                if known.done.issuperset(keys) and not known.unrewarded.isdisjoint(keys):
                    self._held[place] = []

    async def add(self, place: int, environment: Environment, results: list[Result]) -> list[Result]:
        """Take an attempt in; the results that are settled by that: the last one of a group has it compared."""
        if not compares(environment):
            return results
        held = self._held.setdefault(place, [])
        held += results
        whole = len({result.attempt for result in held}) == self._size
        return await self._compared(place, environment) if whole else []

    async def compare_rest(self, environment_of: EnvironmentOf) -> list[Result]:
        """Compare groups that were begun earlier and are whole by now, together with what the tape has of them."""
        settled = []
        for place in list(self._held):
            environment = environment_of(self._source[place])
            assert compares(environment)
            settled += await self._compared(place, environment)
        return settled

    def left(self) -> list[Result]:
        """Of groups that were not compared: resuming does it."""
        return [result for held in self._held.values() for result in held]

    async def _compared(self, place: int, environment: GroupEnvironment) -> list[Result]:
        """Score a whole group, by rollout id; what broke is left out."""
        task = self._source[place]
        held = {result.rollout: result.ended for result in self._held[place]}
        group = {one: held[one] if one in held else self._recorded(one) for one in self._rollouts(task)}
        ended = {rollout: one for rollout, one in group.items() if one is not None}
        scores: Mapping[str, Score] = {}
        try:
            if ended:
                scores = await environment.compare(task, ended, seed_of(self._identity.of(task, 0)))
            for rollout in ended:
                self._say(rollout, scores[rollout], environment.name)
        except Exception as error:
            log.warning("%s: its attempts could not be compared", task.where, exc_info=error)
            scores = {rollout: Score(reward=None, ungraded=f"not compared: {told(error)}") for rollout in ended}
            for rollout, score in scores.items():
                self._say(rollout, score, environment.name)
        return [_settled(result, scores.get(result.rollout)) for result in self._held.pop(place)]

    def _rollouts(self, task: Task) -> list[str]:
        return [self._identity.of(task, attempt) for attempt in range(self._size)]

    def _recorded(self, rollout: str) -> Ended | None:
        try:
            return _ended_of(self._tape.run().rollout(rollout))
        except NoSuchRollout:
            return None  # it could not even be opened

    def _say(self, rollout: str, score: Score, by: str) -> None:
        if score.reward is not None:
            self._tape.score(rollout, reward=score.reward, terms=dict(score.terms), by=by)
        data: dict[str, Any] = dict(score.reward_data or {})
        if score.ungraded is not None:
            data["ungraded"] = score.ungraded
        if data:
            amend(self._tape, rollout, reward_data=data, by=by)


def compares(environment: Environment) -> TypeGuard[GroupEnvironment]:
    """Whether its rewards come of comparison."""
    return hasattr(environment, "compare")


def _settled(result: Result, score: Score | None) -> Result:
    if score is None:
        return result  # it broke
    reason = None if score.ungraded is None else f"ungraded: {score.ungraded}"
    return result._replace(reward=score.reward, reason=reason)


def _ended_of(rollout: Rollout) -> Ended | None:
    """How a rollout of an earlier process ended, as far as its tape tells; None: it broke."""
    if rollout.status is not Status.FINISHED:
        return None
    turn = next((one for one in reversed(rollout.turns) if one.reply is not None), None)
    messages = [] if turn is None or turn.reply is None else [*turn.prompt_messages, turn.reply.to_dict()]
    text = "" if turn is None or turn.reply is None else turn.reply.text
    return Ended(stop_reason=rollout.outcome.stop_reason or StopReason.COMPLETED, messages=messages, text=text)

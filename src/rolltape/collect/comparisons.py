"""Groups whose attempts are rewarded by comparison, once all of them have ended."""

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeGuard

from rolltape.collect.earlier import Known, State
from rolltape.collect.environments.protocol import AGENT, Ended, Environment, GroupEnvironment, Score
from rolltape.collect.plan import Identity
from rolltape.collect.result import Result, told
from rolltape.collect.results import compared, record_of
from rolltape.collect.settings import CollectSettings
from rolltape.collect.sources import Source
from rolltape.collect.tasks import Task, seed_of
from rolltape.records.rollout import Rollout, Status, StopReason
from rolltape.tape.recording.tape import Tape
from rolltape.traces import amend, trace_of
from rolltape.traces.capture import captures

log = logging.getLogger("rolltape.collect")

EnvironmentOf = Callable[[Task], Environment]
_NOT_YET = "its group is not compared yet"
_READ_AT_ONCE = 64  # groups: each look at the run costs its whole length


class Groups:
    """The groups that are not compared yet, as far as their environments compare."""

    def __init__(self, tape: Tape, source: Source, identity: Identity, settings: CollectSettings) -> None:
        self._tape = tape
        self._source = source
        self._identity = identity
        self._settings = settings
        self._size = settings.group_size
        self._held: dict[int, list[Result]] = {}  # by place of the task: what ended just now

    def take_up(self, known: Known, environment_of: EnvironmentOf) -> None:
        """Have those compared that were whole before, and of which some still have no reward."""
        for place, task in enumerate(self._source if known.some_unrewarded else ()):
            if compares(environment_of(task)):
                states = known.of(self._identity.all_of(task, range(self._size)))
                if all(state & State.TAKEN for state in states) and any(state & State.UNREWARDED for state in states):
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
        waiting = list(self._held)
        for start in range(0, len(waiting), _READ_AT_ONCE):
            places = waiting[start : start + _READ_AT_ONCE]
            earlier = self._tape.run().latest({one for place in places for one in self._not_held(place)})
            for place in places:
                environment = environment_of(self._source[place])
                assert compares(environment)
                settled += await self._compared(place, environment, earlier)
        return settled

    def left(self) -> list[Result]:
        """Of groups that were not compared: resuming does it, and has the records then."""
        return [
            one._replace(reason=_NOT_YET, record=None) if one.status is Status.FINISHED else one
            for held in self._held.values()
            for one in held
        ]

    async def _compared(
        self, place: int, environment: GroupEnvironment, earlier: Mapping[str, Rollout] = MappingProxyType({})
    ) -> list[Result]:
        """Score a whole group, by rollout id; what broke is left out. The results of all that were scored."""
        task = self._source[place]
        held = {result.rollout: result.ended for result in self._held[place]}
        before = {one: earlier[one] for one in self._not_held(place) if one in earlier}
        group = held | {one: _ended_of(found) for one, found in before.items()}
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
        results = [*self._held.pop(place), *(self._result(place, one) for one in before.values() if one.id in scores)]
        return [_settled(result, scores.get(result.rollout)) for result in results]

    def _not_held(self, place: int) -> list[str]:
        """The rollouts of a group that did not end just now."""
        held = {result.rollout for result in self._held[place]}
        return [one for one in self._identity.all_of(self._source[place], range(self._size)) if one not in held]

    def _result(self, place: int, rollout: Rollout) -> Result:
        """Of a rollout that had ended in an earlier process."""
        settings = self._settings
        record = None
        if settings.with_records:
            traced = captures(rollout.id, settings.capture, settings.trace_fraction)
            record = record_of(rollout, task_index=place, traced=traced)
        return Result(
            rollout=rollout.id,
            try_index=rollout.head.try_index,
            place=place,
            task=rollout.head.task_id or rollout.head.group[:8],
            attempt=rollout.head.attempt,
            seat=AGENT,
            status=rollout.status,
            reward=rollout.reward,
            stop_reason=rollout.outcome.stop_reason,
            reason=rollout.outcome.reason,
            turns=len(rollout.turns),
            sampled_tokens=sum(len(turn.sampled_ids) for turn in rollout.turns),
            ended=None,
            record=record,
            before=True,
        )

    def _say(self, rollout: str, score: Score, by: str) -> None:
        if score.reward is not None:
            self._tape.score(rollout, reward=score.reward, terms=dict(score.terms), by=by)
        if data := score.to_data():
            amend(self._tape, rollout, reward_data=data, by=by)


def compares(environment: Environment) -> TypeGuard[GroupEnvironment]:
    """Whether its rewards come of comparison."""
    return hasattr(environment, "compare")


def _settled(result: Result, score: Score | None) -> Result:
    if score is None:
        return result  # it broke
    reason = None if score.ungraded is None else f"ungraded: {score.ungraded}"
    record = None if result.record is None else compared(result.record, score, reason)
    return result._replace(reward=score.reward, reason=reason, record=record)


def _ended_of(rollout: Rollout) -> Ended | None:
    """How a rollout of an earlier process ended, as far as a comparison looks at it; None: it broke."""
    if rollout.status is not Status.FINISHED:
        return None
    turn = next((one for one in reversed(rollout.turns) if one.reply is not None), None)
    messages = [] if turn is None or turn.reply is None else [*turn.prompt_messages, turn.reply.to_dict()]
    extra = trace_of(rollout).extra or {}
    return Ended(
        stop_reason=rollout.outcome.stop_reason or StopReason.COMPLETED,
        messages=messages,
        text=extra.get("compared", "" if turn is None or turn.reply is None else turn.reply.text),
        exit_code=extra.get("exit_code"),
    )

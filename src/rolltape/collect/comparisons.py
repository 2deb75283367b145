"""Groups whose attempts are rewarded by comparison, once all of them have ended."""

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeGuard

from rolltape.collect.environments.protocol import AGENT, Ended, Environment, GroupEnvironment, Score
from rolltape.collect.plan import EarlierRollouts, RolloutIdentity, RolloutState
from rolltape.collect.results import RolloutResult, add_score, build_record, describe_error
from rolltape.collect.settings import CollectSettings
from rolltape.collect.sources import TaskSource
from rolltape.collect.tasks import Task, seed_of
from rolltape.records.rollout import Rollout, Status, StopReason
from rolltape.tape.recording.tape import Tape
from rolltape.traces import amend, trace_of
from rolltape.traces.writer import is_captured

log = logging.getLogger("rolltape.collect")

EnvironmentOf = Callable[[Task], Environment]
_NOT_YET = "its group is not compared yet"
_READ_AT_ONCE = 64  # groups: each look at the run costs its whole length


class GroupComparisons:
    """The groups of a collection that are still to be compared."""

    def __init__(self, tape: Tape, source: TaskSource, identity: RolloutIdentity, settings: CollectSettings) -> None:
        self._tape = tape
        self._source = source
        self._identity = identity
        self._settings = settings
        self._size = settings.group_size
        self._held: dict[int, list[RolloutResult]] = {}  # by task index: results of this process

    def add_earlier(self, earlier: EarlierRollouts, environment_of: EnvironmentOf) -> None:
        """Add the groups that were complete before, and in which a rollout still has no reward."""
        for index, task in enumerate(self._source if earlier.some_unrewarded else ()):
            if compares(environment_of(task)):
                states = earlier.states(self._identity.rollout_ids(task, range(self._size)))
                is_complete = all(state & RolloutState.TAKEN for state in states)
                if is_complete and any(state & RolloutState.UNREWARDED for state in states):
                    self._held[index] = []

    async def add(self, task_index: int, environment: Environment, results: list[RolloutResult]) -> list[RolloutResult]:
        """Add an attempt, and return the results that are final now. The last attempt of a group has it compared."""
        if not compares(environment):
            return results
        held = self._held.setdefault(task_index, [])
        held += results
        is_complete = len({result.attempt for result in held}) == self._size
        return await self._compare(task_index, environment) if is_complete else []

    async def compare_rest(self, environment_of: EnvironmentOf) -> list[RolloutResult]:
        """Compare groups that earlier processes began and that are complete by now."""
        final = []
        waiting = list(self._held)
        for start in range(0, len(waiting), _READ_AT_ONCE):
            indexes = waiting[start : start + _READ_AT_ONCE]
            earlier = self._tape.run().latest({one for index in indexes for one in self._not_held(index)})
            for index in indexes:
                environment = environment_of(self._source[index])
                assert compares(environment)
                final += await self._compare(index, environment, earlier)
        return final

    def uncompared(self) -> list[RolloutResult]:
        """The results of groups that were not compared. Resuming compares them, and writes their records."""
        return [
            one._replace(reason=_NOT_YET, record=None) if one.status is Status.FINISHED else one
            for held in self._held.values()
            for one in held
        ]

    async def _compare(
        self, task_index: int, environment: GroupEnvironment, earlier: Mapping[str, Rollout] = MappingProxyType({})
    ) -> list[RolloutResult]:
        """Score a complete group, without what broke, and return the results of all that were scored."""
        task = self._source[task_index]
        held = {result.rollout: result.ended for result in self._held[task_index]}
        before = {one: earlier[one] for one in self._not_held(task_index) if one in earlier}
        group = held | {one: _load_ended(found) for one, found in before.items()}
        ended = {rollout: one for rollout, one in group.items() if one is not None}
        scores: Mapping[str, Score] = {}
        try:
            if ended:
                scores = await environment.compare(task, ended, seed_of(self._identity.rollout_id(task, 0)))
            for rollout in ended:
                self._record(rollout, scores[rollout], environment.name)
        except Exception as error:
            log.warning("%s: its attempts could not be compared", task.where, exc_info=error)
            why = f"not compared: {describe_error(error)}"
            scores = {rollout: Score(reward=None, ungraded=why) for rollout in ended}
            for rollout, score in scores.items():
                self._record(rollout, score, environment.name)
        earlier_results = [self._earlier_result(task_index, one) for one in before.values() if one.id in scores]
        results = [*self._held.pop(task_index), *earlier_results]
        return [_with_score(result, scores.get(result.rollout)) for result in results]

    def _not_held(self, task_index: int) -> list[str]:
        """The rollouts of a group that did not end in this process."""
        held = {result.rollout for result in self._held[task_index]}
        ids = self._identity.rollout_ids(self._source[task_index], range(self._size))
        return [one for one in ids if one not in held]

    def _earlier_result(self, task_index: int, rollout: Rollout) -> RolloutResult:
        settings = self._settings
        record = None
        if settings.with_records:
            traced = is_captured(rollout.id, settings.capture, settings.trace_fraction)
            record = build_record(rollout, task_index=task_index, traced=traced)
        return RolloutResult.of(
            rollout.head,
            task_index,
            AGENT,
            status=rollout.status,
            reward=rollout.reward,
            stop_reason=rollout.outcome.stop_reason,
            reason=rollout.outcome.reason,
            turns=len(rollout.turns),
            sampled_tokens=sum(len(turn.sampled_ids) for turn in rollout.turns),
            record=record,
            before=True,
        )

    def _record(self, rollout: str, score: Score, by: str) -> None:
        if score.reward is not None:
            self._tape.score(rollout, reward=score.reward, terms=dict(score.terms), by=by)
        if data := score.to_data():
            amend(self._tape, rollout, reward_data=data, by=by)


def compares(environment: Environment) -> TypeGuard[GroupEnvironment]:
    """Whether an environment rewards by comparison."""
    return hasattr(environment, "compare")


def _with_score(result: RolloutResult, score: Score | None) -> RolloutResult:
    if score is None:
        return result  # it broke
    reason = None if score.ungraded is None else f"ungraded: {score.ungraded}"
    record = None if result.record is None else add_score(result.record, score, reason)
    return result._replace(reward=score.reward, reason=reason, record=record)


def _load_ended(rollout: Rollout) -> Ended | None:
    """How a rollout of an earlier process ended, as far as a comparison needs it; None if it broke."""
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

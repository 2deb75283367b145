"""`GroupComparisons`: rewards the attempts of a group by comparing them, once all have ended."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from rolltape.collect.environments.protocol import AGENT, Environment, GroupEnvironment, Score, compares
from rolltape.collect.grading.grades import compare_attempts, load_ended, record_score
from rolltape.collect.plan import EarlierRollouts, RolloutIdentity, RolloutState
from rolltape.collect.records import NOT_COMPARED, add_score
from rolltape.collect.results import RolloutResult, ended_result
from rolltape.collect.settings import CollectSettings
from rolltape.collect.sources import TaskSource
from rolltape.collect.tasks import Task, seed_of
from rolltape.records.rollout import UNGRADED, Rollout, Status
from rolltape.tape.recording.tape import Tape

EnvironmentOf = Callable[[Task], Environment]
_READ_AT_ONCE = 64  # groups: each read of the run costs time for its whole length


class GroupComparisons:
    """The groups of a collection that are not compared yet."""

    def __init__(self, tape: Tape, source: TaskSource, identity: RolloutIdentity, settings: CollectSettings) -> None:
        self._tape = tape
        self._source = source
        self._identity = identity
        self._settings = settings
        self._size = settings.group_size
        self._held: dict[int, list[RolloutResult]] = {}  # by task index: results of this process

    def add_earlier(
        self, tasks: Iterable[tuple[int, Task]], earlier: EarlierRollouts, environment_of: EnvironmentOf
    ) -> None:
        """Add the groups of tasks that were complete before, and in which a rollout still has no reward."""
        for index, task in tasks if earlier.some_unrewarded else ():
            if compares(environment_of(task)):
                states = earlier.states(self._identity.rollout_ids(task, range(self._size)))
                is_complete = all(state & RolloutState.TAKEN for state in states)
                if is_complete and any(state & RolloutState.UNREWARDED for state in states):
                    self._held[index] = []

    async def add(self, task_index: int, environment: Environment, results: list[RolloutResult]) -> list[RolloutResult]:
        """Add an attempt, and return the results that are final now. With its last attempt a group is compared."""
        if not compares(environment):
            return results
        held = self._held.setdefault(task_index, [])
        held += results
        is_complete = len({result.attempt for result in held}) == self._size
        return await self._compare(task_index, environment) if is_complete else []

    async def compare_rest(self, environment_of: EnvironmentOf, task_index: int | None = None) -> list[RolloutResult]:
        """Compare groups that earlier processes began and that are complete now: of one task, or all."""
        final = []
        waiting = [index for index in self._held if task_index in (None, index)]
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
            one._replace(reason=f"{UNGRADED}{NOT_COMPARED}", record=None) if one.status is Status.FINISHED else one
            for held in self._held.values()
            for one in held
        ]

    async def _compare(
        self, task_index: int, environment: GroupEnvironment, earlier: Mapping[str, Rollout] = MappingProxyType({})
    ) -> list[RolloutResult]:
        """Score a complete group without its broken attempts, and return the results of the scored ones."""
        task = self._source[task_index]
        held = {result.rollout: result.ended for result in self._held[task_index]}
        before = {one: earlier[one] for one in self._not_held(task_index) if one in earlier}
        finished = {one: load_ended(found) for one, found in before.items() if found.status is Status.FINISHED}
        ended = {rollout: one for rollout, one in (held | finished).items() if one is not None}
        seed = seed_of(self._identity.rollout_id(task, 0))
        scores = await compare_attempts(environment, task, ended, seed, self._settings.score_timeout_s) if ended else {}
        # In a grown group, attempts of earlier processes have rewards of the old comparison. These are replaced first,
        # since readers do not take the group before its last attempt has a reward.
        for rollout in sorted(scores, key=lambda one: one in held):
            record_score(self._tape, rollout, scores[rollout], environment.name)
        with_record = self._settings.with_records
        earlier_results = [
            ended_result(one, task_index, AGENT, with_record=with_record, before=True)
            for one in before.values()
            if one.id in scores
        ]
        results = [*self._held.pop(task_index), *earlier_results]
        return [_with_score(result, scores.get(result.rollout)) for result in results]

    def _not_held(self, task_index: int) -> list[str]:
        """The rollouts of a group that did not end in this process."""
        held = {result.rollout for result in self._held[task_index]}
        ids = self._identity.rollout_ids(self._source[task_index], range(self._size))
        return [one for one in ids if one not in held]


def _with_score(result: RolloutResult, score: Score | None) -> RolloutResult:
    if score is None:
        return result  # it broke
    record = None if result.record is None else add_score(result.record, score)
    return result._replace(reward=score.reward, reason=score.reason, record=record)

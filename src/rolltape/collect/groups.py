"""Groups whose attempts are rewarded by comparison, once all of them have ended."""

from collections.abc import Callable, Mapping
from typing import Any

from rolltape.collect.attempt import Result
from rolltape.collect.environments.protocol import AGENT, Ended, Environment, Score
from rolltape.collect.plan import Identity
from rolltape.collect.sources import Source
from rolltape.collect.tasks import Task, seed_of
from rolltape.records.rollout import Rollout, Status, StopReason
from rolltape.tape.tape import Tape
from rolltape.traces import amend


class Groups:
    """The groups that are not whole yet, as far as their environments compare."""

    def __init__(self, tape: Tape, source: Source, identity: Identity, size: int) -> None:
        self._tape = tape
        self._source = source
        self._identity = identity
        self._size = size
        self._ended: dict[int, dict[str, Ended | None]] = {}  # by place of the task, then by rollout

    async def add(self, place: int, environment: Environment, results: list[Result]) -> None:
        """Take an attempt in; the last one of a group has it compared."""
        if not hasattr(environment, "compare"):
            return
        group = self._ended.setdefault(place, {})
        group.update({result.rollout: result.ended for result in results})
        if len(group) == self._size:
            await self._compare(place, environment, group)

    async def compare_rest(self, environment_of: Callable[[Task], Environment]) -> None:
        """Compare groups that were begun earlier and are whole by now, together with what the tape has of them."""
        for place in list(self._ended):
            task = self._source[place]
            group = dict(self._ended[place])
            for attempt in range(self._size):
                rollout = self._identity.of(task, attempt)
                if rollout not in group:
                    group[rollout] = _ended_of(self._tape.run().rollout(rollout))
            await self._compare(place, environment_of(task), group)

    async def _compare(self, place: int, environment: Any, group: Mapping[str, Ended | None]) -> None:
        """Score a whole group, by rollout id; what broke is left out, and so is a comparison with nobody."""
        self._ended.pop(place, None)
        ended = {rollout: one for rollout, one in group.items() if one is not None}
        if not ended:
            return
        task = self._source[place]
        scores: Mapping[str, Score] = await environment.compare(task, ended, seed_of(self._identity.of(task, 0, AGENT)))
        for rollout, score in scores.items():
            if score.reward is not None:
                self._tape.score(rollout, reward=score.reward, terms=dict(score.terms), by=environment.name)
            if score.reward_data is not None or score.ungraded is not None:
                data = {**(score.reward_data or {}), **({"ungraded": score.ungraded} if score.ungraded else {})}
                amend(self._tape, rollout, reward_data=data, by=environment.name)


def _ended_of(rollout: Rollout) -> Ended | None:
    """How a rollout of an earlier process ended, as far as its tape tells; None: it broke."""
    if rollout.status is not Status.FINISHED:
        return None
    turn = next((one for one in reversed(rollout.turns) if one.reply is not None), None)
    messages = [] if turn is None or turn.reply is None else [*turn.prompt_messages, turn.reply.to_dict()]
    text = "" if turn is None or turn.reply is None else turn.reply.text
    return Ended(stop_reason=rollout.outcome.stop_reason or StopReason.COMPLETED, messages=messages, text=text)

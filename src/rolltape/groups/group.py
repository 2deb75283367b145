"""`Group`: the rollouts and samples of one task at one step, as a trainer is given them."""

import math
from typing import Any, NamedTuple, Self

from rolltape.errors import GroupsError
from rolltape.groups.consumer import Consumer, GroupState
from rolltape.groups.pending import PendingGroup
from rolltape.records.rollout import Rollout, Status
from rolltape.records.sample import Sample
from rolltape.tape.recording.tape import Tape
from rolltape.tape.run import RolloutRow


class UnfinishedAttempt(NamedTuple):
    """An attempt that is missing from its group: it failed, was lost, still runs, or has no reward."""

    rollout: str
    attempt: int
    status: Status
    reason: str | None  # None: no reason was recorded

    @classmethod
    def of(cls, row: RolloutRow) -> Self:
        """The attempt of this row of the index."""
        return cls(row.id, row.attempt, row.outcome.status, row.outcome.reason)


class Group:
    """The rollouts of one task at one step, and their samples with advantages and loss weights.

    Example:

        for group in tape.groups(step=3):
            with group:
                train(group.samples)

    Call `done()` once the training step is safe: until then the group is given again after a restart. A `with` block
    calls it at the end, or gives the group back if an exception leaves the block.

    A group can be pickled, to send it to another process. The copy has all data of the group. Call `done()` in the
    process that took the group.
    """

    def __init__(
        self,
        tape: Tape,
        consumer: Consumer,
        pending: PendingGroup,
        rollouts: tuple[Rollout, ...],
        samples: tuple[Sample, ...],
        unfinished: tuple[UnfinishedAttempt, ...],
        *,
        missing: int,
        again: bool,
    ) -> None:
        self.id = pending.id
        self.step = pending.step
        self.source = pending.source
        self.task_id = pending.task_id
        self.rollouts = rollouts  # those that finished, by attempt; one with nothing to train has no sample
        self.samples = samples
        self.unfinished = unfinished  # missing attempts, by attempt; those not begun are not listed
        self.missing = missing  # how many attempts were missing when its time was over
        self.again = again  # an earlier process was given it, and did not mark it as done
        self._taken: tuple[Tape, Consumer, PendingGroup] | None = (tape, consumer, pending)  # None: it is a copy

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_taken": None}

    @property
    def rewards(self) -> list[float | None]:
        """The rewards of its rollouts."""
        return [rollout.reward for rollout in self.rollouts]

    @property
    def mean_reward(self) -> float | None:
        """The mean of its rewards, or None if it has none.

        A trainer that needs a reward for every attempt uses it for those without one: the baseline stays the same.
        """
        known = [reward for reward in self.rewards if reward is not None and math.isfinite(reward)]
        return math.fsum(known) / len(known) if known else None

    def done(self, reason: str | None = None) -> None:
        """Mark it as trained: it is not given again, and another group may begin. A second call does nothing.

        `reason` states in words which part of it did not train. It is recorded on the tape.
        """
        tape, consumer, pending = self._where_taken()
        if self.id in consumer.held:
            consumer.record(tape, pending, GroupState.DONE, reason=reason)

    def give_back(self) -> None:
        """Give it back: this stream, or the next, gives it again."""
        _, consumer, _ = self._where_taken()
        with consumer.lock:
            consumer.held.discard(self.id)

    def _where_taken(self) -> tuple[Tape, Consumer, PendingGroup]:
        if self._taken is None:
            raise GroupsError(f"group {self.id}: this is a copy; call done() and give_back() where it was taken")
        return self._taken

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None:
            self.done()
        else:
            self.give_back()

    def __repr__(self) -> str:
        return f"Group({self.id[:8]}, step={self.step}, rollouts={len(self.rollouts)}, samples={len(self.samples)})"

"""`Group`: the rollouts and samples of one task at one step, as a trainer is given them."""

from typing import Self

from rolltape.groups.consumer import Consumer, GroupState
from rolltape.groups.pending import PendingGroup
from rolltape.records.rollout import Rollout
from rolltape.records.sample import Sample
from rolltape.tape.recording.tape import Tape


class Group:
    """The rollouts of one task at one step, and their samples with advantages and loss weights.

    Example:

        for group in tape.groups(step=3):
            with group:
                train(group.samples)

    Call `done()` once the training step is safe: until then the group is given again after a restart. A `with` block
    calls it at the end, or gives the group back if an exception leaves the block.
    """

    def __init__(
        self,
        tape: Tape,
        consumer: Consumer,
        pending: PendingGroup,
        rollouts: tuple[Rollout, ...],
        samples: tuple[Sample, ...],
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
        self.missing = missing  # attempts that it is given without, since its time was over
        self.again = again  # an earlier process was given it, and did not mark it as done
        self._tape = tape
        self._consumer = consumer
        self._pending = pending

    @property
    def rewards(self) -> list[float | None]:
        """The rewards of its rollouts."""
        return [rollout.reward for rollout in self.rollouts]

    def done(self) -> None:
        """Mark it as trained: it is not given again, and another may begin. Twice is fine."""
        if self.id in self._consumer.held:
            self._consumer.record(self._tape, self._pending, GroupState.DONE)

    def give_back(self) -> None:
        """Have it given again, by this stream or the next."""
        with self._consumer.lock:
            self._consumer.held.discard(self.id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None:
            self.done()
        else:
            self.give_back()

    def __repr__(self) -> str:
        return f"Group({self.id[:8]}, step={self.step}, rollouts={len(self.rollouts)}, samples={len(self.samples)})"

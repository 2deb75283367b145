"""What came of attempts, for whoever waits for it."""

from typing import Any, NamedTuple

from rolltape.collect.environments.protocol import Ended
from rolltape.collect.records import CollectedRecord
from rolltape.collect.spending import Usage
from rolltape.records.rollout import UNGRADED, RolloutHead, Status, StopReason


class RolloutResult(NamedTuple):
    """What came of one seat of one attempt: one rollout that has ended."""

    rollout: str
    try_index: int
    task_index: int  # the task's position in its source
    task: str
    attempt: int
    seat: str
    status: Status
    reason: str | None  # why it failed, or why it has no reward
    stop_reason: StopReason | None = None
    reward: float | None = None
    turns: int = 0
    sampled_tokens: int = 0
    usage: Usage = Usage()
    ended: Ended | None = None  # None: the infrastructure broke it, or it ended before
    before: bool = False  # it had ended in an earlier process, and is compared with others only now
    record: CollectedRecord | None = None  # where `CollectSettings.with_records` asks for it
    fates: dict[str, int] | None = None  # tokens by fate under the default policy, where `with_fates` asks for it

    @classmethod
    def of(cls, head: RolloutHead, task_index: int, seat: str, **fields: Any) -> "RolloutResult":
        """The result of the rollout with this head."""
        task = head.task_id or head.group[:8]
        return cls(head.id, head.try_index, task_index, task, head.attempt, seat, **fields)

    @property
    def is_ungraded(self) -> bool:
        """Whether it finished, and its reward could not be computed, or not yet."""
        return self.reward is None and self.reason is not None and self.reason.startswith(UNGRADED)


def describe_error(error: BaseException) -> str:
    """An error as a reason in a record."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__

"""What became of an attempt, for whoever waits for it."""

from typing import NamedTuple

from rolltape.collect.environments.protocol import Ended
from rolltape.collect.results import Record
from rolltape.records.rollout import Status, StopReason


class Result(NamedTuple):
    """What became of one seat of one attempt."""

    rollout: str
    try_index: int
    place: int  # of the task in its source
    task: str
    attempt: int
    seat: str
    status: Status
    reward: float | None
    stop_reason: StopReason | None
    reason: str | None
    turns: int
    sampled_tokens: int
    ended: Ended | None  # None: it was broken
    before: bool = False  # it had ended in an earlier process, and is compared with others only now
    # None: nobody asked for it.
    record: Record | None = None
    fates: dict[str, int] | None = None  # where its sampled tokens go, by the ledger of the default policy


def told(error: BaseException) -> str:
    """An error as a reason in a record."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__

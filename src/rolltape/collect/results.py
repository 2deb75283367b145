"""The results of attempts: one per rollout, with its tokens and its cost."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec

from rolltape.collect.environments.protocol import Ended
from rolltape.collect.records import CollectedRecord, build_record
from rolltape.collect.settings import CollectSettings
from rolltape.records.rollout import UNGRADED, Rollout, RolloutHead, Status, StopReason
from rolltape.records.turn import Turn
from rolltape.records.wording import SHORT_ID
from rolltape.tape.run import RolloutRow

_PRICED_TOKENS = 1_000_000


class Usage(msgspec.Struct, frozen=True):
    """Tokens that went through a model, and their cost."""

    prompt_tokens: int = 0
    sampled_tokens: int = 0
    cost: float | None = 0.0  # None without prices, if the endpoint does not report the cost of every turn

    def __add__(self, other: "Usage") -> "Usage":
        cost = None if self.cost is None or other.cost is None else self.cost + other.cost
        return Usage(self.prompt_tokens + other.prompt_tokens, self.sampled_tokens + other.sampled_tokens, cost)


def usage_of(turns: Iterable[Turn], settings: CollectSettings) -> Usage:
    """The usage of turns, by the prices in the settings, else as the endpoint reports it."""
    return sum((_turn_usage(turn, settings) for turn in turns), Usage())


def _turn_usage(turn: Turn, settings: CollectSettings) -> Usage:
    # A hosted endpoint counts its tokens itself; often there are no ids.
    reported = turn.facts.extra.get("upstream", {}).get("usage", {})
    prompt_tokens = reported.get("prompt_tokens", len(turn.prompt_tokens))
    sampled_tokens = reported.get("completion_tokens", len(turn.sampled_ids))
    if settings.price_in is not None and settings.price_out is not None:
        cost = (prompt_tokens * settings.price_in + sampled_tokens * settings.price_out) / _PRICED_TOKENS
        return Usage(prompt_tokens, sampled_tokens, cost)
    return Usage(prompt_tokens, sampled_tokens, _as_cost(reported.get("cost")))


def _as_cost(reported: object) -> float | None:
    is_cost = isinstance(reported, int | float) and math.isfinite(reported) and reported >= 0
    return float(reported) if is_cost else None  # type: ignore[arg-type]


class RolloutResult(NamedTuple):
    """The result of one seat of one attempt, which is one ended rollout."""

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
    ended: Ended | None = None  # None if the infrastructure broke it, or it ended before
    before: bool = False  # it ended in an earlier process, and got its reward in this one
    record: CollectedRecord | None = None  # if `CollectSettings.with_records` is set
    fates: dict[str, int] | None = None  # tokens by fate under the default policy, if `with_fates` is set

    @classmethod
    def of(cls, head: RolloutHead, task_index: int, seat: str, **fields: Any) -> "RolloutResult":
        """The result of the rollout with this head."""
        return cls(head.id, head.try_index, task_index, task_label(head), head.attempt, seat, **fields)

    @property
    def is_ungraded(self) -> bool:
        """Whether it finished, and its reward could not be computed, or not yet."""
        return self.reward is None and self.reason is not None and self.reason.startswith(UNGRADED)


OnResults = Callable[[list[RolloutResult]], None]


def ended_result(rollout: Rollout, task_index: int, seat: str, *, with_record: bool, **more: Any) -> RolloutResult:
    """The result of a rollout that has ended. `more` are the fields that the tape does not have."""
    return RolloutResult.of(
        rollout.head,
        task_index,
        seat,
        status=rollout.status,
        reward=rollout.reward,
        stop_reason=rollout.outcome.stop_reason,
        reason=rollout.outcome.reason,
        turns=len(rollout.turns),
        sampled_tokens=sum(len(turn.sampled_ids) for turn in rollout.turns),
        record=build_record(rollout) if with_record else None,
        **more,
    )


def task_label(head: RolloutHead | RolloutRow) -> str:
    """A task's name for people: its id, else the beginning of its group's id."""
    return head.task_id or head.group[:SHORT_ID]

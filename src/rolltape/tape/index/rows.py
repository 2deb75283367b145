"""A rollout as the index lists it, without its turns."""

from functools import cached_property
from typing import NamedTuple

import msgspec

from rolltape.records.jsonable import decode_numbers, decode_record
from rolltape.records.rollout import Outcome, RolloutHead, Status, StopReason, outcome_of
from rolltape.tape.index.queries import FILTER, REASON, STATUS
from rolltape.tape.stored import Key

_LOST_REASON = outcome_of((), writer_alive=False).reason

ROW_COLUMNS = f"""number, id, try_index, grp, step, attempt, source, task, environment, agent, model, started_ns,
    place, sessions, turns, sampled_tokens, versions,
    {STATUS},
    ended_ns, stop_reason, {REASON}, scored, reward, terms, rewarded_by, {FILTER}, tags, pruned, revision"""


class LatestScore(NamedTuple):
    """A reward, what it is made of, and who gave it."""

    reward: float
    terms: dict[str, float]
    by: str | None


class RolloutRow(msgspec.Struct, frozen=True, dict=True):
    """A rollout as the index lists it, without its turns. What is stored as text is read when it is asked for."""

    number: int  # in the index
    id: str
    try_index: int
    group: str
    step: int
    attempt: int
    source: str | None
    task_id: str | None
    environment: str | None
    agent: str | None
    model: str | None
    started_at_ns: int
    place: str  # the source that holds it
    sessions: int
    turns: int
    sampled_tokens: int
    versions_json: str
    status: str  # a Status
    ended_at_ns: int | None
    stop_reason: str | None
    reason: str | None
    scored: str | None  # the order of the reward that counts
    reward_value: float | None
    terms_json: str | None
    rewarded_by: str | None
    filtered: str | None  # why it is kept out of training
    tags_json: str | None
    pruned_json: str
    revision: int  # of the index when the row last changed
    raw_head: bytes

    @cached_property
    def head(self) -> RolloutHead:
        """All that was decided at its launch."""
        return decode_record(self.raw_head, RolloutHead, f"rollout {self.id}")

    @property
    def key(self) -> Key:
        return (self.id, self.try_index)

    @cached_property
    def outcome(self) -> Outcome:
        """What its events come to."""
        score = self.score if self.status == Status.FINISHED else None
        return Outcome(
            status=Status(self.status),
            stop_reason=StopReason(self.stop_reason) if self.stop_reason else None,
            reason=_LOST_REASON if self.status == Status.LOST else self.reason,
            reward=score and score.reward,
            reward_terms=score.terms if score else {},
            rewarded_by=score and score.by,
            filtered=self.filtered,
            tags=tuple(msgspec.json.decode(self.tags_json)) if self.tags_json else (),
        )

    @property
    def reward(self) -> float | None:
        """The reward that counts; None: there is none, or it did not finish."""
        if self.scored is None or self.status != Status.FINISHED:
            return None
        return float("nan") if self.reward_value is None else self.reward_value

    @property
    def score(self) -> LatestScore | None:
        """The latest score, also of a rollout that did not finish; None: there is none."""
        if self.scored is None:
            return None
        reward = float("nan") if self.reward_value is None else self.reward_value
        terms = decode_numbers(self.terms_json.encode()) if self.terms_json else {}
        return LatestScore(reward, terms, self.rewarded_by)

    @property
    def scored_at_ns(self) -> int | None:
        """When the reward was given that counts; None: there is none."""
        return int(self.scored[:20]) if self.scored else None

    @property
    def versions(self) -> tuple[str, ...]:
        """Weight versions that sampled it, as far as they are known."""
        return tuple(msgspec.json.decode(self.versions_json))

    @property
    def sealed(self) -> bool:
        return self.place.startswith("shard/")

    @property
    def pruned(self) -> tuple[str, ...]:
        """What was pruned: "turns", or "side array NAME"; the counts are those from before."""
        return tuple(msgspec.json.decode(self.pruned_json))

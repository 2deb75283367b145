"""A rollout's row in the index: its columns, how a rollout and its events fill them, and the row as readers see it."""

from collections.abc import Iterable
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from rolltape.records.ids import digest_of
from rolltape.records.jsonable import decode_numbers, decode_record, encode_numbers
from rolltape.records.rollout import Outcome, RolloutHead, Status, StopReason, outcome_of
from rolltape.tape.index.queries import FILTER, REASON, STATUS
from rolltape.tape.index.sources import FoundRollout
from rolltape.tape.stored import FoundHead, Key, StoredEvent

# The columns of a rollout's row that come from its owner's part.
PART = (
    *("writer", "epoch", "place", "row", "first_event", "last_event", "started_ns"),
    *("sessions", "turns", "sampled_tokens", "versions", "finish", "ended_ns", "stop_reason", "reason"),
)
SCORE = ("reward", "terms", "rewarded_by")

_LOST_REASON = outcome_of((), writer_alive=False).reason


class LatestScore(NamedTuple):
    """A reward, its terms, and who gave it."""

    reward: float
    terms: dict[str, float]
    by: str | None


class RolloutRow(msgspec.Struct, frozen=True, dict=True):
    """A rollout as the index lists it, without its turns. Values stored as text are parsed at first use."""

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
    tags_json: str  # of the rollout as a whole
    inner_tags_json: str | None
    notes: int  # how many there are, those on its turns and tokens included
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
        """The state that its events give."""
        score = self.score if self.status == Status.FINISHED else None
        return Outcome(
            status=Status(self.status),
            stop_reason=StopReason(self.stop_reason) if self.stop_reason else None,
            reason=_LOST_REASON if self.status == Status.LOST else self.reason,
            reward=score and score.reward,
            reward_terms=score.terms if score else {},
            rewarded_by=score and score.by,
            filtered=self.filtered,
            tags=tuple(msgspec.json.decode(self.tags_json)),
        )

    @property
    def reward(self) -> float | None:
        """The reward that counts, or None if there is none or the rollout did not finish."""
        if self.scored is None or self.status != Status.FINISHED:
            return None
        return float("nan") if self.reward_value is None else self.reward_value

    @property
    def score(self) -> LatestScore | None:
        """The latest score, also of a rollout that did not finish, or None."""
        if self.scored is None:
            return None
        reward = float("nan") if self.reward_value is None else self.reward_value
        terms = decode_numbers(self.terms_json.encode()) if self.terms_json else {}
        return LatestScore(reward, terms, self.rewarded_by)

    @property
    def scored_at_ns(self) -> int | None:
        """When the reward that counts was given, or None if there is none."""
        return int(self.scored[:20]) if self.scored else None

    @property
    def inner_tags(self) -> tuple[str, ...]:
        """The tags of its turns and tokens."""
        return tuple(msgspec.json.decode(self.inner_tags_json)) if self.inner_tags_json else ()

    @property
    def versions(self) -> tuple[str, ...]:
        """Weight versions that sampled it, as far as they are known."""
        return tuple(msgspec.json.decode(self.versions_json))

    @property
    def known_tokens(self) -> int | None:
        """How many tokens were sampled, or None if their ids are not known, as of a rollout imported as text."""
        if self.sampled_tokens or "token ids" not in self.head.extra.get("imported", {}).get("absent", ()):
            return self.sampled_tokens
        return None

    @property
    def sealed(self) -> bool:
        return self.place.startswith("shard/")

    @property
    def pruned(self) -> tuple[str, ...]:
        """What was pruned: "turns", or "side array NAME". Counts still include it."""
        return tuple(msgspec.json.decode(self.pruned_json))


# What is selected for the fields of a `RolloutRow` that are not columns of the same name.
_SELECTED = {
    "group": "grp",
    "task_id": "task",
    "started_at_ns": "started_ns",
    "versions_json": "versions",
    "status": STATUS,
    "ended_at_ns": "ended_ns",
    "reason": REASON,
    "reward_value": "reward",
    "terms_json": "terms",
    "filtered": FILTER,
    "tags_json": "coalesce(tags, head_tags)",
    "inner_tags_json": "inner_tags",
    "pruned_json": "pruned",
    "raw_head": "raw",
}
SELECT_ROWS = (
    f"SELECT {', '.join(_SELECTED.get(field, field) for field in RolloutRow.__struct_fields__)} "
    "FROM rollouts NATURAL JOIN heads"
)


def row_columns(
    found: FoundHead, rollout: FoundRollout, place: str, environment: str | None, revision: int
) -> dict[str, Any]:
    """A rollout's whole row. `environment` is that of its source, for a rollout without its own."""
    head = found.head
    row: dict[str, Any] = {
        "id": head.id,
        "try_index": head.try_index,
        "grp": head.group,
        "step": head.step,
        "attempt": head.attempt,
        "source": head.source,
        "task": head.task_id,
        "environment": environment_of(head) or environment,
        "agent": head.agent,
        "model": head.model,
        "head_tags": text_list(head.tags),
        "resume": _resume_key(head),
        "started_ns": head.started_at_ns,
        "writer": found.writer,
        "epoch": head.epoch,
        "place": place,
        "row": found.row,
        **part_columns(rollout),
        **dict.fromkeys(("scored", "reward", "terms", "rewarded_by", "filtered_at", "filter", "tags", "inner_tags")),
        "notes": 0,
        "pruned": "[]",
        "changed": "" if rollout.finish is None else rollout.finish.order_text,
        "revision": revision,
    }
    if rollout.score is not None:
        row |= score_columns(rollout.score)
    return row


def part_columns(rollout: FoundRollout) -> dict[str, Any]:
    """The columns of a rollout's row that come from a part as it was read."""
    data = rollout.finish.event.data if rollout.finish else {}
    stop_reason, counts = data.get("stop_reason"), rollout.counts
    return {
        "sessions": len(counts.turns),
        "turns": sum(counts.turns),
        "sampled_tokens": counts.sampled_tokens,
        "versions": text_list(counts.versions),
        "first_event": rollout.first_event,
        "last_event": rollout.last_event,
        "finish": Status(data["status"]).value if rollout.finish else None,
        "ended_ns": rollout.finish.about.at_ns if rollout.finish else None,
        "stop_reason": StopReason(stop_reason).value if stop_reason else None,
        "reason": data.get("reason"),
    }


def score_columns(stored: StoredEvent) -> dict[str, Any]:
    """The columns of a reward. A NaN is stored as an absent `reward` with a `scored`."""
    event = stored.event
    reward = float(event.data["reward"])
    terms = event.data.get("terms") or {}
    return {
        "scored": stored.order_text,
        "reward": reward,
        "terms": encode_numbers(terms, "reward terms").decode() if terms else None,
        "rewarded_by": event.by,
    }


def environment_of(head: RolloutHead) -> str | None:
    """A rollout's environment: as its task names it, else as its recorder did."""
    task: Any = head.task if isinstance(head.task, dict) else {}
    named = task.get("environment") or head.extra.get("environment")
    return named if isinstance(named, str) else None


def collected_environment(stored: StoredEvent) -> tuple[str | None, str] | None:
    """The source and environment of a collection, or None if it names no environment."""
    settings = stored.event.data.get("settings", {})
    environment = settings.get("environment")
    return (settings.get("source"), environment) if isinstance(environment, str) else None


def _resume_key(head: RolloutHead) -> str:
    """The key of a rollout for a resumed collection, as 48 digits: its id, and a digest of its task and attempt."""
    attempt = digest_of(head.task_id or head.group, str(head.attempt))[:8]
    return (bytes.fromhex(head.id)[:16].ljust(16, b"\0") + attempt).hex()


def text_list(texts: Iterable[str]) -> str:
    return msgspec.json.encode(list(texts)).decode()

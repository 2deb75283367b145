"""What the index keeps of a rollout and its events, column by column."""

from collections.abc import Iterable
from typing import Any

import msgspec

from rolltape.records.ids import digest_of
from rolltape.records.jsonable import encode_numbers
from rolltape.records.rollout import RolloutHead, Status, StopReason
from rolltape.tape.index.sources import FoundRollout
from rolltape.tape.stored import FoundHead, StoredEvent

# What a rollout's row takes from the part that its owner wrote.
PART = (
    *("writer", "epoch", "place", "row", "first_event", "last_event", "started_ns"),
    *("sessions", "turns", "sampled_tokens", "versions", "finish", "ended_ns", "stop_reason", "reason"),
)
COLUMNS = (
    *("id", "try_index", "grp", "step", "attempt", "source", "task", "environment", "agent", "model", "head_tags"),
    *("resume", *PART, "scored", "reward", "terms", "rewarded_by", "filtered_at", "filter", "tagged", "tags"),
    *("pruned", "changed", "revision"),
)
SCORE = ("reward", "terms", "rewarded_by")


def row_columns(
    found: FoundHead, rollout: FoundRollout, place: str, environment: str | None, revision: int
) -> dict[str, Any]:
    """A rollout's whole row; `environment` is that of its source, for a rollout that names none."""
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
        **dict.fromkeys(("scored", "reward", "terms", "rewarded_by", "filtered_at", "filter", "tagged", "tags")),
        "pruned": "[]",
        "changed": "" if rollout.finish is None else rollout.finish.order_text,
        "revision": revision,
    }
    if rollout.score is not None:
        row |= score_columns(rollout.score)
    return row


def part_columns(rollout: FoundRollout) -> dict[str, Any]:
    """What a rollout's row takes from a part as it was read."""
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
    """The columns of a reward; one that is not a number is absent where `scored` is not."""
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
    """As its task names it, else as whoever recorded it did."""
    task: Any = head.task if isinstance(head.task, dict) else {}
    named = task.get("environment") or head.extra.get("environment")
    return named if isinstance(named, str) else None


def collected_environment(stored: StoredEvent) -> tuple[str | None, str] | None:
    """The source and the environment that a collection was begun with; None: it names no environment."""
    settings = stored.event.data.get("settings", {})
    environment = settings.get("environment")
    return (settings.get("source"), environment) if isinstance(environment, str) else None


def _resume_key(head: RolloutHead) -> str:
    """What a resumed collection asks for, as 48 digits: the id, and what all seats of one attempt share."""
    attempt = digest_of(head.task_id or head.group, str(head.attempt))[:8]
    return (bytes.fromhex(head.id)[:16].ljust(16, b"\0") + attempt).hex()


def text_list(texts: Iterable[str]) -> str:
    return msgspec.json.encode(list(texts)).decode()

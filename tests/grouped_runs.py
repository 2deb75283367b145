"""Runs with groups of given rewards, for what judges and rewards rollouts afterwards."""

from collections.abc import Sequence
from pathlib import Path

import rolltape
from rolltape.records.rollout import Event, EventKind
from rolltape.tape.run import RolloutRow
from taped import first_turn

Reward = float | None


def record_group(
    path: Path,
    task: str,
    rewards: Sequence[Reward],
    *,
    step: int = 0,
    versions: Sequence[str | None] = (),
    texts: Sequence[str] = (),
) -> list[str]:
    """A group of finished rollouts, one for each reward; the ids of its rollouts."""
    ids = []
    with rolltape.open(path, name="exp") as tape:
        for attempt, reward in enumerate(rewards):
            with tape.rollout(task_id=task, step=step, attempt=attempt) as rollout:
                fields: dict[str, object] = {"weight_version": versions[attempt] if versions else None}
                if texts:
                    fields["reply"] = {"role": "assistant", "content": texts[attempt]}
                first_turn(rollout.session(), **fields)
                rollout.finish(reward=reward)
                ids.append(rollout.id)
    return ids


def index(path: Path) -> dict[str, RolloutRow]:
    return {row.id: row for row in rolltape.read(path).index()}


def filtered(path: Path) -> dict[str, str]:
    """Why rollouts are kept out of training, by id."""
    return {one: row.outcome.filtered for one, row in index(path).items() if row.outcome.filtered is not None}


def said(path: Path, kind: EventKind) -> list[Event]:
    """All statements of a kind, in their order."""
    return [event for event in rolltape.read(path).events() if event.kind == kind]

"""`rolltape ls`: list the rollouts of a run."""

import math
from collections.abc import Sequence
from typing import Annotated

from rolltape.cli.options import JsonOption, RolloutFilter, RunArgument
from rolltape.cli.parameters import option
from rolltape.cli.runs import SelectedRollouts, open_run, report_problems
from rolltape.cli.screen import SHORT_ID, count, number, plural, print_json, print_line, print_table
from rolltape.records.rollout import Status
from rolltape.tape.run import RolloutRow


def ls(
    run: RunArgument,
    *,
    only: RolloutFilter,
    limit: Annotated[int | None, option("--limit N", "Only the last N rollouts.", min=1)] = None,
    as_json: JsonOption = False,
) -> int:
    """List rollouts."""
    tape = open_run(run)
    rows = SelectedRollouts(tape, only).rows
    shown = rows if limit is None else rows[-limit:]
    if as_json:
        for row in shown:
            print_json(_record(row))
    else:
        _print_rows(shown)
        print_line(_summary(rows))
    return report_problems(tape)


def _record(row: RolloutRow) -> dict[str, object]:
    return {
        "rollout": row.head.id,
        "try_index": row.head.try_index,
        "group": row.head.group,
        "step": row.head.step,
        "task_id": row.head.task_id,
        "source": row.head.source,
        "attempt": row.head.attempt,
        "model": row.head.model,
        "agent": row.head.agent,
        "foreign_ids": row.head.foreign_ids,
        "status": row.outcome.status,
        "stop_reason": row.outcome.stop_reason,
        "reason": row.outcome.reason,
        "reward": row.outcome.reward,
        "reward_terms": row.outcome.reward_terms,
        "filtered": row.outcome.filtered,
        "tags": row.outcome.tags,
        "inner_tags": row.inner_tags,
        "notes": row.notes,
        "sessions": row.sessions,
        "turns": row.turns,
        "sampled_tokens": row.sampled_tokens,
        "sealed": row.sealed,
        "pruned": row.pruned,
    }


def _print_rows(rows: Sequence[RolloutRow]) -> None:
    print_table(
        ["rollout", "try", "step", "task", "attempt", "status", "reward", "turns", "sampled"],
        [
            [
                row.id[:SHORT_ID],
                str(row.try_index),
                str(row.step),
                row.task_id or "",
                str(row.attempt),
                _status(row),
                number(row.reward),
                count(row.turns),
                count(row.sampled_tokens) if _knows_tokens(row) else "",
            ]
            for row in rows
        ],
        left=["rollout", "task", "status"],
        flexible=["task", "status"],
        spare=["attempt", "try", "sampled", "turns"],
    )


def _summary(rows: Sequence[RolloutRow]) -> str:
    """Counts and the mean reward. Rewards that are not finite are counted, not averaged."""
    rewards = [reward for row in rows if (reward := row.reward) is not None]
    finite = [reward for reward in rewards if math.isfinite(reward)]
    finished = sum(row.status == Status.FINISHED for row in rows)
    parts = [plural(len(rows), "rollout"), f"{finished:,} finished"]
    if finite:
        parts.append(f"mean reward {number(math.fsum(finite) / len(finite))}")
    if len(finite) < len(rewards):
        parts.append(f"{plural(len(rewards) - len(finite), 'reward')} not finite")
    known = [row.sampled_tokens for row in rows if _knows_tokens(row)]
    parts.append(plural(sum(known), "sampled token") if known or not rows else "no token ids")
    return ", ".join(parts)


def _knows_tokens(row: RolloutRow) -> bool:
    """Whether its token ids are known: a rollout that was imported as text has none."""
    return row.sampled_tokens > 0 or "token ids" not in row.head.extra.get("imported", {}).get("absent", ())


def _status(row: RolloutRow) -> str:
    remarks = ["filtered"] if row.filtered is not None else []
    remarks += [f"{part} pruned" for part in row.pruned]
    remarks += [plural(row.notes, "note")] if row.notes else []
    return row.status + (f" ({', '.join(remarks)})" if remarks else "")

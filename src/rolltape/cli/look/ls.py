"""`rolltape ls`: the rollouts of a run."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from rolltape.cli.options import GroupOption, JsonOption, RunArgument, StepOption, TaskOption
from rolltape.cli.output.screen import SHORT_ID, count, number, plural, print_json, print_line, print_table

if TYPE_CHECKING:
    from rolltape.tape.run import RolloutRow


def ls(
    run: RunArgument,
    step: StepOption = None,
    group: GroupOption = None,
    task: TaskOption = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the last so many.")] = None,
    as_json: JsonOption = False,
) -> int:
    """List the rollouts of a run."""
    from rolltape.cli.runs import Chosen, ended, opened

    tape = opened(run)
    rows = Chosen(tape, step=step, group=group, task=task).rows
    shown = rows if limit is None else rows[-limit:]
    if as_json:
        for row in shown:
            print_json(_record(row))
    else:
        _print_rows(shown)
        print_line(_summary(rows))
    return ended(tape)


def _record(row: "RolloutRow") -> dict[str, object]:
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
        "status": row.outcome.status,
        "stop_reason": row.outcome.stop_reason,
        "reason": row.outcome.reason,
        "reward": row.outcome.reward,
        "reward_terms": row.outcome.reward_terms,
        "filtered": row.outcome.filtered,
        "tags": row.outcome.tags,
        "sessions": row.sessions,
        "turns": row.turns,
        "sampled_tokens": row.sampled_tokens,
        "sealed": row.sealed,
        "pruned": row.pruned,
    }


def _print_rows(rows: Sequence["RolloutRow"]) -> None:
    print_table(
        ["rollout", "try", "step", "task", "attempt", "status", "reward", "turns", "sampled"],
        [
            [
                row.head.id[:SHORT_ID],
                str(row.head.try_index),
                str(row.head.step),
                row.head.task_id or "",
                str(row.head.attempt),
                _status(row),
                number(row.outcome.reward),
                count(row.turns),
                count(row.sampled_tokens),
            ]
            for row in rows
        ],
        left=["rollout", "task", "status"],
        flexible=["task", "status"],
        spare=["attempt", "try", "sampled", "turns"],
    )


def _summary(rows: Sequence["RolloutRow"]) -> str:
    """How many there are, and the mean of their rewards; one that is not finite is counted instead."""
    from rolltape.records.rollout import Status

    rewards = [row.outcome.reward for row in rows if row.outcome.reward is not None]
    finite = [reward for reward in rewards if math.isfinite(reward)]
    finished = sum(row.outcome.status is Status.FINISHED for row in rows)
    parts = [plural(len(rows), "rollout"), f"{finished:,} finished"]
    if finite:
        parts.append(f"mean reward {number(math.fsum(finite) / len(finite))}")
    if len(finite) < len(rewards):
        parts.append(f"{plural(len(rewards) - len(finite), 'reward')} not finite")
    parts.append(plural(sum(row.sampled_tokens for row in rows), "sampled token"))
    return ", ".join(parts)


def _status(row: "RolloutRow") -> str:
    remarks = ["filtered"] if row.outcome.filtered is not None else []
    remarks += [f"{part} pruned" for part in row.pruned]
    return row.outcome.status.value + (f" ({', '.join(remarks)})" if remarks else "")

"""`rolltape ls`: the rollouts of a run."""

from typing import TYPE_CHECKING, Annotated

import typer

from rolltape.cli.options import GroupOption, JsonOption, RunArgument, StepOption, TaskOption

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
    from rolltape.cli.screen import SHORT_ID, count, number, plural, print_json, print_line, print_table
    from rolltape.records.rollout import Status

    tape = opened(run)
    rows = Chosen(tape, step=step, group=group, task=task).rows
    shown = rows if limit is None else rows[-limit:]
    if as_json:
        for row in shown:
            print_json(
                {
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
            )
        return ended(tape)
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
            for row in shown
        ],
        left=["rollout", "task", "status"],
    )
    rewards = [row.outcome.reward for row in rows if row.outcome.reward is not None]
    finished = sum(row.outcome.status is Status.FINISHED for row in rows)
    mean = f", mean reward {number(sum(rewards) / len(rewards))}" if rewards else ""
    sampled = sum(row.sampled_tokens for row in rows)
    print_line(f"{plural(len(rows), 'rollout')}, {finished:,} finished{mean}, {plural(sampled, 'sampled token')}")
    return ended(tape)


def _status(row: "RolloutRow") -> str:
    remarks = ["filtered"] if row.outcome.filtered is not None else []
    remarks += [f"{part} pruned" for part in row.pruned]
    return row.outcome.status.value + (f" ({', '.join(remarks)})" if remarks else "")

"""`rolltape ls`: list the rollouts of a run."""

from collections.abc import Sequence
from typing import Annotated

from rolltape.cli.options import JsonOption, RolloutFilter, RunArgument
from rolltape.cli.parameters import option
from rolltape.cli.runs import SelectedRollouts, open_run, report_problems
from rolltape.cli.screen import SHORT_ID, count, number, plural, print_json, print_line, print_table
from rolltape.records.rollout import UNGRADED, Status
from rolltape.records.wording import reward_facts, token_fact
from rolltape.tape.run import RolloutRow

# The fields of a rollout's JSON, after its id and its try, by the record that has them.
_OF_HEAD = ("group", "step", "task_id", "source", "attempt", "model", "agent", "foreign_ids")
_OF_OUTCOME = ("status", "stop_reason", "reason", "reward", "reward_terms", "filtered", "tags")
_OF_ROW = ("inner_tags", "notes", "sessions", "turns", "sampled_tokens", "sealed", "pruned")


def ls(
    run: RunArgument,
    *,
    only: RolloutFilter,
    limit: Annotated[
        int | None, option("--limit N", "List only the last N rollouts; the totals count all.", min=1)
    ] = None,
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
    parts = ((row.head, _OF_HEAD), (row.outcome, _OF_OUTCOME), (row, _OF_ROW))
    fields = {name: getattr(part, name) for part, names in parts for name in names}
    return {"rollout": row.id, "try_index": row.try_index, **fields}


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
                "" if row.known_tokens is None else count(row.known_tokens),
            ]
            for row in rows
        ],
        left=["rollout", "task", "status"],
        flexible=["task", "status"],
        spare=["attempt", "try", "sampled", "turns"],
    )


def _summary(rows: Sequence[RolloutRow]) -> str:
    finished = sum(row.status == Status.FINISHED for row in rows)
    parts = [plural(len(rows), "rollout"), f"{finished:,} finished", *reward_facts(row.reward for row in rows)]
    parts.append(token_fact(row.known_tokens for row in rows))
    return ", ".join(parts)


def _status(row: RolloutRow) -> str:
    remarks = [] if row.filtered is None else ["ungraded" if row.filtered.startswith(UNGRADED) else "filtered"]
    remarks += [f"{part} pruned" for part in row.pruned]
    remarks += [plural(row.notes, "note")] if row.notes else []
    return row.status + (f" ({', '.join(remarks)})" if remarks else "")

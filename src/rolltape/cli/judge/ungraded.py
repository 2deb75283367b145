"""`rolltape score --ungraded`: grade rollouts that could not be graded before, without sampling."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from rolltape.cli.exits import Exit
from rolltape.cli.record.collect_run import warnings_to
from rolltape.cli.screen import SHORT_ID, number, plural, print_json, print_line, print_table
from rolltape.collect.environments import Environments
from rolltape.collect.environments.judge import Judge
from rolltape.collect.grading.regrading import Regrading, find_ungraded, is_ungraded
from rolltape.collect.results import RolloutResult
from rolltape.samples.summary import open_for_recording
from rolltape.tape.run import RolloutRow, Run

_SHOWN_RESULTS = 20


def grade_ungraded(
    run: Run, *, step: int | None, judge: Judge | None, limit_s: float, as_json: bool, dry_run: bool
) -> Exit:
    """Grade rollouts without a grade, and print the results."""
    rows = find_ungraded(run, step=step)
    results: list[RolloutResult] = []
    if rows and not dry_run:
        results = _grade(run, rows, judge, limit_s)
    if as_json:
        for one in results:
            print_json(
                {name: getattr(one, name) for name in ("rollout", "try_index", "task", "attempt", "reward", "reason")}
            )
    elif results:
        _print_table(results[:_SHOWN_RESULTS])
    ungraded = sum(map(is_ungraded, rows)) if dry_run else sum(one.is_ungraded for one in results)
    summary = {"graded": len(results) - ungraded if not dry_run else 0, "ungraded": ungraded, "dry_run": dry_run}
    if as_json:
        print_json(summary)
    elif dry_run:
        print_line(f"{plural(ungraded, 'rollout')} to grade")
    else:
        print_line(f"{plural(summary['graded'], 'rollout')} graded, {ungraded:,} still without a grade")
    return Exit.FAILED if ungraded and not dry_run else Exit.OK


def _grade(run: Run, rows: Sequence[RolloutRow], judge: Judge | None, limit_s: float) -> list[RolloutResult]:
    results: list[RolloutResult] = []

    async def grade() -> None:
        with open_for_recording(run.location) as tape, warnings_to(Path(run.location) / "logs" / "collect.log"):
            await Regrading(tape, Environments("problem", judge), limit_s=limit_s).run(rows, results.extend)

    asyncio.run(grade())
    return sorted(results, key=lambda one: (one.task_index, one.attempt, one.seat))


def _print_table(results: Sequence[RolloutResult]) -> None:
    print_table(
        ["rollout", "task", "attempt", "reward", "reason"],
        [[one.rollout[:SHORT_ID], one.task, str(one.attempt), number(one.reward), one.reason or ""] for one in results],
        left=["rollout", "task", "reason"],
        flexible=["task", "reason"],
        spare=["attempt"],
    )

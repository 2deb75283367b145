"""`rolltape prune`: delete turns or a side array; the tape keeps a record of what was deleted."""

import sys
from typing import Annotated

import msgspec
import typer

import rolltape
from rolltape.cli.options import DryRunOption, JsonOption, RunFolderArgument
from rolltape.cli.parameters import option
from rolltape.cli.runs import open_run_folder, report_problems
from rolltape.cli.screen import note, plural, print_json, print_line
from rolltape.errors import UsageError
from rolltape.tape.shards.prune import PruneReport


def prune(
    run: RunFolderArgument,
    *,
    before_step: Annotated[int | None, option("--before-step N", "Rollouts of steps before this one.")] = None,
    step: Annotated[list[int] | None, option("--step N", "Rollouts of this step; repeatable.")] = None,
    side_array: Annotated[
        str | None, option("--side-array NAME", "Delete only this side array, not the turns.")
    ] = None,
    dry_run: DryRunOption = False,
    yes: Annotated[bool, option("--yes", "Do not ask for confirmation.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Delete turns by step, or a side array.

    The rollouts themselves, with their rewards and events, stay on the tape.
    """
    if before_step is None and not step and side_array is None:
        raise UsageError("nothing to prune; give --before-step, --step, or --side-array")
    tape = open_run_folder(run)
    steps = step or None
    report = rolltape.prune(run, before_step=before_step, steps=steps, side_array=side_array, dry_run=True)
    if not dry_run:
        if report.rollouts and not yes:
            _confirm(report)
        report = rolltape.prune(run, before_step=before_step, steps=steps, side_array=side_array)
    if as_json:
        print_json(msgspec.to_builtins(report))
    else:
        freed = "" if report.dry_run else f", {report.bytes_freed:,} bytes freed"
        print_line(f"{'would delete' if report.dry_run else 'deleted'} {_described(report)}{freed}")
    for what, why in report.skipped.items():
        note(f"{what} skipped: {why}")
    return report_problems(tape)


def _described(report: PruneReport) -> str:
    turns = f"{plural(report.turns, 'turn')} with {plural(report.sampled_tokens, 'sampled token')}"
    what = turns if report.pruned == "turns" else f"the {report.pruned}"
    return f"{what} of {plural(report.rollouts, 'rollout')}"


def _confirm(report: PruneReport) -> None:
    if not sys.stdin.isatty():
        raise UsageError(f"--yes: required to delete {_described(report)}, because stdin is not a terminal")
    if not typer.confirm(f"Delete {_described(report)} permanently?", err=True):
        raise typer.Abort

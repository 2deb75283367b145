"""`rolltape prune`: make a run smaller; the tape says what was removed."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from rolltape.cli.exits import UsageError
from rolltape.cli.options import JsonOption, RunArgument

if TYPE_CHECKING:
    from rolltape.tape.shards.prune import PruneReport


def prune(
    run: RunArgument,
    before_step: Annotated[int | None, typer.Option("--before-step", help="Rollouts of the steps before this.")] = None,
    step: Annotated[list[int] | None, typer.Option("--step", help="Rollouts of this step; may be repeated.")] = None,
    side_array: Annotated[
        str | None, typer.Option("--side-array", metavar="NAME", help="Only this side array, not the turns.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Remove turns by step, or a side array.

    What a rollout was, and what became of it, stays on the tape.
    """
    import msgspec

    import rolltape
    from rolltape.cli.output.screen import note, print_json, print_line
    from rolltape.cli.runs import ended, opened

    if before_step is None and not step and side_array is None:
        raise UsageError("nothing to prune; give --before-step, --step or --side-array")
    tape = opened(run)
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
        print_line(f"{'would remove' if report.dry_run else 'removed'} {_described(report)}{freed}")
    for what, why in report.skipped.items():
        note(f"{what} left alone: {why}")
    return ended(tape)


def _described(report: "PruneReport") -> str:
    from rolltape.cli.output.screen import plural

    turns = f"{plural(report.turns, 'turn')} with {plural(report.sampled_tokens, 'sampled token')}"
    what = turns if report.pruned == "turns" else f"the {report.pruned}"
    return f"{what} of {plural(report.rollouts, 'rollout')}"


def _confirm(report: "PruneReport") -> None:
    if not sys.stdin.isatty():
        raise UsageError(f"--yes: needed to remove {_described(report)}, since there is nobody to ask")
    if not typer.confirm(f"Remove {_described(report)} for good?", err=True):
        raise typer.Abort

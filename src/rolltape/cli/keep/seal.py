"""`rolltape seal`: write finished rollouts as Parquet shards."""

from typing import Annotated

import msgspec

import rolltape
from rolltape.cli.options import JsonOption, RunFolderArgument
from rolltape.cli.parameters import option
from rolltape.cli.runs import open_run_folder, report_problems
from rolltape.cli.screen import plural, print_json, print_line, progress


def seal(
    run: RunFolderArgument,
    *,
    to: Annotated[str | None, option("--to URL", "Folder or fsspec URL (default: the run itself).")] = None,
    as_json: JsonOption = False,
) -> int:
    """Move finished rollouts from journals into Parquet shards."""
    tape = open_run_folder(run)
    with progress("sealing", len(tape.rows)) as advance:
        report = rolltape.seal(run, to, progress=lambda _done, _all: advance(1))
    if as_json:
        print_json(msgspec.to_builtins(report))
        return report_problems(tape)
    print_line(
        f"{plural(report.rollouts, 'rollout')}, {plural(report.turns, 'turn')}, and "
        f"{plural(report.sampled_tokens, 'sampled token')} sealed in {plural(len(report.shards), 'shard')}"
        + (f" at {report.location}" if to is not None else "")
    )
    if report.running:
        print_line(f"{plural(report.running, 'rollout')} still running; not sealed")
    for writer, why in report.kept.items():
        print_line(f"journal {writer} kept: {why}")
    return report_problems(tape)

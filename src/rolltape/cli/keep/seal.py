"""`rolltape seal`: rollouts that have ended, as Parquet shards."""

from typing import Annotated

import typer

from rolltape.cli.options import JsonOption, RunArgument


def seal(
    run: RunArgument,
    to: Annotated[
        str | None, typer.Option("--to", metavar="URL", help="A folder or any fsspec URL; by default the run itself.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Write rollouts that have ended as Parquet shards."""
    import msgspec

    import rolltape
    from rolltape.cli.output.screen import plural, print_json, print_line, progress
    from rolltape.cli.runs import ended, opened

    tape = opened(run)
    with progress("sealing", len(tape.rows)) as advance:
        report = rolltape.seal(run, to, progress=lambda _done, _all: advance(1))
    if as_json:
        print_json(msgspec.to_builtins(report))
        return ended(tape)
    print_line(
        f"{plural(report.rollouts, 'rollout')}, {plural(report.turns, 'turn')} and "
        f"{plural(report.sampled_tokens, 'sampled token')} sealed in {plural(len(report.shards), 'shard')}"
        + (f" at {report.location}" if to is not None else "")
    )
    if report.running:
        print_line(f"{plural(report.running, 'rollout')} still running, left in the journal")
    for writer, why in report.kept.items():
        print_line(f"journal {writer} stays: {why}")
    return ended(tape)

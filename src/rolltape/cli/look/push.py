"""`rolltape push`: a run's steps, and some of its rollouts, on a tracker."""

import contextlib
import io
import shlex
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from rolltape.cli.exits import UsageError
from rolltape.cli.options import JsonOption, PolicyOption, RunArgument, StepOption, chosen_policy
from rolltape.cli.output.screen import note, number, plural, print_json, print_line
from rolltape.records.choice import Choice

if TYPE_CHECKING:
    from rolltape.tracking import Tracker
    from rolltape.tracking.push import Push, PushedStep

_POLL_S = 2.0


def push(
    run: RunArgument,
    to: Annotated[str, typer.Option("--to", metavar="TRACKER", help="trackio, or a file that ends in .jsonl.")],
    project: Annotated[str, typer.Option("--project", help="The project on trackio.")] = "rolltape",
    name: Annotated[str | None, typer.Option("--name", help="The run's name there; by default its own.")] = None,
    step: StepOption = None,
    split: Annotated[str | None, typer.Option("--split", help="Only rollouts of this split.")] = None,
    default_split: Annotated[
        str, typer.Option("--default-split", help="The split of rollouts whose source names none.")
    ] = "train",
    max_traces: Annotated[int, typer.Option("--max-traces", help="At most so many a split and step; 0: none.")] = 8,
    choose: Annotated[Choice, typer.Option("--choose", help="Which rollouts those are.")] = Choice.FIRST,
    policy: PolicyOption = "exact",
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the run's writers are done.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Show a run's steps and rollouts on a tracker."""
    import rolltape
    from rolltape.cli.runs import OpenedRun, ended, opened
    from rolltape.tracking.allowance import Allowance
    from rolltape.tracking.push import Push

    chosen_one = chosen_policy(policy)
    tape = OpenedRun(rolltape.read(run), []) if follow else opened(run)
    with _tracker(to, project, name or tape.run.name) as tracker:
        pushing = Push(
            tape.run,
            tracker,
            allowance=Allowance(max_traces, choose),
            policy=chosen_one,
            default_split=default_split,
            wanted=lambda key: step in (None, key.step) and split in (None, key.split),
        )
        done = list(_printed(_rounds(pushing, follow), as_json))
    if not done and not pushing.waiting:
        given = {"--step": step, "--split": split}
        flags = " ".join(f"{flag} {value}" for flag, value in given.items() if value is not None)
        raise UsageError(f"{flags or run}: no rollout of {tape.run.name} is like that; `rolltape ls` lists them")
    _print_end(done, to, project, as_json)
    for key, running in pushing.waiting.items():
        why = f"{plural(running, 'rollout')} still running" if running else "it is still being collected"
        note(f"step {key.step} of {key.split}: {why}; push again, or --follow")
    return ended(tape)


@contextlib.contextmanager
def _tracker(to: str, project: str, name: str) -> Iterator["Tracker"]:
    """The tracker, closed in the end. What it prints goes beside the data, but for its farewell."""
    if to != "trackio" and not to.endswith(".jsonl"):
        raise UsageError(f"--to {to}: give trackio, or a file that ends in .jsonl")
    with contextlib.redirect_stdout(sys.stderr):
        if to == "trackio":
            from rolltape.tracking.trackio import LocalTracker

            tracker: Tracker = LocalTracker(project, name)
        else:
            from rolltape.tracking.jsonl import JsonlTracker

            tracker = JsonlTracker(to)
    try:
        yield tracker
    finally:
        with contextlib.redirect_stdout(io.StringIO()):
            tracker.close()


def _rounds(pushing: "Push", follow: bool) -> Iterator["PushedStep"]:
    from rolltape.tracking.steps import is_growing

    while follow and is_growing(pushing.run):
        yield from pushing.round(follow=True)
        time.sleep(_POLL_S)
    yield from pushing.round(follow=False)


def _printed(steps: Iterator["PushedStep"], as_json: bool) -> Iterator["PushedStep"]:
    """The steps, each printed as it is pushed."""
    for pushed in steps:
        summary = pushed.shown.summary if pushed.shown is not None else None
        reward = summary.rewards.mean if summary is not None and summary.rewards is not None else None
        if as_json:
            about = {"rollouts": summary.rollouts, "mean_reward": reward} if summary is not None else {}
            print_json(
                {
                    "step": pushed.key.step,
                    "split": pushed.key.split,
                    "there_already": pushed.shown is None,
                    "traces": len(pushed.shown or ()),
                    **about,
                }
            )
        elif pushed.shown is not None and summary is not None:
            parts = [plural(summary.rollouts, "rollout"), plural(len(pushed.shown), "trace")]
            parts += [f"mean reward {number(reward)}"] if reward is not None else []
            print_line(f"step {pushed.key.step}, {pushed.key.split}: {', '.join(parts)}")
        sys.stdout.flush()
        yield pushed


def _print_end(done: list["PushedStep"], to: str, project: str, as_json: bool) -> None:
    new = [one.shown for one in done if one.shown is not None]
    there = len(done) - len(new)
    if not as_json:
        pushed = f"{plural(len(new), 'step')} and {plural(sum(map(len, new)), 'trace')} pushed to {to}"
        print_line(pushed + (f"; {plural(there, 'step')} there already" if there else ""))
    if to == "trackio":
        note(f"trackio show --project {shlex.quote(project)} opens the page")

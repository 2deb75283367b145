"""`rolltape push`: send a run's metrics and traces to a tracker."""

import contextlib
import io
import shlex
import sys
import time
from collections.abc import Iterator
from typing import Annotated

import rolltape
from rolltape.cli.options import CutOptions, JsonOption, PolicyOption, RunArgument, StepOption
from rolltape.cli.parameters import either, option
from rolltape.cli.runs import OpenedRun, no_match, open_run, report_problems
from rolltape.cli.screen import note, number, plural, print_json, print_line
from rolltape.errors import UsageError
from rolltape.tracking import Tracker
from rolltape.tracking.choice import Choice
from rolltape.tracking.push import Push, PushedStep
from rolltape.tracking.sinks import Allowance

_POLL_S = 2.0


def push(
    run: RunArgument,
    *,
    to: Annotated[str, option("--to TRACKER", "trackio, or a file ending in .jsonl.")],
    project: Annotated[str, option("--project NAME", "Trackio project.")] = "rolltape",
    name: Annotated[str | None, option("--name NAME", "Run name on the tracker.")] = None,
    step: StepOption = None,
    split: Annotated[str | None, option("--split NAME", "Only rollouts of this split.")] = None,
    default_split: Annotated[
        str, option("--default-split NAME", "Split of rollouts whose source names none.")
    ] = "train",
    max_traces: Annotated[int, option("--max-traces N", "Maximum traces per split and step.")] = 8,
    choose: Annotated[
        Choice, option("--choose HOW", f"Which rollouts to send as traces: {either(Choice)}.")
    ] = Choice.FIRST,
    policy: PolicyOption = "exact",
    follow: Annotated[bool, option("--follow", "Keep sending until the run's writers are done.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Send a run's metrics and traces to a tracker."""
    tape = OpenedRun(rolltape.read(run), []) if follow else open_run(run)
    with _tracker(to, project, name or tape.run.name) as tracker:
        pushing = Push(
            tape.run,
            tracker,
            allowance=Allowance(max_traces, choose),
            policy=CutOptions(policy).cut_policy(),
            default_split=default_split,
            wanted=lambda key: step in (None, key.step) and split in (None, key.split),
        )
        done = list(_printed(_rounds(pushing, follow), as_json))
    if not done and not pushing.waiting:
        given = {"--step": step, "--split": split}
        flags = " ".join(f"{flag} {value}" for flag, value in given.items() if value is not None)
        raise no_match(flags or run, tape.run)
    _print_totals(done, to, project, as_json)
    for key, running in pushing.waiting.items():
        why = f"{plural(running, 'rollout')} still running" if running else "still being collected"
        note(f"step {key.step} of {key.split}: {why}; push again later, or use --follow")
    return report_problems(tape)


@contextlib.contextmanager
def _tracker(to: str, project: str, name: str) -> Iterator[Tracker]:
    """The tracker, closed at the end. What it prints goes to standard error, except on closing."""
    if to != "trackio" and not to.endswith(".jsonl"):
        raise UsageError(f"--to {to}: unknown tracker; use trackio, or a file ending in .jsonl")
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


def _rounds(pushing: Push, follow: bool) -> Iterator[PushedStep]:
    while follow and pushing.run.writers():
        yield from pushing.round(follow=True)
        time.sleep(_POLL_S)
    yield from pushing.round(follow=False)


def _printed(steps: Iterator[PushedStep], as_json: bool) -> Iterator[PushedStep]:
    """Yield the steps, and print each as it is pushed."""
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


def _print_totals(done: list[PushedStep], to: str, project: str, as_json: bool) -> None:
    new = [one.shown for one in done if one.shown is not None]
    there = len(done) - len(new)
    if not as_json:
        pushed = f"{plural(len(new), 'step')} and {plural(sum(map(len, new)), 'trace')} pushed to {to}"
        print_line(pushed + (f"; {plural(there, 'step')} already there" if there else ""))
    if to == "trackio":
        note(f"open it with: trackio show --project {shlex.quote(project)}")

"""`rolltape push`: send a run's metrics and traces to a tracker."""

import contextlib
import io
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import rolltape
from rolltape.cli.options import CutOptions, JsonOption, PolicyOption, RunArgument, StepOption, require_url
from rolltape.cli.parameters import either, given_flags, option
from rolltape.cli.runs import OpenedRun, no_match, open_run, report_problems
from rolltape.cli.screen import note, number, plural, print_json, print_line
from rolltape.errors import UsageError
from rolltape.tracking import Tracker
from rolltape.tracking.choice import Allowance, Choice
from rolltape.tracking.opening import FORMS, open_tracker
from rolltape.tracking.push import Push, PushedStep

_POLL_S = 2.0
# The commands that show what was pushed; the other trackers are servers of their own.
_SHOWN_BY = {"trackio": "trackio show --project", "tensorboard": "tensorboard --logdir"}


def push(
    run: RunArgument,
    *,
    to: Annotated[str, option("--to TRACKER", f"{FORMS}.")],
    project: Annotated[str | None, option("--project NAME", "Deprecated: use --to trackio:NAME.", hidden=True)] = None,
    name: Annotated[str | None, option("--name NAME", "Run name on the tracker.")] = None,
    step: StepOption = None,
    split: Annotated[str | None, option("--split NAME", "Only rollouts of this split.")] = None,
    default_split: Annotated[
        str, option("--default-split NAME", "Split of rollouts whose source does not name one.")
    ] = "train",
    max_traces: Annotated[int, option("--max-traces N", "Maximum traces per split and step.")] = 8,
    choose: Annotated[
        Choice, option("--choose HOW", f"Which rollouts to send as traces: {either(Choice)}.")
    ] = Choice.FIRST,
    policy: PolicyOption = "exact",
    view_url: Annotated[
        str | None,
        option("--view-url URL", "Address of rolltape view, to link rollouts to.", envvar="ROLLTAPE_VIEW_URL"),
    ] = None,
    follow: Annotated[bool, option("--follow", "Keep sending until the run's writers are done.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Send a run's metrics and traces to a tracker."""
    to = _current_form(to, project)
    require_url("--view-url", view_url)
    tape = OpenedRun(rolltape.read(run), [], []) if follow else open_run(run)
    with _tracker(to, name or tape.run.name, tape.run.tape_index.file.folder) as tracker:
        pushing = Push(
            tape.run,
            tracker,
            allowance=Allowance(max_traces, choose),
            policy=CutOptions(policy).cut_policy(),
            default_split=default_split,
            wanted=lambda key: step in (None, key.step) and split in (None, key.split),
            view_url=view_url,
        )
        done = list(_printed(_rounds(pushing, follow), as_json))
    if not done and not pushing.waiting:
        values = {"--step": step, "--split": split}
        flags = " ".join(f"{flag} {values[flag]}" for flag in given_flags(values))
        raise no_match(flags or run, tape.run)
    _print_totals(done, to, as_json)
    for key, running in pushing.waiting.items():
        why = f"{plural(running, 'rollout')} still running" if running else "still being collected"
        note(f"step {key.step} of {key.split}: {why}; push again later, or use --follow")
    return report_problems(tape)


def _current_form(to: str, project: str | None) -> str:
    """`--to` in its current form; in 0.1 the project was a separate option. Remove in 0.3."""
    if to == "trackio":
        note("--to trackio is deprecated; use --to trackio:PROJECT")
        return f"trackio:{project or 'rolltape'}"
    if project is not None:
        raise UsageError(f"--project {project}: --to {to} names the place; leave --project out")
    return to


@contextlib.contextmanager
def _tracker(to: str, name: str, memory: Path) -> Iterator[Tracker]:
    """The tracker, closed at the end. What it prints goes to standard error, except on closing."""
    with contextlib.redirect_stdout(sys.stderr):
        tracker = open_tracker(to, name=name, memory=memory)
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


def _print_totals(done: list[PushedStep], to: str, as_json: bool) -> None:
    new = [one.shown for one in done if one.shown is not None]
    there = len(done) - len(new)
    if not as_json:
        pushed = f"{plural(len(new), 'step')} and {plural(sum(map(len, new)), 'trace')} pushed to {to}"
        print_line(pushed + (f"; {plural(there, 'step')} already there" if there else ""))
    kind, _, place = to.partition(":")
    if kind in _SHOWN_BY:
        note(f"open it with: {_SHOWN_BY[kind]} {shlex.quote(place)}")

"""Progress of a collection, as a live line, plain lines or JSON events, and the report at its end."""

import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rolltape.cli.screen import (
    SHORT_ID,
    cell_width,
    count,
    discard_output,
    note,
    number,
    plural,
    print_hanging,
    print_json,
    print_line,
    print_long,
    print_rest,
    print_table,
    span,
)
from rolltape.collect.collector import Launch
from rolltape.collect.results import RolloutResult
from rolltape.collect.stats import CollectionStats, Figures, RewardStats

_SHOWN_TASKS = 20
_SHOWN_REASONS = 10

_SHORTEST_BAR, _LONGEST_BAR = 6, 24  # columns
_ECHO = 2  # columns for the ^C that a terminal echoes: it must not wrap the line
_RESULT_FIELDS = (
    *("rollout", "try_index", "task", "attempt", "seat", "status", "reward", "stop_reason", "reason"),
    *("turns", "sampled_tokens"),
)


def open_progress(*, as_json: bool) -> "LogProgress":
    """The kind of progress that fits the output."""
    if as_json:
        return JsonProgress()
    console = Console(stderr=True)
    return LiveProgress(console) if console.is_terminal and not console.is_dumb_terminal else LogProgress()


class LogProgress:
    """Prints a plain line from time to time. No method raises if the output cannot be written."""

    every_s = 30.0  # how often to call `progress`
    lost = False  # whether something could not be written

    def launched(self, launch: Launch) -> None:
        before = f", {count(launch.done_before)} done before" if launch.done_before else ""
        elsewhere = f", {count(launch.running_elsewhere)} running elsewhere" if launch.running_elsewhere else ""
        _try_note(f"{plural(launch.tasks, 'task')}, {plural(launch.attempts, 'attempt')}{before}{elsewhere}")
        # Without a sandbox, the collector has logged a warning.
        if launch.confinement.sandbox not in (None, "none"):
            _try_note(str(launch.confinement.says))

    def ended(self, results: Sequence[RolloutResult]) -> None:
        """Attempts have ended; the next line counts them."""

    def progress(self, figures: Figures) -> None:
        _try_note(", ".join(figure_texts(figures)))

    def stopping(self, grace_s: float) -> None:
        """The user has asked the collection to stop."""
        _try_note(f"stopping: running attempts have {grace_s:g} s to finish; press Ctrl-C again to cancel them")

    def over(self, figures: Figures, end: dict[str, Any]) -> None:
        """Nothing runs any more. `end` has more facts for a script. A report follows."""

    def close(self) -> None:
        """Nothing more is printed."""


class LiveProgress(LogProgress):
    """Keeps a bar and a line in place below everything else; on a narrow terminal the line is folded."""

    every_s = 0.25

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False)

    def launched(self, launch: Launch) -> None:
        super().launched(launch)
        with suppress(OSError):
            self._live.start()

    def progress(self, figures: Figures) -> None:
        self._show(figures, figure_texts(figures))

    def over(self, figures: Figures, end: dict[str, Any]) -> None:
        self._show(figures, [*figure_texts(figures, over=True), f"took {span(figures.seconds)}"])

    def _show(self, figures: Figures, parts: Sequence[str]) -> None:
        if not self._live.is_started:
            return
        with suppress(OSError):
            self._live.update(self._draw(figures, parts), refresh=True)

    def _draw(self, figures: Figures, parts: Sequence[str]) -> RenderableType:
        width = self._console.width - _ECHO
        text = ", ".join(parts)
        room = width - cell_width(text) - 2
        if room < _SHORTEST_BAR:
            return Text("\n".join(fold(parts, width)))
        line = Table.grid(padding=(0, 1))
        done, total = figures.done_before + figures.done, max(figures.total, 1)
        line.add_row(ProgressBar(total=total, completed=done, width=min(room, _LONGEST_BAR)), Text(text))
        return line

    def close(self) -> None:
        with suppress(OSError):
            self._live.stop()


class JsonProgress(LogProgress):
    """Prints JSON events. If they cannot be written, it prints a note and the collection continues."""

    def launched(self, launch: Launch) -> None:
        counts = {name: value for name, value in launch._asdict().items() if name != "confinement"}
        self._event("launch", counts | ({"sandbox": held} if (held := launch.confinement.sandbox) else {}))

    def ended(self, results: Sequence[RolloutResult]) -> None:
        for result in results:
            values = {name: getattr(result, name) for name in _RESULT_FIELDS}
            self._event("rollout", {name: value for name, value in values.items() if value is not None})

    def progress(self, figures: Figures) -> None:
        self._event("progress", figures._asdict())

    def stopping(self, grace_s: float) -> None:
        super().stopping(grace_s)  # the sender of the signal may be at the terminal
        self._event("ending", {"grace_s": grace_s})

    def over(self, figures: Figures, end: dict[str, Any]) -> None:
        self._event("end", {**figures._asdict(), **end})

    def _event(self, kind: str, fields: dict[str, Any]) -> None:
        if self.lost:
            return
        try:
            print_json({"event": kind, **fields})
            sys.stdout.flush()
        except OSError as error:
            self.lost = True
            discard_output()
            _try_note(f"events cannot be written ({error.strerror or error}); the collection continues without them")


def figure_texts(figures: Figures, *, over: bool = False) -> list[str]:
    """The figures of a collection in words."""
    parts = [f"{count(figures.done_before + figures.done)} of {count(figures.total)} done"]
    parts += [] if over else [f"{count(figures.running)} running"]
    parts += [f"{count(figures.failed)} failed"]
    parts += [] if figures.mean_reward is None else [f"mean reward {number(figures.mean_reward)}"]
    parts += [f"{figures.tokens_per_s:,.0f} tokens/s"]
    if not over and figures.seconds_left is not None:
        parts.append(f"{span(figures.seconds_left)} left")
    return parts


def fold(parts: Sequence[str], width: int) -> list[str]:
    """Arrange the parts on as few lines as possible."""
    lines: list[str] = []
    for part in parts:
        if lines and cell_width(lines[-1]) + cell_width(part) + 2 < width:
            lines[-1] += f", {part}"
        else:
            lines.append(part)
    return lines


def _try_note(text: str) -> None:
    with suppress(OSError):
        note(text)


def print_report(tally: CollectionStats, run: Path, step: int, *, whole: bool) -> None:
    """Print the report; with `whole`, nothing is left to run."""
    launch = tally.launch
    is_part = launch is not None and bool(launch.done_before or launch.running_elsewhere)
    if is_part and tally.rollouts:
        print_line("of the attempts that ran now:")
    _print_tasks(tally, is_part=is_part)
    _print_endings(tally)
    if tally.rollouts:
        _print_totals(tally)
    else:
        print_line("nothing left to run" if whole else "no attempt ended")
    _print_next(tally, run, step, whole=whole)


def _print_tasks(tally: CollectionStats, *, is_part: bool) -> None:
    tasks = tally.by_task
    if not tasks:
        return
    rows = [
        [name, count(one.count), number(one.mean), number(one.spread), _range(one)]
        for name, one in tasks[:_SHOWN_TASKS]
    ]
    print_table(["task", "rewards", "mean", "spread", "range"], rows, left=["task"], flexible=["task"])
    print_rest(len(tasks) - _SHOWN_TASKS)
    several = [one for _, one in tasks if one.count > 1]
    if several and not is_part:  # earlier attempts belong to the groups too
        apart = sum(one.least != one.most for one in several)
        print_line(f"rewards differ in {count(apart)} of {plural(len(several), 'group')}")
    print_line("")


def _range(rewards: RewardStats) -> str:
    least, most = rewards.least, rewards.most
    return "" if least > most else f"{number(least)} to {number(most)}"  # none is finite


def _print_endings(tally: CollectionStats) -> None:
    if not tally.endings:
        return
    most_first = sorted(tally.endings.items(), key=lambda item: -item[1].count)
    rows = [
        [status, count(one.count), number(one.rewards.mean), reason]
        for (status, reason), one in most_first[:_SHOWN_REASONS]
    ]
    columns = ["status", "rollouts", "mean reward", "reason"]
    print_table(columns, rows, left=["status", "reason"], flexible=["reason"], spare=["mean reward"])
    if len(most_first) > _SHOWN_REASONS:
        rest = sum(one.count for _, one in most_first[_SHOWN_REASONS:])
        print_line(f"… and {plural(rest, 'rollout')} with {count(len(most_first) - _SHOWN_REASONS)} other reasons")
    print_line("")


def _print_totals(tally: CollectionStats) -> None:
    mean = "" if tally.rewards.mean is None else f", mean reward {number(tally.rewards.mean)}"
    not_finite = tally.rewards.not_finite
    mean += f", {plural(not_finite, 'reward')} not finite" if not_finite else ""
    unrewarded = f", {count(tally.unrewarded)} without reward" if tally.unrewarded else ""
    print_long(
        f"{plural(tally.rollouts, 'rollout')}, {plural(tally.turns, 'turn')}, "
        f"{plural(tally.sampled_tokens, 'sampled token')}{mean}{unrewarded}"
        f"{f', cost {tally.usage.cost:.4g}' if tally.usage.cost else ''}"
    )
    if tally.fates:
        fates = (f"{count(tokens)} {fate}" for fate, tokens in tally.fates.most_common())
        print_long(f"ledger (exact): {', '.join(fates)}")


def _print_next(tally: CollectionStats, run: Path, step: int, *, whole: bool) -> None:
    place = shlex.quote(str(run))
    lines = [(f"rolltape ls {place} --step {step}", "lists the rollouts")]
    if tally.broken is not None:
        lines.append(
            (f"rolltape trace {place} {tally.broken.rollout[:SHORT_ID]}", f"shows a failed one ({tally.broken.task})")
        )
    if tally.worst is not None:
        reward = number(tally.worst.reward)
        lines.append(
            (
                f"rolltape trace {place} {tally.worst.rollout[:SHORT_ID]}",
                f"shows the lowest reward ({tally.worst.task}: {reward})",
            )
        )
    if tally.sampled_tokens:
        lines.append((f"rolltape ledger {place} --step {step}", "accounts for every sampled token"))
    if tally.ungraded:
        lines.append((f"rolltape score {place} --ungraded", f"grades {plural(tally.ungraded, 'rollout')} again"))
    if tally.failed or not whole:
        lines.append(("the same command with --resume", "runs what has not finished"))
    width = max(len(command) for command, _ in lines)
    for command, what in lines:
        print_hanging("", "", f"{command:{width}}  ", what)

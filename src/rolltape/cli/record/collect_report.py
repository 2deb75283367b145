"""The report at the end of a collection: rewards by task, how rollouts ended, token totals, and what to run next."""

from pathlib import Path
from typing import TYPE_CHECKING

from rolltape.cli.output.columns import cell_width
from rolltape.cli.output.screen import (
    SHORT_ID,
    count,
    number,
    plural,
    print_line,
    print_long,
    print_table,
    terminal_width,
)

if TYPE_CHECKING:
    from rolltape.collect.stats import CollectionStats, RewardStats

_SHOWN_TASKS = 20
_SHOWN_REASONS = 10


def print_report(tally: "CollectionStats", run: Path, step: int, *, whole: bool) -> None:
    """Print the report; `whole` says that nothing is left to run."""
    _print_tasks(tally)
    _print_endings(tally)
    if tally.rollouts:
        _print_totals(tally)
    else:
        print_line("nothing left to run" if whole else "no attempt ended")
    _print_next(tally, run, step, whole=whole)


def _print_tasks(tally: "CollectionStats") -> None:
    tasks = tally.by_task
    if not tasks:
        return
    rows = [
        [name, count(one.count), number(one.mean), number(one.spread), _range(one)]
        for name, one in tasks[:_SHOWN_TASKS]
    ]
    print_table(["task", "rewards", "mean", "spread", "range"], rows, left=["task"], flexible=["task"])
    if len(tasks) > _SHOWN_TASKS:
        print_line(f"… and {count(len(tasks) - _SHOWN_TASKS)} more")
    several = [one for _, one in tasks if one.count > 1]
    if several:
        apart = sum(one.least != one.most for one in several)
        print_line(f"rewards differ in {count(apart)} of {plural(len(several), 'group')}")
    print_line("")


def _range(rewards: "RewardStats") -> str:
    least, most = rewards.least, rewards.most
    return "" if least > most else f"{number(least)} to {number(most)}"  # all are NaN


def _print_endings(tally: "CollectionStats") -> None:
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


def _print_totals(tally: "CollectionStats") -> None:
    mean = "" if tally.rewards.mean is None else f", mean reward {number(tally.rewards.mean)}"
    unrewarded = f", {count(tally.unrewarded)} without reward" if tally.unrewarded else ""
    print_long(
        f"{plural(tally.rollouts, 'rollout')}, {plural(tally.turns, 'turn')}, "
        f"{plural(tally.sampled_tokens, 'sampled token')}{mean}{unrewarded}"
    )
    if tally.fates:
        fates = (f"{count(tokens)} {fate}" for fate, tokens in tally.fates.most_common())
        print_long(f"ledger (exact): {', '.join(fates)}")


def _print_next(tally: "CollectionStats", run: Path, step: int, *, whole: bool) -> None:
    lines = [(f"rolltape ls {run} --step {step}", "lists the rollouts")]
    if tally.broken is not None:
        lines.append(
            (f"rolltape trace {run} {tally.broken.rollout[:SHORT_ID]}", f"shows a failed one ({tally.broken.task})")
        )
    if tally.worst is not None:
        reward = number(tally.worst.reward)
        lines.append(
            (
                f"rolltape trace {run} {tally.worst.rollout[:SHORT_ID]}",
                f"shows the lowest reward ({tally.worst.task}: {reward})",
            )
        )
    if tally.sampled_tokens:
        lines.append((f"rolltape ledger {run} --step {step}", "accounts for every sampled token"))
    if tally.failed or not whole:
        lines.append(("the same command with --resume", "runs what has not finished"))
    width, room = max(len(command) for command, _ in lines), terminal_width()
    for command, what in lines:
        line = f"{command:{width}}  {what}"
        print_long(line if room is None or cell_width(line) <= room else command)

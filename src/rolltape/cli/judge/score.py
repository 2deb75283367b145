"""`rolltape score`: rewards that come late, or again."""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from rolltape.cli.exits import UsageError
from rolltape.cli.options import JsonOption, RolloutArgument, RunArgument, TryOption
from rolltape.cli.output.screen import SHORT_ID, note, number, plural, print_json, print_line, print_table

if TYPE_CHECKING:
    from rolltape.collect.rewards import LateReward
    from rolltape.collect.sources.entries import Entry

_SHOWN_REWARDS = 20


def score(
    run: RunArgument,
    rollout: RolloutArgument = None,
    reward: Annotated[str | None, typer.Argument(metavar="[REWARD]", help="A number; nan and inf are some.")] = None,
    terms: Annotated[
        list[str] | None, typer.Option("--term", metavar="NAME=VALUE", help="What it is made of; may be repeated.")
    ] = None,
    by: Annotated[str | None, typer.Option("--by", metavar="NAME", help="Who says so.")] = None,
    turn: Annotated[
        str | None, typer.Option("--turn", help="Reward this turn: its id, or SESSION.TURN as `rolltape trace` has it.")
    ] = None,
    try_index: TryOption = None,
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="FILE", help="JSON lines with rollout, reward, …; - is standard input."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would change.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Reward rollouts, or turns of them, late or again.

    The latest reward counts, and the earlier ones stay on the tape. With --from, an object a line: rollout and reward,
    and if wanted terms, by, try and turn. All lines are checked before the first is recorded.
    """
    import rolltape
    from rolltape.cli.runs import ended, held
    from rolltape.collect.rewards import late_rewards, record_rewards

    label, entries = _given(rollout, reward, terms, turn, try_index, source)
    with held(run) as tape:
        rewards = late_rewards(tape.run, entries, label=label, by=by)
        if not dry_run and any(one.is_new for one in rewards):
            with rolltape.open(tape.run.location) as writer:
                record_rewards(writer, rewards)
    _print(rewards, as_json=as_json, dry_run=dry_run)
    return ended(tape)


def _given(
    rollout: str | None,
    reward: str | None,
    terms: Sequence[str] | None,
    turn: str | None,
    try_index: int | None,
    source: str | None,
) -> "tuple[str | None, Iterable[Entry]]":
    """The file that rewards stand in, if it is one, and the rewards."""
    from rolltape.collect.sources.entries import Entry
    from rolltape.collect.sources.jsonfiles import json_lines_file, json_lines_stream

    if rollout is not None and rollout.startswith("-"):
        raise UsageError(f"there is no option {rollout}; `rolltape score --help` lists them")
    if source is None:
        if rollout is None or reward is None:
            raise UsageError("give ROLLOUT and REWARD, or --from FILE")
        number = _number(reward, f"REWARD {reward}: give a number")
        fields = {"rollout": rollout, "reward": number, "terms": _numbers(terms or ()), "turn": turn, "try": try_index}
        return None, [Entry("ROLLOUT", {name: value for name, value in fields.items() if value is not None})]
    for name, value in {"ROLLOUT": rollout, "--term": terms, "--turn": turn, "--try": try_index}.items():
        if value is not None:
            raise UsageError(f"--from {source}: {name} is for the file to say")
    reading = json_lines_stream(sys.stdin.buffer, None) if source == "-" else json_lines_file(source, None)
    return reading.label, reading.entries


def _numbers(terms: Sequence[str]) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for term in terms:
        name, _, value = term.partition("=")
        if name in numbers:
            raise UsageError(f"--term {term}: {name} is given twice")
        numbers[name] = _number(value, f"--term {term}: give a name and a number, as style=0.5")
    return numbers


def _number(text: str, otherwise: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(otherwise) from None


def _print(rewards: Sequence["LateReward"], *, as_json: bool, dry_run: bool) -> None:
    fresh = [one for one in rewards if one.is_new]
    changed = sum(one.changes for one in fresh)
    if as_json:
        for one in rewards:
            print_json(_record(one))
        print_json({"rewards": len(rewards), "recorded": len(fresh), "changed": changed, "dry_run": dry_run})
        return
    if fresh:
        _print_table(fresh[:_SHOWN_REWARDS])
    if len(fresh) > _SHOWN_REWARDS:
        print_line(f"… and {len(fresh) - _SHOWN_REWARDS:,} more")
    recorded = f"{len(fresh):,} {'to be recorded' if dry_run else 'recorded'}, {changed:,} changed"
    print_line(f"{plural(len(rewards), 'reward')}: {recorded if fresh else 'nothing new'}")
    for remark in _remarks(fresh):
        note(remark)


def _print_table(rewards: Sequence["LateReward"]) -> None:
    print_table(
        ["rollout", "try", "step", "task", "attempt", "turn", "before", "reward", "by"],
        [
            [
                one.row.id[:SHORT_ID],
                str(one.row.head.try_index),
                str(one.row.head.step),
                one.row.head.task_id or "",
                str(one.row.head.attempt),
                "" if one.statement.turn is None else ".".join(one.statement.turn.rsplit(".", 2)[1:]),
                number(one.before),
                number(one.reward),
                one.statement.by or "",
            ]
            for one in rewards
        ],
        left=["rollout", "task", "by"],
        flexible=["task", "by"],
        spare=["attempt", "try", "step"],
    )


def _remarks(rewards: Sequence["LateReward"]) -> Iterator[str]:
    """What a person may not expect of rewards that are recorded."""
    from rolltape.records.rollout import Status

    whole = [one for one in rewards if one.statement.turn is None]
    endless = sum(not math.isfinite(one.reward) for one in whole)
    running = sum(one.row.outcome.status is Status.RUNNING for one in whole)
    broken = sum(one.row.outcome.status in (Status.FAILED, Status.LOST) for one in whole)
    filtered = sum(one.row.outcome.filtered is not None for one in whole)
    if endless:
        yield f"not finite: {plural(endless, 'reward')}; the mean of a group leaves them out"
    if running:
        yield f"still running: {plural(running, 'rollout')}; a reward that one finishes with will count instead"
    if broken:
        yield f"failed or lost: {plural(broken, 'rollout')}; a reward does not count there"
    if filtered:
        yield f"filtered: {plural(filtered, 'rollout')}; a reward does not change that, `rolltape filter` says why"


def _record(one: "LateReward") -> dict[str, object]:
    said = one.statement
    return {
        "rollout": said.rollout,
        "try_index": said.try_index,
        "turn": said.turn,
        "reward": one.reward,
        "reward_terms": said.data["terms"],
        "by": said.by,
        "before": one.before,
        "recorded": one.is_new,
        "changed": one.changes,
    }

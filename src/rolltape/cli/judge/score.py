"""`rolltape score`: set rewards after rollouts were recorded."""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

import rolltape
from rolltape.cli.judge.places import check_turn, place_text
from rolltape.cli.options import (
    DryRunOption,
    JsonOption,
    JudgeOptions,
    NamedRollout,
    RunArgument,
    TryOption,
    TurnOption,
)
from rolltape.cli.parameters import argument, given_flags, option
from rolltape.cli.runs import open_run, open_snapshot, report_problems
from rolltape.cli.screen import SHORT_ID, note, number, plural, print_json, print_line, print_rest, print_table
from rolltape.collect.rewards import LateReward, RewardPaths, late_rewards, record_rewards
from rolltape.collect.sources.entries import SourceEntry
from rolltape.collect.sources.jsonfiles import json_lines_file, json_lines_stream
from rolltape.errors import UsageError
from rolltape.records.rollout import UNGRADED, Status

_SHOWN_REWARDS = 20


def score(
    run: RunArgument,
    rollout: NamedRollout = None,
    reward: Annotated[str | None, argument("REWARD", "A number; nan and inf are allowed.")] = None,
    *,
    terms: Annotated[list[str] | None, option("--term NAME=VALUE", "A term of the reward; repeatable.")] = None,
    by: Annotated[str | None, option("--by NAME", "Who gives the reward.")] = None,
    turn: TurnOption = None,
    try_index: TryOption = None,
    source: Annotated[str | None, option("--from FILE", "JSON lines with rollout and reward; - is stdin.")] = None,
    id_field: Annotated[
        str | None,
        option("--id-field NAME", "With --from: field with the id; traces.0.id reaches into objects and lists."),
    ] = None,
    reward_field: Annotated[str | None, option("--reward-field NAME", "With --from: field with the reward.")] = None,
    term_fields: Annotated[
        list[str] | None,
        option("--term-field NAME", "With --from: field with a term, or an object of terms; repeatable."),
    ] = None,
    skip_unknown: Annotated[
        bool, option("--skip-unknown", "With --from: skip lines about rollouts that the run does not have.")
    ] = False,
    ungraded: Annotated[
        bool, option("--ungraded", "Grade the rollouts that could not be graded; nothing is sampled.")
    ] = False,
    step: Annotated[int | None, option("--step N", "With --ungraded: only rollouts of this step.", min=0)] = None,
    judging: JudgeOptions,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> int:
    """Set rewards of rollouts or turns, even after they finished.

    The latest reward counts; earlier ones stay on the tape. With --from, each line is a JSON object with rollout and
    reward, and optionally terms, by, try, and turn. --id-field, --reward-field, and --term-field name the fields of
    another program's file; its other fields are then ignored. All lines are checked before the first is recorded. With
    --ungraded, environments and judges grade the rollouts that they could not grade before.
    """
    named_fields = {"--id-field": id_field, "--reward-field": reward_field, "--term-field": term_fields}
    for_file = given_flags({**named_fields, "--skip-unknown": skip_unknown})
    if ungraded:
        from rolltape.cli.judge.ungraded import grade_ungraded

        given = {"ROLLOUT": rollout, "--term": terms, "--by": by, "--turn": turn, "--try": try_index, "--from": source}
        if wrong := [*given_flags(given), *for_file]:
            raise UsageError(f"--ungraded grades all rollouts without a grade; leave out {wrong[0]}")
        opened = open_run(run)
        code = grade_ungraded(
            opened.run,
            step=step,
            judge=judging.judge(),
            limit_s=judging.score_timeout_s,
            as_json=as_json,
            dry_run=dry_run,
        )
        return report_problems(opened) or code
    if wrong := given_flags({"--step": step, **judging.judge_flags()}):
        raise UsageError(f"{wrong[0]} needs --ungraded")
    if source is None and for_file:
        raise UsageError(f"{for_file[0]} needs --from")
    fields = None
    if given_flags(named_fields):
        fields = RewardPaths(id_field or "rollout", reward_field or "reward", tuple(term_fields or ()))
    label, entries = _rewards(rollout, reward, terms, turn, try_index, source)
    skipped: list[str] = []
    with open_snapshot(run) as tape:
        rewards = late_rewards(
            tape.run, entries, label=label, by=by, fields=fields, on_unknown=skipped.append if skip_unknown else None
        )
        if not dry_run and any(one.is_new for one in rewards):
            with rolltape.open(tape.run.location) as writer:
                record_rewards(writer, rewards)
    _print(rewards, skipped, as_json=as_json, dry_run=dry_run)
    return report_problems(tape)


def _rewards(
    rollout: str | None,
    reward: str | None,
    terms: Sequence[str] | None,
    turn: str | None,
    try_index: int | None,
    source: str | None,
) -> tuple[str | None, Iterable[SourceEntry]]:
    """The name of the file with the rewards, if there is one, and the rewards."""
    if rollout is not None and rollout.startswith("-"):
        raise UsageError(f"unknown option {rollout}; `rolltape score --help` lists them")
    if source is None:
        if rollout is None or reward is None:
            raise UsageError("give ROLLOUT and REWARD, or --from FILE")
        number = _number(reward, f"REWARD {reward}: give a number")
        turn = None if turn is None else check_turn(turn)
        fields = {"rollout": rollout, "reward": number, "terms": _numbers(terms or ()), "turn": turn, "try": try_index}
        return None, [SourceEntry("ROLLOUT", {name: value for name, value in fields.items() if value is not None})]
    if wrong := given_flags({"ROLLOUT": rollout, "--term": terms, "--turn": turn, "--try": try_index}):
        raise UsageError(f"--from {source}: {wrong[0]} must be given in the file")
    reading = json_lines_stream(sys.stdin.buffer, None) if source == "-" else json_lines_file(source, None)
    return reading.label, reading.entries


def _numbers(terms: Sequence[str]) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for term in terms:
        name, _, value = term.partition("=")
        if name in numbers:
            raise UsageError(f"--term {term}: {name} is given twice")
        numbers[name] = _number(value, f"--term {term}: give a name and a number, such as style=0.5")
    return numbers


def _number(text: str, otherwise: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(otherwise) from None


def _print(rewards: Sequence[LateReward], skipped: Sequence[str], *, as_json: bool, dry_run: bool) -> None:
    fresh = [one for one in rewards if one.is_new]
    changed = sum(one.changes for one in fresh)
    if as_json:
        for one in rewards:
            print_json(_record(one))
        counts = {"rewards": len(rewards), "recorded": len(fresh), "changed": changed, "skipped": len(skipped)}
        print_json({**counts, "dry_run": dry_run})
        return
    if fresh:
        _print_table(fresh[:_SHOWN_REWARDS])
    print_rest(len(fresh) - _SHOWN_REWARDS)
    recorded = f"{len(fresh):,} {'to record' if dry_run else 'recorded'}, {changed:,} changed"
    print_line(f"{plural(len(rewards), 'reward')}: {recorded if fresh else 'nothing new'}")
    if skipped:
        note(f"{plural(len(skipped), 'line')} skipped, the first is {skipped[0]}: the run holds no such rollouts")
    for text in _notes(fresh):
        note(text)


def _print_table(rewards: Sequence[LateReward]) -> None:
    print_table(
        ["rollout", "try", "step", "task", "attempt", "turn", "before", "reward", "by"],
        [
            [
                one.row.id[:SHORT_ID],
                str(one.row.head.try_index),
                str(one.row.head.step),
                one.row.head.task_id or "",
                str(one.row.head.attempt),
                place_text(one.statement.turn, None),
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


def _notes(rewards: Sequence[LateReward]) -> Iterator[str]:
    """Warnings about rewards that may not have the expected effect."""
    whole = [one for one in rewards if one.statement.turn is None]
    endless = sum(not math.isfinite(one.reward) for one in whole)
    running = sum(one.row.outcome.status is Status.RUNNING for one in whole)
    broken = sum(one.row.outcome.status in (Status.FAILED, Status.LOST) for one in whole)
    filtered = sum(not (one.row.outcome.filtered or UNGRADED).startswith(UNGRADED) for one in whole)
    if endless:
        yield f"{plural(endless, 'reward')} not finite; a group's mean leaves them out"
    if running:
        yield f"{plural(running, 'rollout')} still running; a reward given at the finish will count instead"
    if broken:
        yield f"{plural(broken, 'rollout')} failed or lost; rewards do not count there"
    if filtered:
        yield f"{plural(filtered, 'rollout')} filtered, and a reward does not change that; `rolltape filter` shows why"


def _record(one: LateReward) -> dict[str, object]:
    statement = one.statement
    return {
        "rollout": statement.rollout,
        "try_index": statement.try_index,
        "turn": statement.turn,
        "reward": one.reward,
        "reward_terms": statement.data["terms"],
        "by": statement.by,
        "before": one.before,
        "recorded": one.is_new,
        "changed": one.changes,
    }

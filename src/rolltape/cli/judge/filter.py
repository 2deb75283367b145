"""`rolltape filter`: exclude rollouts from training by a rule, undo that, or list what is excluded."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple

import rolltape
from rolltape.cli.options import DryRunOption, JsonOption, RolloutFilter, RunArgument
from rolltape.cli.parameters import given_flags, option
from rolltape.cli.runs import OpenedRun, SelectedRollouts, open_snapshot, report_problems
from rolltape.cli.screen import count, note, plural, print_json, print_line, print_rest, print_table, tracked
from rolltape.collect import filters
from rolltape.collect.filters import Verdict
from rolltape.errors import NoSuchFunction, UsageError
from rolltape.records.rollout import EventKind
from rolltape.tape.journal.entries import NewEvent
from rolltape.tape.run import RolloutRow

_SHOWN_REASONS = 20
_NOW, _ALREADY, _TAKEN_BACK = "filtered_now", "filtered_already", "taken_back"  # the change of a filter


def filter(  # noqa: A001 - the name of the command
    run: RunArgument,
    *,
    no_spread: Annotated[bool, option("--no-spread", "Exclude groups whose rewards are all the same.")] = False,
    stale: Annotated[
        int | None, option("--stale N", "Exclude rollouts sampled more than N weight versions ago.", min=0)
    ] = None,
    reject: Annotated[
        str | None,
        option("--reject FUNCTION", "Exclude rollouts for which python:module:function returns a reason or True."),
    ] = None,
    undo: Annotated[bool, option("--undo", "Remove filters.")] = False,
    by: Annotated[str | None, option("--by RULE", "With --undo: only filters of this rule.")] = None,
    only: RolloutFilter,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> int:
    """Exclude rollouts from training by a rule, or undo that.

    Without a rule, list what is excluded and why. The tape keeps everything.
    """
    asked = {"--no-spread": no_spread, "--stale": stale, "--reject": reject, "--undo": undo}
    given = given_flags(asked)
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)}: give only one of them")
    if by is not None and not undo:
        raise UsageError("--by needs --undo")
    with open_snapshot(run) as tape:
        rows = SelectedRollouts(tape, only).rows
        if undo:
            found = _undo(tape, rows, by)
        elif given:
            found = _apply(tape, *_rule(tape, rows, stale, reject))
        else:
            found = _Filtering(_current(tape, rows, _ALREADY), (), len(rows), already="filtered")
        if found.statements and not dry_run:
            with rolltape.open(tape.run.location) as writer:
                writer.append_events(found.statements)
    _print(found, {row.key: row for row in rows}, as_json=as_json, dry_run=dry_run)
    return report_problems(tape)


class _Line(NamedTuple):
    """A filter, and its change."""

    key: tuple[str, int]
    by: str | None
    reason: str
    change: str


class _Filtering(NamedTuple):
    lines: list[_Line]
    statements: Sequence[NewEvent]  # to append to the tape
    judged: int  # rollouts
    unjudged: Counter[str] = Counter()
    otherwise: str = "none filtered"  # the summary if there are no lines
    already: str = "already filtered"


def _rule(
    tape: OpenedRun, rows: Sequence[RolloutRow], limit: int | None, function: str | None
) -> tuple[str, Iterable[Verdict]]:
    """The rule to apply, by its name on the tape, and its verdicts."""
    if function is not None:
        try:
            by, reject = filters.reject_named(function)
        except NoSuchFunction as error:
            raise UsageError(f"--reject: {error}") from None
        return by, tracked(filters.rejected(tape.run, rows, reject, by), by, len(rows))
    if limit is None:
        return filters.NO_SPREAD, filters.no_spread(rows)
    versions = tape.run.versions()
    if not versions:
        raise UsageError(f"--stale: run {tape.run.name} has no weight versions; none was recorded or announced")
    return filters.STALE, filters.stale(rows, versions, limit)


def _apply(tape: OpenedRun, by: str, given: Iterable[Verdict]) -> _Filtering:
    """The changes that bring the filters of a rule up to date."""
    verdicts = list(given)
    statements = filters.changes(tape.run, verdicts, by)
    changed = {(one.rollout, one.try_index) for one in statements}
    before = filters.active_filters(tape.run) if changed else {}
    lines = []
    for verdict in verdicts:
        if verdict.reason is not None:
            lines.append(_Line(verdict.key, by, verdict.reason, _NOW if verdict.key in changed else _ALREADY))
        elif verdict.key in changed:
            lines.append(_Line(verdict.key, by, before[verdict.key][by], _TAKEN_BACK))
    unjudged = Counter(verdict.unjudged for verdict in verdicts if verdict.unjudged is not None)
    return _Filtering(lines, statements, len(verdicts) - unjudged.total(), unjudged)


def _undo(tape: OpenedRun, rows: Sequence[RolloutRow], by: str | None) -> _Filtering:
    known = {event.by for event in tape.run.remarks(EventKind.FILTER) if event.by is not None}
    if by is not None and by not in known:
        there_are = ", ".join(sorted(known)) or "none"
        raise UsageError(f"--by {by}: no filters of this rule in run {tape.run.name}; rules: {there_are}")
    statements = filters.undone(tape.run, rows, by)
    taken = {(one.rollout, one.try_index) for one in statements}
    lines = [line for line in _current(tape, rows, _TAKEN_BACK) if line.key in taken and by in (None, line.by)]
    return _Filtering(lines, statements, len(rows), otherwise="nothing to undo")


def _current(tape: OpenedRun, rows: Sequence[RolloutRow], change: str) -> list[_Line]:
    """The filters in effect."""
    before = filters.active_filters(tape.run)
    return [_Line(row.key, by, why, change) for row in rows for by, why in before.get(row.key, {}).items()]


def _print(found: _Filtering, rows: dict[tuple[str, int], RolloutRow], *, as_json: bool, dry_run: bool) -> None:
    would = "would be " if dry_run else ""
    words = {_NOW: f"{would}filtered", _ALREADY: found.already, _TAKEN_BACK: f"{would}undone"}
    counts = Counter(change for _, change in {(line.key, line.change) for line in found.lines})
    if as_json:
        for key, by, reason, change in found.lines:
            print_json({"rollout": key[0], "try_index": key[1], "by": by, "reason": reason, "change": change})
        figures = {change: counts[change] for change in words}
        print_json({"judged": found.judged, **figures, "unjudged": dict(found.unjudged), "dry_run": dry_run})
        return
    if found.lines:
        _print_table(found.lines, rows)
    parts = [f"{counts[change]:,} {what}" for change, what in words.items() if counts[change]]
    print_line(f"{plural(found.judged, 'rollout')}: {', '.join(parts) or found.otherwise}")
    for why, times in found.unjudged.most_common():
        note(f"{plural(times, 'rollout')} not judged: {why}")


def _print_table(lines: Sequence[_Line], rows: dict[tuple[str, int], RolloutRow]) -> None:
    rollouts: Counter[tuple[str, str]] = Counter()
    sampled: Counter[tuple[str, str]] = Counter()
    for key, by, reason, change in lines:
        kind = (by or "", f"undone: {reason}" if change == _TAKEN_BACK else reason)
        rollouts[kind] += 1
        sampled[kind] += rows[key].sampled_tokens
    shown = [
        [by, count(times), count(sampled[by, reason]), reason]
        for (by, reason), times in rollouts.most_common(_SHOWN_REASONS)
    ]
    columns = ["by", "rollouts", "sampled", "reason"]
    print_table(columns, shown, left=["by", "reason"], flexible=["by", "reason"], spare=["sampled"])
    print_rest(len(rollouts) - _SHOWN_REASONS, "reason")

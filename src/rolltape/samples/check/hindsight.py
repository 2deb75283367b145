"""What the tape held when a trainer took a group: without the attempts, filters and grades that came later."""

import contextlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from rolltape.errors import PolicyError
from rolltape.records.policy import CutPolicy
from rolltape.records.rollout import Event, EventKind, Outcome, Rollout, RolloutHead
from rolltape.samples.check.findings import TokenFinding
from rolltape.samples.check.records import TokenRule
from rolltape.tape.run import RolloutRow, Run

BY_LATER_EVENTS = (TokenRule.OUTCOME, TokenRule.REWARD, TokenRule.ADVANTAGE, TokenRule.MISSING)
_GIVEN = "given"  # a `GroupState`


class PastRow(NamedTuple):
    """A rollout without its turns, as it was at some time."""

    head: RolloutHead
    outcome: Outcome


def taken_at(run: Run, groups: Iterable[str], written_at_ns: int) -> dict[str, int]:
    """When each group was given to its trainer, or `written_at_ns` if no event before that time records it."""
    times = dict.fromkeys(groups, written_at_ns)
    for event in run.tape_index.events(EventKind.GROUP):
        group = event.data.get("group")
        if event.data.get("state") == _GIVEN and group in times and event.at_ns <= written_at_ns:
            times[group] = event.at_ns  # the latest counts: events come in order
    return times


def given_policies(run: Run) -> list[CutPolicy]:
    """The cut policies by which groups were cut that a trainer was given, apart from the presets."""
    found: dict[CutPolicy, None] = {}
    for event in run.tape_index.events(EventKind.GROUP):
        # A policy with choices that this version does not know cannot be applied.
        with contextlib.suppress(msgspec.ValidationError, PolicyError):
            if "policy" in event.data:
                found[msgspec.convert(event.data["policy"], CutPolicy)] = None
    return list(found)


def had_ended(row: RolloutRow, at_ns: int) -> bool:
    """Whether a try had ended by a time."""
    return row.ended_at_ns is not None and row.ended_at_ns <= at_ns


def rollout_at(rollout: Rollout, at_ns: int, *, is_trained: bool) -> Rollout:
    """A rollout without the filters and grades that came after a time.

    If it was trained, its first grade always counts: the trainer may have graded it.
    """
    graded = [event for event in rollout.events if _is(event, EventKind.SCORE)]
    filtered = [event for event in rollout.events if _is(event, EventKind.FILTER)]
    changes = [*graded[1 if is_trained else 0 :], *filtered]
    later = {event.order for event in changes if event.at_ns > at_ns}
    if not later:
        return rollout
    kept = [event for event in rollout.events if event.order not in later]
    return Rollout(rollout.head, rollout.sessions, kept, rollout.writer_alive)


def split_later(
    findings: Sequence[TokenFinding], then: Sequence[TokenFinding]
) -> tuple[list[TokenFinding], list[TokenFinding]]:
    """Return the findings that held when the step was trained, and as notes those that later events caused."""
    held_then = {(one.rule, one.record, one.sample) for one in then}
    faults, notes = [], []
    for one in findings:
        if one.rule not in BY_LATER_EVENTS or (one.rule, one.record, one.sample) in held_then:
            faults.append(one)
        else:
            notes.append(
                msgspec.structs.replace(
                    one,
                    what=f"{one.what}, since a filter, a grade or an attempt that came after the step",
                    advice="nothing to do: when the trainer took the sample, it was as in the record",
                )
            )
    return faults, notes


def _is(event: Event, kind: EventKind) -> bool:
    return event.kind == kind and event.turn is None

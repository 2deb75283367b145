"""Filters: rules that keep rollouts out of training after they were collected, as events on the tape.

verdicts = no_spread(run.index())
tape.append_events(changes(run, verdicts, by=NO_SPREAD))

Rules judge finished rollouts, by the try that counts. The latest event about a rollout counts. When a rule removes its
filter, the filters of other rules are appended again, so that they stay in force.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rolltape.collect.functions import PREFIX, describe_raised, function_named
from rolltape.errors import FilterError
from rolltape.records.jsonable import plain_scalar, shown
from rolltape.records.policy import Advantage
from rolltape.records.rollout import EventKind, Rollout, Status
from rolltape.renamed import renamed
from rolltape.samples import counted_tries, group_advantages
from rolltape.samples.claims import Staleness
from rolltape.tape.journal.entries import NewEvent
from rolltape.tape.recording.fields import as_text
from rolltape.tape.run import RolloutRow, Run
from rolltape.tape.stored import Key

__all__ = [
    "NO_SPREAD",
    "STALE",
    "Verdict",
    "active_filters",
    "changes",
    "no_spread",
    "reject_named",
    "rejected",
    "stale",
    "undone",
]

# The names of rules on the tape.
NO_SPREAD = "no-spread"
STALE = "stale"

Reject = Callable[[Rollout], object]  # a reason, or True; False or None: it may train
Reasons = dict[str | None, str]  # by rule, the latest last


class Verdict(NamedTuple):
    """A rule's verdict on one try of a rollout."""

    rollout: str
    try_index: int
    reason: str | None = None  # why it is kept out of training, or None if this rule lets it train
    unjudged: str | None = None  # why the rule cannot decide; its filter then does not change

    @property
    def key(self) -> Key:
        return (self.rollout, self.try_index)


def no_spread(rows: Iterable[RolloutRow]) -> Iterator[Verdict]:
    """Reject groups whose rewards are all the same: every advantage in them is 0.

    A group without rewards may train. A group in which a rollout still runs is not judged yet.
    """
    groups: dict[str, list[RolloutRow]] = {}
    for row in counted_tries(rows):
        groups.setdefault(row.head.group, []).append(row)
    for members in groups.values():
        running = any(row.outcome.status is Status.RUNNING for row in members)
        reason = None if running else _describe_sameness([row.outcome.reward for row in members])
        for row in _finished(members):
            yield Verdict(*row.key, reason, unjudged="its group has rollouts that still run" if running else None)


def stale(rows: Iterable[RolloutRow], versions: Sequence[str], limit: int) -> Iterator[Verdict]:
    """Reject rollouts sampled by weights more than `limit` versions behind the newest; `versions` is the run's order.

    A rollout is as old as the oldest version of its replies. A rollout whose replies have no version is not judged.
    """
    staleness = Staleness(versions)
    too_old = f"more than {limit} version{'' if limit == 1 else 's'} behind the newest"
    for row in _finished(counted_tries(rows)):
        ages = {version: age for version in row.versions if (age := staleness.of(version)) is not None}
        if not ages:
            yield Verdict(*row.key, unjudged="its replies name no weight version")
            continue
        oldest = max(ages, key=ages.__getitem__)
        yield Verdict(*row.key, f"sampled by weights {oldest}, {too_old}" if ages[oldest] > limit else None)


def reject_named(text: str) -> tuple[str, Reject]:
    """The function that "python:module:function" names, and the name of its rule on the tape."""
    by = text if text.startswith(PREFIX) else f"{PREFIX}{text}"
    return by, function_named(text)


def rejected(run: Run, rows: Iterable[RolloutRow], function: Reject, by: str) -> Iterator[Verdict]:
    """Reject rollouts by a function. They are loaded one at a time; `by` names the function in reasons and errors.

    A rollout whose turns were pruned is not judged. An error that the function raises becomes a FilterError.
    """
    with run.snapshot() as held:
        for row in _finished(counted_tries(rows)):
            if "turns" in row.pruned:
                yield Verdict(*row.key, unjudged="its turns were pruned")
                continue
            yield Verdict(*row.key, _ask(function, held.rollout(*row.key), by))


def _finished(rows: Iterable[RolloutRow]) -> Iterator[RolloutRow]:
    return (row for row in rows if row.outcome.status is Status.FINISHED)


def _describe_sameness(rewards: Sequence[float | None]) -> str | None:
    """Describe why a group's rewards have no spread; None if they have, or if there are no rewards."""
    advantages = group_advantages(rewards, Advantage.CENTERED)
    if not any(advantage is not None for advantage in advantages) or any(advantages):
        return None
    counted = [reward for reward in rewards if reward is not None and math.isfinite(reward)]
    if len(counted) == 1:
        return "its group has one reward"
    return f"all {len(counted)} rewards of its group are {counted[0]:.6g}"


def _ask(function: Reject, rollout: Rollout, by: str) -> str | None:
    """The reason for which a function rejects a rollout; None if it does not."""
    try:
        given = function(rollout)
    except Exception as error:
        raise FilterError(
            f"{by}: it raised {describe_raised(error)}, for rollout {rollout.id}; nothing was filtered"
        ) from error
    if isinstance(given, str) and given.strip():
        return as_text(given, by)
    plain = plain_scalar(given)
    if plain is None or plain is False:
        return None
    if plain is True:
        return f"rejected by {by}"
    raise FilterError(
        f"{by}: it gave {shown(given)} for rollout {rollout.id}; give a reason in words or True to reject it, "
        "None or False to keep it; nothing was filtered"
    )


def active_filters(run: Run) -> dict[Key, Reasons]:
    """The filters of a run's rollouts. An event without a reason removes all filters before it."""
    found: dict[Key, Reasons] = {}
    for event in run.remarks(EventKind.FILTER):
        if event.rollout is None or event.try_index is None:
            continue
        key, reason = (event.rollout, event.try_index), event.data.get("reason")
        if reason is None:
            found.pop(key, None)
        else:
            reasons = found.setdefault(key, {})
            reasons.pop(event.by, None)
            reasons[event.by] = reason
    return found


def changes(run: Run, verdicts: Iterable[Verdict], by: str) -> list[NewEvent]:
    """The events that make a rule's filters agree with its verdicts. Filters that already agree need none."""
    judged = list(verdicts)  # collected first, so that a rule that fails in the middle changes nothing
    before = active_filters(run)
    return [one for verdict in judged for one in _change(verdict, before.get(verdict.key, {}), by)]


def undone(run: Run, rows: Iterable[RolloutRow], by: str | None = None) -> list[NewEvent]:
    """The events that remove the filters of all tries of these rollouts: those by one rule, or all."""
    before = active_filters(run)
    found: list[NewEvent] = []
    for row in rows:
        reasons = before.get(row.key, {})
        if by is None and reasons:
            found.append(_filter_event(row.key, None, None))
        elif by in reasons:
            found += _remove(row.key, reasons, by)
    return found


def _change(verdict: Verdict, reasons: Mapping[str | None, str], by: str) -> Iterator[NewEvent]:
    if verdict.unjudged is not None or verdict.reason == reasons.get(by):
        return
    if verdict.reason is None:
        yield from _remove(verdict.key, reasons, by)
    else:
        yield _filter_event(verdict.key, verdict.reason, by)


def _remove(key: Key, reasons: Mapping[str | None, str], by: str | None) -> Iterator[NewEvent]:
    yield _filter_event(key, None, by)
    for other, reason in reasons.items():
        if other != by:
            yield _filter_event(key, reason, other)


def _filter_event(key: Key, reason: str | None, by: str | None) -> NewEvent:
    return NewEvent(EventKind.FILTER, key[0], {"reason": reason}, by, key[1])


__getattr__ = renamed(__name__, {"standing": "active_filters"})

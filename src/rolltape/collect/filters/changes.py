"""Which filters are active in a run, and the events that make a rule's filters what the rule says now.

The latest event about a rollout counts. A rule that removes its filter must not let through what another rule keeps
out, so the filters of the others are then appended again.
"""

from collections.abc import Iterable, Iterator, Mapping

from rolltape.collect.filters.rules import Verdict
from rolltape.records.rollout import EventKind
from rolltape.tape.journal.entries import NewEvent
from rolltape.tape.run import RolloutRow, Run

Key = tuple[str, int]  # rollout and try
Reasons = dict[str | None, str]  # by rule, the latest last


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
    """The events that make the filters by a rule agree with its verdicts. Filters that already agree give none."""
    judged = list(verdicts)  # all of them first: a rule that fails in the middle changes nothing
    before = active_filters(run)
    return [one for verdict in judged for one in _change(verdict, before.get(verdict.key, {}), by)]


def undone(run: Run, rows: Iterable[RolloutRow], by: str | None = None) -> list[NewEvent]:
    """The events that remove the filters of these rollouts, of every try: those by one rule, or all."""
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

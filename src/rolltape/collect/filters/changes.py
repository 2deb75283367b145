"""Which filters stand, and what has to be said on the tape so that those of a rule are what it says now.

The latest word about a rollout counts. A rule that takes its filter back must not let through what another has
kept out, so what the others said is then said again.
"""

from collections.abc import Iterable, Iterator, Mapping

from rolltape.collect.filters.rules import Verdict
from rolltape.records.rollout import EventKind
from rolltape.tape.journal.entries import Statement
from rolltape.tape.run import RolloutRow, Run

Key = tuple[str, int]  # rollout and try
Words = dict[str | None, str]  # by whom a rollout is filtered, and why; the latest last


def standing(run: Run) -> dict[Key, Words]:
    """The filters that stand in a run. A word without a reason takes all before it back."""
    found: dict[Key, Words] = {}
    for event in run.remarks(EventKind.FILTER):
        if event.rollout is None or event.try_index is None:
            continue
        key, reason = (event.rollout, event.try_index), event.data.get("reason")
        if reason is None:
            found.pop(key, None)
        else:
            words = found.setdefault(key, {})
            words.pop(event.by, None)
            words[event.by] = reason
    return found


def changes(run: Run, verdicts: Iterable[Verdict], by: str) -> list[Statement]:
    """What to say so that the filters by this rule are as its verdicts; nothing of what it has said already."""
    judged = list(verdicts)  # all of it first: a rule that fails in the middle changes nothing
    before = standing(run)
    return [one for verdict in judged for one in _changed(verdict, before.get(verdict.key, {}), by)]


def undone(run: Run, rows: Iterable[RolloutRow], by: str | None = None) -> list[Statement]:
    """What to say to take back filters of these rollouts, every try of them: those by one rule, or all."""
    before = standing(run)
    found: list[Statement] = []
    for row in rows:
        words = before.get(row.key, {})
        if by is None and words:
            found.append(_statement(row.key, None, None))
        elif by in words:
            found += _taken_back(row.key, words, by)
    return found


def _changed(verdict: Verdict, words: Mapping[str | None, str], by: str) -> Iterator[Statement]:
    if verdict.unjudged is not None or verdict.reason == words.get(by):
        return
    if verdict.reason is None:
        yield from _taken_back(verdict.key, words, by)
    else:
        yield _statement(verdict.key, verdict.reason, by)


def _taken_back(key: Key, words: Mapping[str | None, str], by: str | None) -> Iterator[Statement]:
    yield _statement(key, None, by)
    for other, reason in words.items():
        if other != by:
            yield _statement(key, reason, other)


def _statement(key: Key, reason: str | None, by: str | None) -> Statement:
    return Statement(EventKind.FILTER, key[0], {"reason": reason}, by, key[1])

"""Late and revised rewards, by rollout id. All of them are checked before the first is recorded."""

import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from rolltape.collect.sources.entries import EntryProblems, SourceEntry
from rolltape.errors import NoSuchRollout, RecordError, RolltapeError
from rolltape.records.ids import parse_turn_id, parse_turn_of
from rolltape.records.jsonable import non_finite, shown
from rolltape.records.rollout import EventKind
from rolltape.samples import counted_tries
from rolltape.tape.journal.entries import NewEvent
from rolltape.tape.recording.fields import as_count, as_text
from rolltape.tape.recording.rollout import score_data
from rolltape.tape.recording.tape import Tape
from rolltape.tape.run import LatestScore, RolloutRow, Run

_NEEDED = ("rollout", "reward")
_FIELDS = (*_NEEDED, "terms", "by", "try", "turn")
_EXAMPLE = '{"rollout": "857bc8a1", "reward": 0.5}'
_SHORT_TURN = re.compile(r"[0-9]+\.[0-9]+")

_Subject = tuple[str, int, str | None]  # rollout, try, and turn or None


class LateReward(NamedTuple):
    """A reward to be recorded, and the one that it replaces."""

    where: str
    row: RolloutRow
    statement: NewEvent
    before: float | None  # None: there was none, or only the one that a turn was recorded with
    is_new: bool  # False: the tape has the same already

    @property
    def reward(self) -> float:
        return float(self.statement.data["reward"])

    @property
    def changes(self) -> bool:
        """Whether it is another number than before. The judge or the terms may be new without that."""
        return self.before is None or not _same(self.before, self.reward)


def late_rewards(
    run: Run, rewards: Iterable[SourceEntry | dict[str, Any]], *, label: str | None = None, by: str | None = None
) -> list[LateReward]:
    """Check rewards for a run: objects with `rollout` (an id, or a prefix of one id only) and `reward`.

    They may have `terms`, `by`, `try` (otherwise the try that counts) and `turn`. The argument `by` is for rewards that
    have no `by`. If one cannot be used, none is, and the error names them all; `label` is the file's name.
    """
    entries = (
        one if isinstance(one, SourceEntry) else SourceEntry(f"reward {at}", one) for at, one in enumerate(rewards)
    )
    rollouts = _RolloutPrefixes(run.index())
    places: dict[_Subject, str] = {}
    found: list[LateReward] = []
    problems = EntryProblems()
    for entry in entries:
        try:
            row, statement = _build_event(entry, rollouts, by)
            subject = (row.id, row.head.try_index, statement.turn)
            if subject in places:
                raise RecordError(f"its reward is given in {places[subject]} already; keep one of them")
        except RolltapeError as error:
            problems.add(entry, error)
            continue
        places[subject] = entry.where
        where = entry.where if label is None else f"{label}, {entry.where}"
        found.append(_compare(where, row, statement, _latest_score(run, row, statement.turn)))
    if problems.count == 1 and label is None:
        raise RecordError(problems.first[0])
    if problems.count:
        raise RecordError(problems.describe(label or "rewards", "no reward was recorded"))
    return found


def record_rewards(tape: Tape, rewards: Iterable[LateReward]) -> None:
    """Record those that are new, all together. If one is for a turn that does not exist, none is recorded."""
    at = ""

    def statements() -> Iterable[NewEvent]:
        nonlocal at
        for one in rewards:
            if one.is_new:
                at = one.where
                yield one.statement

    try:
        tape.append_events(statements())
    except (RecordError, NoSuchRollout) as error:
        raise type(error)(f"{at}: {error}; no reward was recorded") from None


def _build_event(entry: SourceEntry, rollouts: "_RolloutPrefixes", by: str | None) -> tuple[RolloutRow, NewEvent]:
    fields = _parse_fields(entry)
    name, turn = fields["rollout"], fields.get("turn")
    where = f"rollout {name}"
    try_index = as_count(fields["try"], f"{where}: try") if "try" in fields else None
    terms = fields.get("terms")
    if isinstance(terms, Mapping):
        terms = {term: _parse_number(value, f"{where}: reward term {term!r}") for term, value in terms.items()}
    data = score_data(_parse_number(fields["reward"], f"{where}: reward"), terms, where)
    if data is None:
        raise RecordError(f"{where}: its reward is null; give a number, or leave it out")
    is_short = turn is not None and _SHORT_TURN.fullmatch(turn) is not None
    if turn is not None and not is_short and try_index is None:
        try_index = parse_turn_id(turn).try_index
    row = rollouts.find(name, try_index)
    if is_short:
        turn = f"{row.id}.{row.head.try_index}.{turn}"
    if turn is not None:
        turn = parse_turn_of(turn, row.id, row.head.try_index).id
    own_by = as_text(fields.get("by"), f"{where}: by")
    return row, NewEvent(EventKind.SCORE, row.id, data, by if own_by is None else own_by, row.head.try_index, turn)


def _parse_fields(entry: SourceEntry) -> dict[str, Any]:
    if entry.problem is not None:
        raise RecordError(entry.problem)
    fields = entry.value
    if not isinstance(fields, dict):
        raise RecordError(f"this is {shown(fields)}; a reward is an object, such as {_EXAMPLE}")
    fields = {name: value for name, value in fields.items() if value is not None or name in _NEEDED}
    unknown = [name for name in fields if name not in _FIELDS]
    if unknown:
        raise RecordError(f"it has a field {unknown[0]!r}; a reward has {', '.join(_FIELDS)}")
    for name in _NEEDED:
        if name not in fields:
            raise RecordError(f"it has no {name}; a reward is an object, such as {_EXAMPLE}")
    for name in ("rollout", "turn"):
        if not isinstance(fields.get(name, ""), str):
            raise RecordError(f"its {name} is {shown(fields[name])}; give the id, a text")
    return fields


def _parse_number(value: object, where: str) -> object:
    """Decode a number that JSON cannot spell, such as {"$float": "nan"}; leave anything else as it is."""
    if not isinstance(value, dict):
        return value
    try:
        return non_finite(value)
    except (TypeError, ValueError):
        raise RecordError(f'{where} is {shown(value)}; "nan", "inf" and "-inf" are spelled so') from None


class _RolloutPrefixes:
    """Finds rollouts of a run by their ids, or by prefixes of one id only, without a search for each."""

    def __init__(self, rows: Iterable[RolloutRow]) -> None:
        self._rows: dict[str, list[RolloutRow]] = {}
        for row in rows:
            self._rows.setdefault(row.id, []).append(row)
        self._sorted = sorted(self._rows)

    def find(self, prefix: str, try_index: int | None) -> RolloutRow:
        """A try of the rollout; None means the try that counts."""
        tries = self._rows[self._complete(prefix)]
        if try_index is None:
            return counted_tries(tries)[0]
        for row in tries:
            if row.head.try_index == try_index:
                return row
        known = ", ".join(str(row.head.try_index) for row in tries)
        raise RecordError(f"rollout {prefix} has no try {try_index}; it has {known}")

    def _complete(self, prefix: str) -> str:
        if prefix in self._rows:
            return prefix
        first = bisect_left(self._sorted, prefix)
        alike = [one for one in self._sorted[first : first + 2] if prefix and one.startswith(prefix)]
        if not alike:
            raise RecordError(f"the run holds no rollout {prefix!r}; `rolltape ls` lists them")
        if len(alike) > 1:
            raise RecordError(f"{prefix!r} begins several ids, {alike[0]} and {alike[1]}; give more of it")
        return alike[0]


def _latest_score(run: Run, row: RolloutRow, turn: str | None) -> LatestScore | None:
    """The score of a rollout or of one of its turns that counts so far; None: there is none."""
    if turn is None:
        return row.score
    events = run.rollout(*row.key).events
    scores = [event for event in events if event.kind == EventKind.SCORE and event.turn == turn]
    return LatestScore(scores[-1].data["reward"], scores[-1].data.get("terms", {}), scores[-1].by) if scores else None


def _compare(where: str, row: RolloutRow, statement: NewEvent, last: LatestScore | None) -> LateReward:
    is_same = (
        last is not None
        and last.by == statement.by
        and _same(last.reward, statement.data["reward"])
        and _same_terms(last.terms, statement.data["terms"])
    )
    return LateReward(where, row, statement, None if last is None else last.reward, not is_same)


def _same_terms(some: Mapping[str, float], others: Mapping[str, float]) -> bool:
    return some.keys() == others.keys() and all(_same(some[name], others[name]) for name in some)


def _same(some: float, other: float) -> bool:
    return some == other or (math.isnan(some) and math.isnan(other))

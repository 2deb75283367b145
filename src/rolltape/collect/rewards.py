"""Late and revised rewards, by the id of a rollout. All are checked before the first is recorded."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from rolltape.collect.sources.entries import EntryProblems, SourceEntry
from rolltape.errors import AmbiguousId, NoSuchRollout, RecordError, RolltapeError
from rolltape.records.ids import complete_turn_id, is_short_turn, parse_turn_id
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

_Subject = tuple[str, int, str | None]  # rollout, try, and turn or None


class RewardPaths(NamedTuple):
    """Where the objects of another program have the id of a rollout, its reward and its terms.

    A name with dots is a path in objects and lists: `traces.0.reward`. A term is named by its last part. The path of an
    object stands for all numbers in it.
    """

    rollout: str = "rollout"
    reward: str = "reward"
    terms: tuple[str, ...] = ()

    def read(self, given: object) -> object:
        """Read such an object as a reward; other values are returned unchanged."""
        if not isinstance(given, dict):
            return given
        found = {"rollout": _value_at(given, self.rollout), "reward": _value_at(given, self.reward)}
        if isinstance(found["rollout"], int) and not isinstance(found["rollout"], bool):
            found["rollout"] = str(found["rollout"])
        terms: dict[str, object] = {}
        for name in self.terms:
            value = _value_at(given, name)
            own = name.rpartition(".")[2]
            several = _numbers_in(value) if isinstance(value, dict) and "$float" not in value else {own: value}
            if twice := terms.keys() & several.keys():
                raise RecordError(f"{name}: there is a term {min(twice)!r} already; name one of them")
            terms |= several
        return {**found, "terms": terms}


class LateReward(NamedTuple):
    """A reward to be recorded, and the one that it replaces."""

    where: str
    row: RolloutRow
    statement: NewEvent
    before: float | None  # None if there was none, or only the one that a turn was recorded with
    is_new: bool  # False if the tape has the same already

    @property
    def reward(self) -> float:
        return float(self.statement.data["reward"])

    @property
    def changes(self) -> bool:
        """Whether the number differs from before. If not, `by` or the terms may still be new."""
        return self.before is None or not _same(self.before, self.reward)


def late_rewards(
    run: Run,
    rewards: Iterable[SourceEntry | dict[str, Any]],
    *,
    label: str | None = None,
    by: str | None = None,
    fields: RewardPaths | None = None,
    on_unknown: Callable[[str], None] | None = None,
) -> list[LateReward]:
    """Check rewards for a run: objects with `rollout` (any id for `run.rollout`) and `reward`.

    They may have `terms`, `by`, `try` (otherwise the try that counts) and `turn`. `fields` has the paths of the id, the
    reward and the terms in objects of another program. The argument `by` is for rewards without `by`. If one cannot be
    used, none is, and the error names them all; `label` is the file's name. With `on_unknown`, rewards of rollouts that
    are not in the run are left out, and it is called with the place of each.
    """
    places: dict[_Subject, str] = {}
    found: list[LateReward] = []
    problems = EntryProblems()
    with run.snapshot() as held:
        tries = _Tries(held)
        for at, one in enumerate(rewards):
            entry = one if isinstance(one, SourceEntry) else SourceEntry(f"reward {at}", one)
            try:
                row, statement = _build_event(_parse_fields(entry, fields), tries, by)
                subject = (row.id, row.head.try_index, statement.turn)
                if subject in places:
                    raise RecordError(f"its reward is given in {places[subject]} already; keep one of them")
            except RolltapeError as error:
                is_unknown = isinstance(error, NoSuchRollout) and not isinstance(error, AmbiguousId)
                if is_unknown and on_unknown is not None:
                    on_unknown(entry.where)
                else:
                    problems.add(entry, error)
                continue
            places[subject] = entry.where
            where = entry.where if label is None else f"{label}, {entry.where}"
            found.append(_compare(where, row, statement, _latest_score(held, row, statement.turn)))
    if problems.count == 1 and label is None:
        raise RecordError(problems.first[0])
    if problems.count:
        raise RecordError(problems.describe(label or "rewards", "no reward was recorded"))
    return found


def record_rewards(tape: Tape, rewards: Iterable[LateReward]) -> None:
    """Record the new rewards together. If one is for a turn that does not exist, none is recorded."""
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


def _build_event(fields: dict[str, Any], tries: "_Tries", by: str | None) -> tuple[RolloutRow, NewEvent]:
    name, turn = fields["rollout"], fields.get("turn")
    where = f"rollout {name}"
    try_index = as_count(fields["try"], f"{where}: try") if "try" in fields else None
    terms = fields.get("terms")
    if isinstance(terms, Mapping):
        terms = {term: _parse_number(value, f"{where}: reward term {term!r}") for term, value in terms.items()}
    data = score_data(_parse_number(fields["reward"], f"{where}: reward"), terms, where)
    if data is None:
        raise RecordError(f"{where}: its reward is null; give a number, or leave it out")
    if turn is not None and not is_short_turn(turn) and try_index is None:
        try_index = parse_turn_id(turn).try_index
    row = tries.find(name, try_index)
    if turn is not None:
        turn = complete_turn_id(turn, row.id, row.head.try_index)
    own_by = as_text(fields.get("by"), f"{where}: by")
    return row, NewEvent(EventKind.SCORE, row.id, data, by if own_by is None else own_by, row.head.try_index, turn)


def _parse_fields(entry: SourceEntry, names: RewardPaths | None) -> dict[str, Any]:
    if entry.problem is not None:
        raise RecordError(entry.problem)
    fields = entry.value if names is None else names.read(entry.value)
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


def _value_at(given: dict[str, Any], name: str) -> Any:
    """The value under a name, or at the path of a name with dots."""
    value: Any = given
    for part in [name] if name in given else name.split("."):
        try:
            value = value[int(part) if isinstance(value, list) else part]
        except (LookupError, TypeError, ValueError):
            known = ", ".join(map(str, given)) or "none"
            raise RecordError(f"it has no field {name!r}; its fields are {known}") from None
    return value


def _numbers_in(value: dict[str, Any]) -> dict[str, object]:
    return {name: one for name, one in value.items() if isinstance(one, int | float) and not isinstance(one, bool)}


def _parse_number(value: object, where: str) -> object:
    """Decode a number that JSON cannot write, such as {"$float": "nan"}; return other values unchanged."""
    if not isinstance(value, dict):
        return value
    try:
        return non_finite(value)
    except (TypeError, ValueError):
        raise RecordError(f'{where} is {shown(value)}; "nan", "inf" and "-inf" are spelled so') from None


class _Tries:
    """Finds the tries of a run's rollouts, by any of their ids."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._rows = {row.key: row for row in run.index()}

    def find(self, name: str, try_index: int | None) -> RolloutRow:
        """A try of a rollout; None means the one that counts."""
        found = self._run.find(name, try_index)
        return counted_tries(self._rows[found.id, one] for one in found.tries)[0]


def _latest_score(run: Run, row: RolloutRow, turn: str | None) -> LatestScore | None:
    """The current score of a rollout or of one of its turns, or None."""
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

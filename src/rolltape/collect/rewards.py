"""Late rewards, and revised ones, by rollout id. They are all checked before the first is recorded."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rolltape.collect.rollout_ids import RolloutIds
from rolltape.collect.sources.entries import SHOWN_PROBLEMS, Entry, all_told
from rolltape.errors import NoSuchRollout, RecordError, RolltapeError
from rolltape.records.jsonable import non_finite, shown
from rolltape.records.rollout import Event, EventKind
from rolltape.tape.journal.entries import Statement
from rolltape.tape.recording.fields import as_count, as_text
from rolltape.tape.recording.recorder import score_data
from rolltape.tape.recording.tape import Tape
from rolltape.tape.recording.turnplace import turn_of, turn_place
from rolltape.tape.run import RolloutRow, Run

_NEEDED = ("rollout", "reward")
_FIELDS = (*_NEEDED, "terms", "by", "try", "turn")
_EXAMPLE = '{"rollout": "857bc8a1", "reward": 0.5}'
_SHORT_TURN = re.compile(r"[0-9]+\.[0-9]+")

_About = tuple[str, int, str | None]  # rollout, try, and turn or None


class LateReward(NamedTuple):
    """A reward to be recorded, and what it takes the place of."""

    where: str
    row: RolloutRow
    statement: Statement
    before: float | None  # None: there was none, or only the one that a turn was recorded with
    is_new: bool  # False: the tape says the same already

    @property
    def reward(self) -> float:
        return float(self.statement.data["reward"])

    @property
    def changes(self) -> bool:
        """Whether it is another number than before; a judge or terms may be new without that."""
        return self.before is None or not _same(self.before, self.reward)


def late_rewards(
    run: Run, rewards: Iterable[Entry | dict[str, Any]], *, label: str | None = None, by: str | None = None
) -> list[LateReward]:
    """What rewards mean for a run: objects with `rollout` (an id, or a beginning that only one has), `reward`, and if
    wanted `terms`, `by`, `try` (else the one that counts) and `turn`.

    `by` is for those that do not say it. If one cannot be used none is, and the error names them; `label` is the file.
    """
    entries = (one if isinstance(one, Entry) else Entry(f"reward {place}", one) for place, one in enumerate(rewards))
    with run.snapshot() as held:
        ids, said = RolloutIds(held.index()), _latest_scores(held.events())
    places: dict[_About, str] = {}
    found: list[LateReward] = []
    problems: list[str] = []
    count = 0
    for entry in entries:
        try:
            row, statement = _statement(entry, ids, by)
            about = (row.id, row.head.try_index, statement.turn)
            if about in places:
                raise RecordError(f"its reward is given in {places[about]} already; keep one of them")
        except RolltapeError as error:
            count += 1
            if count <= SHOWN_PROBLEMS:
                problems.append(f"{entry.where}: {error}")
            continue
        places[about] = entry.where
        where = entry.where if label is None else f"{label}, {entry.where}"
        found.append(_compared(where, row, statement, said.get(about)))
    if count == 1 and label is None:
        raise RecordError(problems[0])
    if count:
        raise RecordError(all_told(label or "rewards", problems, count, "no reward was recorded"))
    return found


def record_rewards(tape: Tape, rewards: Iterable[LateReward]) -> None:
    """Record those that are new: all of them, or, if one is of a turn that is not there, none."""
    at = ""

    def statements() -> Iterable[Statement]:
        nonlocal at
        for one in rewards:
            if one.is_new:
                at = one.where
                yield one.statement

    try:
        tape.say_all(statements())
    except (RecordError, NoSuchRollout) as error:
        raise type(error)(f"{at}: {error}; no reward was recorded") from None


def _statement(entry: Entry, ids: RolloutIds, by: str | None) -> tuple[RolloutRow, Statement]:
    fields = _fields(entry)
    name, turn = fields["rollout"], fields.get("turn")
    where = f"rollout {name}"
    try_index = as_count(fields["try"], f"{where}: try") if "try" in fields else None
    terms = fields.get("terms")
    if isinstance(terms, Mapping):
        terms = {term: _number(value, f"{where}: reward term {term!r}") for term, value in terms.items()}
    data = score_data(_number(fields["reward"], f"{where}: reward"), terms, where)
    if data is None:
        raise RecordError(f"{where}: its reward is null; give a number, or leave it out")
    is_short = turn is not None and _SHORT_TURN.fullmatch(turn) is not None
    if turn is not None and not is_short and try_index is None:
        try_index = turn_place(turn).try_index
    row = ids.row(name, try_index)
    if is_short:
        turn = f"{row.id}.{row.head.try_index}.{turn}"
    if turn is not None:
        turn = turn_of(turn, row.id, row.head.try_index).id
    said_by = as_text(fields.get("by"), f"{where}: by")
    return row, Statement(EventKind.SCORE, row.id, data, by if said_by is None else said_by, row.head.try_index, turn)


def _fields(entry: Entry) -> dict[str, Any]:
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


def _number(value: object, where: str) -> object:
    """A number that JSON cannot spell, as `--json` spells it; anything else as it is."""
    if not isinstance(value, dict):
        return value
    try:
        return non_finite(value)
    except (TypeError, ValueError):
        raise RecordError(f'{where} is {shown(value)}; "nan", "inf" and "-inf" are spelled so') from None


def _latest_scores(events: Sequence[Event]) -> dict[_About, Event]:
    return {
        (event.rollout, event.try_index, event.turn): event
        for event in events
        if event.kind == EventKind.SCORE and event.rollout is not None and event.try_index is not None
    }


def _compared(where: str, row: RolloutRow, statement: Statement, last: Event | None) -> LateReward:
    before = None if last is None else last.data["reward"]
    is_same = (
        last is not None
        and last.by == statement.by
        and _same(last.data["reward"], statement.data["reward"])
        and _same_terms(last.data.get("terms", {}), statement.data["terms"])
    )
    return LateReward(where, row, statement, before, not is_same)


def _same_terms(some: Mapping[str, float], others: Mapping[str, float]) -> bool:
    return some.keys() == others.keys() and all(_same(some[name], others[name]) for name in some)


def _same(some: float, other: float) -> bool:
    return some == other or (math.isnan(some) and math.isnan(other))

"""The mismatch of trainer and engine in a step: by task and by turn, each with the token of the largest mismatch."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from rolltape.records.ids import last_turn_of, names_sample, parse_turn_id
from rolltape.records.policy import PRESETS
from rolltape.records.sample import Origin, Span
from rolltape.records.token_record import TokenRecord
from rolltape.samples import linearize
from rolltape.tape.run import Run
from rolltape.tape.stored import Key
from rolltape.tokens.files import read_step
from rolltape.tokens.steps import TokenStep, list_steps
from rolltape.view.run.state import TokenPlace

_TASKS_LISTED = 50
_TURNS_LISTED = 200
_MOST_LOADED = 1_000  # rollouts whose turns are examined, the largest mismatch first

Values = npt.NDArray[np.float64]


class SeenRecord(NamedTuple):
    """A record of the trainer: its place, and the mismatch of its trained tokens."""

    key: Key  # of the rollout
    sample: str
    place: str
    values: Values  # per token; NaN if it did not train or has no mismatch

    def at(self, token: int) -> dict[str, Any]:
        return msgspec.structs.asdict(TokenPlace(self.key[0], self.sample, token, self.place))


class MismatchFigures:
    """The mismatch of some tokens: their number, the mean, and the place of the largest."""

    def __init__(self) -> None:
        self.tokens = 0
        self._sum = 0.0
        self.largest = -np.inf
        self._at: dict[str, Any] | None = None
        self._records: set[str] = set()

    def add(self, record: SeenRecord, start: int, stop: int) -> None:
        """Add a range of a record's tokens."""
        values = record.values[start:stop]
        known = np.isfinite(values)
        if not known.any():
            return
        self.tokens += int(known.sum())
        self._sum += float(values[known].sum())
        self._records.add(record.place)
        token = int(np.nanargmax(np.where(known, values, -np.inf)))
        if values[token] > self.largest:
            self.largest, self._at = float(values[token]), record.at(start + token)

    def answer(self) -> dict[str, Any]:
        mean = self._sum / self.tokens if self.tokens else None
        return {
            "records": len(self._records),
            "tokens": self.tokens,
            "mean": mean,
            "max": self.largest if self.tokens else None,
            "at": self._at,
        }


def find_mismatches(run: Run, location: Path, step: int) -> dict[str, Any] | None:
    """The mismatch of a step's trained tokens by task and by turn; None if its records have no mismatch."""
    chosen = next((one for one in list_steps(location) if one.step == step), None)
    if chosen is None:
        return None
    largest: dict[Key, float] = {}
    for record in _records(chosen):
        finite = record.values[np.isfinite(record.values)]
        if len(finite):
            largest[record.key] = max(largest.get(record.key, -np.inf), float(finite.max()))
    if not largest:
        return None
    loaded = set(sorted(largest, key=lambda key: -largest[key])[:_MOST_LOADED])
    names = task_names(run, [key[0] for key in largest])
    tasks: dict[str | None, MismatchFigures] = {}
    turns: dict[int, MismatchFigures] = {}
    spans = _Spans(run)
    for record in _records(chosen):
        task = names.get(record.key[0])
        tasks.setdefault(task, MismatchFigures()).add(record, 0, len(record.values))
        for span in spans.sampled(record) if record.key in loaded else ():
            turns.setdefault(parse_turn_id(span.turn).sequence, MismatchFigures()).add(record, span.start, span.stop)
    by_task = [{"task": task, **one.answer()} for task, one in tasks.items() if one.tokens]
    by_turn = [{"turn": turn, **one.answer()} for turn, one in sorted(turns.items()) if one.tokens]
    by_task.sort(key=lambda one: -float(one["max"]))
    return {
        "tasks": len(by_task),
        "by_task": by_task[:_TASKS_LISTED],
        "by_turn": by_turn[:_TURNS_LISTED],
        "rollouts": len(largest),
        "looked_at": len(loaded),  # rollouts whose turns are counted
    }


def task_names(run: Run, rollouts: Collection[str]) -> dict[str, str | None]:
    wanted = msgspec.json.encode(sorted(set(rollouts))).decode()
    query = "SELECT id, task FROM rollouts WHERE id IN (SELECT value FROM json_each(?))"
    return dict(run.tape_index.ask(lambda connection: connection.execute(query, (wanted,)).fetchall()))


def _records(step: TokenStep) -> Iterator[SeenRecord]:
    for record in read_step(step, columns=("mismatch_kl",)):
        if record.sample is not None and record.mismatch_kl is not None:
            yield SeenRecord(
                parse_turn_id(last_turn_of(record.sample)).key, record.sample, record.place, _trained_values(record)
            )


def _trained_values(record: TokenRecord) -> Values:
    assert record.mismatch_kl is not None
    return np.where(record.trained_mask, record.mismatch_kl.astype(np.float64), np.nan)


class _Spans:
    """The sampled spans of samples, by their turns."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._known: dict[Key, list[tuple[str, Sequence[Span]]]] = {}

    def sampled(self, record: SeenRecord) -> list[Span]:
        """The sampled spans of a record's sample; empty if it is no longer on the tape."""
        if record.key not in self._known:
            self._known[record.key] = self._load(record.key)
        spans = next((spans for name, spans in self._known[record.key] if names_sample(record.sample, name)), ())
        return [span for span in spans if span.origin is Origin.SAMPLED and span.turn]

    def _load(self, key: Key) -> list[tuple[str, Sequence[Span]]]:
        rollout = self._run.tape_index.load(key)
        found: dict[str, Sequence[Span]] = {}
        for policy in PRESETS.values():
            for sample in linearize(rollout, policy).samples():
                found.setdefault(sample.id, sample.spans)
        return list(found.items())

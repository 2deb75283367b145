"""A trainer's token records of a run: figures of its steps, and the records of one sample."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from rolltape.errors import RolltapeError
from rolltape.extras import arrow_errors
from rolltape.records.ids import last_turn_of, names_sample, parse_turn_id
from rolltape.records.sample import Sample
from rolltape.records.token_record import TokenRecord
from rolltape.samples.check.records import CHECKED_COLUMNS
from rolltape.samples.check.step import check_step
from rolltape.tape.run import Run
from rolltape.tokens.files import describe_files, file_sample_ids, read_step
from rolltape.tokens.steps import TokenStep, list_steps
from rolltape.tokens.summary import SUMMARY_COLUMNS, summarize_step
from rolltape.view.run.mismatches import task_names
from rolltape.view.run.state import TokenPlace, TrainerFigures

_FINDINGS_LISTED = 50
_TASKS_LISTED = 20
_FIGURES = ("mismatch_kl", "max_mismatch_kl", "entropy", "masked", "masked_high", "masked_low")


def changed_figures(location: Path, known: Mapping[int, str]) -> Iterator[TrainerFigures]:
    """Yield the figures of steps whose files have changed; for a step in two formats those of the first."""
    seen: set[int] = set()
    for step in list_steps(location):
        mark = ",".join(f"{one.rank}:{one.attempt}:{file.size}" for one in step.ranks for file in one.files)
        if step.step in seen or not step.stable:
            continue
        seen.add(step.step)
        if known.get(step.step) == mark:
            continue
        with contextlib.suppress(*arrow_errors(RolltapeError, OSError, ValueError)):
            figures = summarize_step(step.step, read_step(step, columns=SUMMARY_COLUMNS))
            named = {name: getattr(figures, name) for name in _FIGURES}
            yield TrainerFigures(step.step, mark, named, _largest_mismatch(step))


def _largest_mismatch(step: TokenStep) -> TokenPlace | None:
    """The token of the figure `max_mismatch_kl`: the largest finite value among trained tokens."""
    largest, found = -np.inf, None
    for record in read_step(step, columns=("mismatch_kl",)):
        if record.sample is None or record.mismatch_kl is None:
            continue
        values = np.where(record.trained_mask & np.isfinite(record.mismatch_kl), record.mismatch_kl, -np.inf)
        if len(values) and values.max() > largest:
            largest, at = values.max(), int(values.argmax())
            found = TokenPlace(last_turn_of(record.sample).rsplit(".", 3)[0], record.sample, at, record.place)
    return found


def check_records(run: Run, location: Path, step: int) -> dict[str, Any] | None:
    """Where a step's records and the tape disagree; None if no record names a sample."""
    steps = list_steps(location)
    chosen = next((one for one in steps if one.step == step), None)
    if chosen is None:
        return None
    check = check_step(run, step, read_step(chosen, columns=CHECKED_COLUMNS), files=describe_files(chosen, steps))
    if check.unnamed == check.records:
        return None
    names = task_names(run, [one.rollout for one in check.findings if one.rollout is not None])
    disagreeing = dict.fromkeys((one.record, one.rollout) for one in check.findings if one.rollout is not None)
    by_task = Counter(names.get(rollout) or "" for _, rollout in disagreeing)
    by_turn = Counter(parse_turn_id(one.turn).sequence for one in check.findings if one.turn is not None)
    return {
        "records": check.records,
        "disagreeing": check.disagreeing,
        "unnamed": check.unnamed,
        "rules": dict(Counter(finding.rule.value for finding in check.findings)),
        "by_task": dict(by_task.most_common(_TASKS_LISTED)),  # records that disagree
        "by_turn": [{"turn": turn, "findings": count} for turn, count in sorted(by_turn.items())],
        "findings": [msgspec.to_builtins(finding) for finding in check.findings[:_FINDINGS_LISTED]],
        "unseen": dict(Counter(one.why for one in check.unseen)),
    }


class ExportedSample(NamedTuple):
    """A trainer's record of a sample, of which it has several if it trained on the sample repeatedly."""

    record: TokenRecord
    records: list[tuple[int, str]]  # step and place of each record with the same tokens, in order


class TokenRecords:
    """Finds a trainer's records of a sample."""

    def __init__(self, location: Path) -> None:
        self._location = location
        self._ends: dict[tuple[str, int], set[str]] = {}  # by file and size: the last turns of its samples

    def find(self, sample: Sample, place: str | None = None) -> ExportedSample | None:
        """The record of a sample at a place, or the latest, or None.

        A record with other tokens than the sample is returned only if there is no better one.
        """
        equal: dict[tuple[int, str], TokenRecord] = {}  # a step in two formats has each record twice
        chosen: TokenRecord | None = None
        for step in list_steps(self._location):
            with contextlib.suppress(*arrow_errors(RolltapeError, OSError, ValueError)):
                for record in self._records(step, sample.id):
                    is_equal = np.array_equal(record.ids, sample.ids[: len(record)])
                    if is_equal:
                        equal.setdefault((record.step, record.place), record)
                    if (is_equal or not equal) and place in (None, record.place):
                        chosen = record
        return None if chosen is None else ExportedSample(chosen, list(equal))

    def _records(self, step: TokenStep, sample: str) -> Iterator[TokenRecord]:
        end = last_turn_of(sample)
        for rank in step.ranks:
            if any(end in self._last_turns(step, path) for path in step.paths(rank.rank)):
                for record in read_step(step, rank.rank):
                    if record.sample is not None and names_sample(record.sample, sample):
                        yield record

    def _last_turns(self, step: TokenStep, path: Path) -> set[str]:
        key = (str(path), path.stat().st_size)
        if key not in self._ends:
            samples = file_sample_ids(step.file_format, path)
            self._ends[key] = {last_turn_of(sample) for sample in samples if sample is not None}
        return self._ends[key]

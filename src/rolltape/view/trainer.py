"""What a trainer exported about a run: figures of its steps, and the columns of one sample."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rolltape.errors import RolltapeError
from rolltape.records.token_record import TokenRecord
from rolltape.tokens.join import standouts
from rolltape.tokens.reading import records_of
from rolltape.tokens.steps import Format, TokenStep, steps_of
from rolltape.tokens.summary import SUMMARY_COLUMNS, summarized
from rolltape.view.reports import TokenPlace, TrainerFigures

_FIGURES = ("mismatch_kl", "max_mismatch_kl", "entropy", "masked", "masked_high", "masked_low")


def trainer_news(location: Path, known: Mapping[int, str]) -> Iterator[TrainerFigures]:
    """Figures of the steps whose files have changed since; of a step in two formats those of the first."""
    seen: set[int] = set()
    for step in steps_of(location):
        mark = ",".join(f"{one.rank}:{one.attempt}:{file.size}" for one in step.ranks for file in one.files)
        if step.step in seen or not step.stable:
            continue
        seen.add(step.step)
        if known.get(step.step) == mark:
            continue
        with contextlib.suppress(RolltapeError, OSError, ValueError, pa.ArrowException):
            figures = summarized(step.step, records_of(step, columns=SUMMARY_COLUMNS))
            named = {name: getattr(figures, name) for name in _FIGURES}
            yield TrainerFigures(step.step, mark, named, _largest_mismatch(step))


def _largest_mismatch(step: TokenStep) -> TokenPlace | None:
    joinable = (record for record in records_of(step, columns=("mismatch_kl",)) if record.sample is not None)
    for found in standouts(joinable, "mismatch_kl", 1):
        sample = found.record.sample or ""
        return TokenPlace(sample.partition("@")[0].rsplit(".", 3)[0], sample, found.at)
    return None


class TokenRecords:
    """Finds the record of a sample: that of the latest step which has one."""

    def __init__(self, location: Path) -> None:
        self._location = location
        self._samples: dict[tuple[str, int], list[str | None]] = {}  # by file and size: the samples in it, in order

    def of(self, sample: str) -> TokenRecord | None:
        """The trainer's record of a sample; None: there is none."""
        for step in reversed(steps_of(self._location)):
            with contextlib.suppress(RolltapeError, OSError, ValueError, pa.ArrowException):
                found = self._in_step(step, sample)
                if found is not None:
                    return found
        return None

    def _in_step(self, step: TokenStep, sample: str) -> TokenRecord | None:
        if step.file_format is not Format.PARQUET:
            return next((record for record in records_of(step) if record.sample == sample), None)
        for rank in step.ranks:
            paths = step.paths(rank.rank)
            if any(sample in self._samples_in(path) for path in paths):
                return next((one for one in records_of(step, rank.rank) if one.sample == sample), None)
        return None

    def _samples_in(self, path: Path) -> list[str | None]:
        key = (str(path), path.stat().st_size)
        if key not in self._samples:
            self._samples[key] = pq.read_table(path, columns=["sample"]).column("sample").to_pylist()
        return self._samples[key]

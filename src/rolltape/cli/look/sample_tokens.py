"""Prints samples token by token: in color on a terminal, with marks in a pipe, or as JSON."""

import sys
from collections import Counter
from pathlib import Path

from rolltape.cli.look.measures import Measure, MeasuredTokens, measure_tokens, version_name
from rolltape.cli.look.token_colors import Painter
from rolltape.cli.output.screen import color_system, note, number, plural, print_json, print_line
from rolltape.errors import RecordError, RolltapeError, UsageError
from rolltape.records.rollout import Rollout
from rolltape.records.sample import Fate, Sample
from rolltape.samples import Linearized
from rolltape.samples.spelling import Spellings, show


class TokenPrinter:
    """Prints samples of one run, colored by one measure."""

    def __init__(self, run: str, by: Measure, spellings: Spellings, *, full: bool, as_json: bool) -> None:
        from rolltape.view.trainer import TokenRecords

        self.spellings = spellings
        self._by = by
        self._as_json = as_json
        self._records = None if by.column is None else TokenRecords(Path(run))
        self._painter = Painter(color_system(), full=full)
        self._legend = ""  # the last one printed

    def check(self, made: Linearized) -> None:
        """Raise if no sample of the rollout has the measure."""
        refused: RolltapeError | None = None
        for sample in made.samples() if self._records is not None else ():
            try:
                self._measured(sample)
                return
            except (UsageError, RecordError) as error:
                refused = refused or error
        if refused is not None:
            raise refused

    def print_all(self, made: Linearized) -> None:
        """Print every sample of a rollout; one that lacks the measure is colored by what trains."""
        for sample in made.samples():
            try:
                given = self._measured(sample)
            except (UsageError, RecordError) as error:
                note(str(error))
                given = measure_tokens(sample, Measure.TRAINED, None)
            self._print_title(sample, made)
            self._print(made.rollout, sample, given)
        if not len(made) and not self._as_json:
            print_line("")
            print_line("No samples: nothing in this rollout trains; `rolltape ledger` shows why.")

    def print_one(self, rollout: Rollout, sample: Sample) -> None:
        """Print one sample."""
        self._print(rollout, sample, self._measured(sample))

    def _measured(self, sample: Sample) -> MeasuredTokens:
        found = None if self._records is None else self._records.find(sample)
        return measure_tokens(sample, self._by, None if found is None else found.record)

    def _print_title(self, sample: Sample, made: Linearized) -> None:
        if self._as_json:
            return
        fates: Counter[Fate] = Counter()
        for span in sample.spans:
            if span.fate is not None and span.fate is not Fate.TRAINED:
                fates[span.fate] += span.stop - span.start
        masked = "".join(f", {tokens:,} {fate}" for fate, tokens in fates.items())
        reward = "" if sample.reward is None else f", reward {number(sample.reward)}"
        print_line("")
        print_line(
            f"sample {sample.index} of {sample.siblings} ({made.policy.name}): {plural(len(sample.ids), 'token')}, "
            f"{sample.trained_tokens:,} trained{masked}{reward}",
            style="bold",
        )

    def _print(self, rollout: Rollout, sample: Sample, given: MeasuredTokens) -> None:
        spell = self.spellings.of(next(one for one in rollout.sessions if one.id == sample.session))
        if self._as_json:
            values = {} if given.by is Measure.TRAINED else {given.by.value: _plain(given, sample)}
            print_json({"sample": sample.id, "line": show(sample, spell), **values})
            return
        legend = self._painter.legend(given.by, sample.versions)
        if legend != self._legend:
            sys.stdout.write(f"{legend}\n")
            self._legend = legend
        sys.stdout.writelines(self._painter.tokens(sample, spell, given))
        sys.stdout.write("\n")


def _plain(given: MeasuredTokens, sample: Sample) -> list[float | str | None]:
    """The values for JSON; None where there is none."""
    pairs = zip(given.values.tolist(), given.present.tolist(), strict=True)
    if given.by is Measure.VERSION:
        return [version_name(*sample.versions[int(value)]) if present else None for value, present in pairs]
    return [value if present else None for value, present in pairs]

"""What became of the records that an exporter was given: counted always, said aloud once."""

import logging
import threading
from collections import Counter

import msgspec

log = logging.getLogger("rolltape.tokens")


class ExportReport(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of an exporter so far, and the first problem of each kind.

    At the end `sequences` is the sum of those that were written, dropped, lost, untrained and unsampled.
    """

    sequences: int = 0  # handed over
    records: int = 0  # written
    tokens: int = 0
    files: int = 0
    dropped_records: int = 0  # the queue was full when their micro-batch came
    lost_records: int = 0  # could not be cut, encoded or written
    untrained_sequences: int = 0  # left out, since none of their tokens trains
    unsampled_sequences: int = 0  # left out by sample_fraction
    empty_batches: int = 0  # None, or without a token
    problems: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        return not (self.dropped_records or self.lost_records or self.problems)


class Reporter:
    """Counts from all threads. The first problem of a kind is logged when it comes, the rest at the end."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._problems: dict[str, str] = {}

    def count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def problem(self, kind: str, what: str) -> None:
        """Note what went wrong; each kind is logged once."""
        with self._lock:
            if kind in self._problems:
                return
            self._problems[kind] = what
        log.error("%s: %s; training goes on, further problems of this kind are only counted", self._who, what)

    def report(self) -> ExportReport:
        with self._lock:
            return ExportReport(**self._counts, problems=tuple(self._problems.values()))

    def say_at_close(self) -> ExportReport:
        """The final counts; logged if not everything was written."""
        so_far = self.report()
        accounted = so_far.records + so_far.dropped_records + so_far.lost_records
        accounted += so_far.untrained_sequences + so_far.unsampled_sequences
        self.count(lost_records=so_far.sequences - accounted)  # still queued when time was up, or a thread died
        report = self.report()
        if not report.complete:
            log.error(
                "%s: %d records written, %d dropped because the queue was full, %d lost%s",
                self._who,
                report.records,
                report.dropped_records,
                report.lost_records,
                "".join(f"; {problem}" for problem in report.problems),
            )
        return report

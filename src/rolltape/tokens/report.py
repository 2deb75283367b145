"""Counts what an exporter wrote, dropped and lost, and logs each kind of problem once."""

import logging
import threading
from collections import Counter

import msgspec

log = logging.getLogger("rolltape.tokens")

_FATES = ("records", "dropped_records", "lost_records", "untrained_sequences", "unsampled_sequences")


class ExportReport(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of an exporter so far, and the first problem of each kind.

    After `close`, `sequences` is the sum of records, dropped, lost, untrained and unsampled ones.
    """

    sequences: int = 0  # given to export
    records: int = 0  # written
    tokens: int = 0
    files: int = 0
    dropped_records: int = 0  # the queue was full when their micro-batch came
    lost_records: int = 0  # could not be cut, encoded, written or marked as done
    untrained_sequences: int = 0  # left out, since none of their tokens trains
    unsampled_sequences: int = 0  # left out by sample_fraction
    empty_batches: int = 0  # None, or without a token
    problems: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        return not (self.dropped_records or self.lost_records or self.problems)


class Reporter:
    """Collects counts from all threads. The first problem of a kind is logged at once, the totals at the end."""

    def __init__(self, who: str) -> None:
        self.who = who
        self._closed = False
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._problems: dict[str, str] = {}

    def count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def problem(self, kind: str, what: str) -> None:
        """Record a problem; each kind is logged once."""
        with self._lock:
            if kind in self._problems:
                return
            self._problems[kind] = what
        log.error("%s: %s; training continues, further problems of this kind are only counted", self.who, what)

    def report(self) -> ExportReport:
        """The counts so far. After `close`, queued records count as lost."""
        with self._lock:
            counts = self._counts.copy()
            if self._closed:
                counts["lost_records"] += counts["sequences"] - sum(counts[name] for name in _FATES)
            return ExportReport(**counts, problems=tuple(self._problems.values()))

    def close(self) -> ExportReport:
        """Return the final counts, and log them if not everything was written."""
        self._closed = True
        report = self.report()
        if not report.complete:
            log.error(
                "%s: %d records written, %d dropped because the queue was full, %d lost%s",
                self.who,
                report.records,
                report.dropped_records,
                report.lost_records,
                "".join(f"; {problem}" for problem in report.problems),
            )
        return report

"""What a server knows of one run, kept up by reports."""

from collections.abc import Iterator, Sequence

import numpy as np

from rolltape.records.rollout import EventKind, Status, StopReason
from rolltape.view.reports import (
    Counted,
    Derived,
    Failed,
    Key,
    Looked,
    Place,
    Placed,
    Report,
    Said,
    Spot,
    Started,
    TrainerFigures,
    Wanted,
)
from rolltape.view.rows import (
    ASKED,
    CAUSE_CODE,
    DERIVED,
    FATE_CODE,
    NOT_ASKED,
    NOT_DERIVABLE,
    NOT_DERIVED,
    NOT_INDEXABLE,
    NOT_INDEXED,
    OUTDATED,
    STATUS_CODE,
    Rows,
)

_CHANGES_SUMMARY = (EventKind.FINISH, EventKind.PRUNE, EventKind.DELIVERY)


class RunState:
    """One run. `snapshot` grows with every change."""

    def __init__(self) -> None:
        self.rows = Rows()
        self.snapshot = 0
        self.spots: dict[int, dict[tuple[str, int], Spot]] = {}
        self.early: dict[Key, list[Said]] = {}  # said of rollouts that were not found yet
        self.announced: dict[tuple[int, str], str] = {}  # weight versions, by when and by whom
        self.environments: dict[str | None, tuple[int, str]] = {}  # by source: when a collection said so, and what
        self.trainer: dict[int, TrainerFigures] = {}
        self.alive: frozenset[str] = frozenset()
        self.marks = b""
        self.problems: tuple[str, ...] = ()  # of sources
        self.odd: tuple[str, ...] = ()  # statements that cannot be taken in
        self.incomplete: dict[int, tuple[str, ...]] = {}  # by row: what of that rollout cannot be read
        self.failure: str | None = None  # why the run cannot be looked at now
        self.index_made: str | None = None  # which search index the numbers of rows are of
        self.index_read = 0  # up to which number its rollouts are known here
        self.read_through = False  # everything that was on the tape at some moment has been told
        self.last_activity_ns = 0

    def apply(self, report: Report) -> None:
        """Take note of a report."""
        match report:
            case Started():
                self._start(report)
            case Counted():
                row = self._own_row(report.key, report.writer)
                if row is not None:
                    self.rows.columns.set(row, turns=report.turns, sampled_tokens=report.sampled_tokens)
                    self.rows.set_list(row, "versions", report.versions)
                    self._touch(row)
            case Placed():
                row = self._own_row(report.key, report.writer)
                if row is not None:
                    self._place(row, report.place, in_full=report.in_full)
                    self._touch(row)
            case Said():
                try:
                    self._say(report)
                except (KeyError, TypeError, ValueError, AttributeError) as error:
                    self._doubt(report, error)
            case Derived():
                self._derive(report)
            case TrainerFigures():
                self.trainer[report.step] = report
                self.snapshot += 1
            case Looked():
                self._end_look(report)
            case Failed():
                self.snapshot += self.failure != report.what
                self.failure = report.what

    def _start(self, report: Started) -> None:
        rows, row = self.rows, self.rows.row_of.get(report.key)
        if row is not None:
            is_own = rows.text(row, "writer") == report.writer
            if is_own and report.place.source.startswith("shard/"):
                self._place(row, report.place, in_full=False)
            # The same try recorded by two writers, by mistake: the earlier one counts.
            if is_own or rows.columns.get("started_ns", row) <= report.started_ns:
                return
        else:
            row = rows.add(*report.key)
        rows.columns.set(row, step=report.step, attempt=report.attempt, started_ns=report.started_ns)
        for name in ("group", "source", "task", "environment", "agent", "model", "writer"):
            rows.set_text(row, name, getattr(report, name))
        if report.environment is None and report.source in self.environments:
            rows.set_text(row, "environment", self.environments[report.source][1])
        rows.set_list(row, "head_tags", report.tags)
        rows.set_list(row, "versions", ())
        self._place(row, report.place, in_full=False)
        self._note_time(report.started_ns)
        self._touch(row)
        for said in self.early.pop(report.key, ()):
            self.apply(said)

    def _place(self, row: int, place: Place, *, in_full: bool) -> None:
        source = self.rows.sources.code(place.source)
        if source != self.rows.columns.get("place_source", row):
            self._move(row)
        self.rows.columns.set(
            row,
            place_source=source,
            place_row=place.row,
            session_low=place.sessions[0],
            session_high=place.sessions[1],
            event_low=place.events[0],
            event_high=place.events[1],
            placed=in_full,
        )

    def _move(self, row: int) -> None:
        """What could not be read at the old place, or is just being read there, is to be read at the new one."""
        columns = self.rows.columns
        if columns.get("asked", row) == ASKED:
            columns.set(row, asked=OUTDATED)
        if self.incomplete.pop(row, ()):
            columns.set(row, derived=NOT_DERIVED)
        if columns.get("search_number", row) == NOT_INDEXABLE:
            columns.set(row, search_number=NOT_INDEXED)

    def _say(self, said: Said) -> None:
        self._note_time(said.at_ns)
        if said.key is None:
            self._say_of_run(said)
            return
        row = self.rows.row_of.get(said.key)
        if row is None:
            self.early.setdefault(said.key, []).append(said)
            return
        is_news = said.at_ns > self.rows.columns.get("finish_ns", row)
        if said.spot is not None:
            spots = self.spots.setdefault(row, {})
            is_news = (said.spot.writer, said.spot.sequence) not in spots
            spots[said.spot.writer, said.spot.sequence] = said.spot
        self._decide(row, said)
        if said.kind in _CHANGES_SUMMARY and is_news:
            # An answer that is on its way does not know of it.
            asked = NOT_ASKED if self.rows.columns.get("asked", row) == NOT_ASKED else OUTDATED
            self.rows.columns.set(row, derived=NOT_DERIVED, asked=asked)
        self._touch(row)

    def _doubt(self, said: Said, error: Exception) -> None:
        """A statement that says what no writer of ours would costs that statement alone."""
        about = "the run" if said.key is None else f"rollout {said.key[0]} (try {said.key[1]})"
        problem = f"writer {said.writer}: what it says of {about} ({said.kind}) cannot be read: {error!r}"
        self.odd = tuple(dict.fromkeys((*self.odd, problem)))
        self.snapshot += 1

    def _say_of_run(self, said: Said) -> None:
        if said.kind == EventKind.VERSION:
            self.announced[said.at_ns, said.writer] = str(said.data["version"])
        elif said.kind == EventKind.COLLECT:
            settings = said.data.get("settings", {})
            source, environment = settings.get("source"), settings.get("environment")
            if isinstance(environment, str) and said.at_ns >= self.environments.get(source, (0, ""))[0]:
                self.environments[source] = (said.at_ns, environment)
                columns, texts = self.rows.columns, self.rows.texts
                unnamed = (columns["environment"] == 0) & (columns["source"] == texts["source"].known(source))
                columns["environment"][unnamed] = texts["environment"].code(environment)
        self.snapshot += 1

    def _decide(self, row: int, said: Said) -> None:
        """Let a statement decide, unless a later one of its kind has."""
        columns, rows = self.rows.columns, self.rows
        match said.kind:
            case EventKind.FINISH if said.writer != rows.text(row, "writer"):
                return
            case EventKind.FINISH if said.at_ns >= columns.get("finish_ns", row):
                status = Status(said.data["status"])
                columns.set(row, finish=STATUS_CODE[status], finish_ns=said.at_ns)
                stop = said.data.get("stop_reason")
                rows.set_text(row, "stop_reason", StopReason(stop).value if stop else None)
                rows.set_text(row, "reason", said.data.get("reason"))
            case EventKind.SCORE if said.at_ns >= columns.get("score_ns", row):
                columns.set(row, reward=said.data["reward"], rewarded=True, score_ns=said.at_ns)
            case EventKind.FILTER if said.at_ns >= columns.get("filter_ns", row):
                columns.set(row, filter_ns=said.at_ns)
                rows.set_text(row, "filter", said.data.get("reason"))
            case EventKind.TAG if said.at_ns >= columns.get("tag_ns", row):
                columns.set(row, tag_ns=said.at_ns)
                rows.set_list(row, "tags", tuple(said.data["tags"]))

    def _derive(self, report: Derived) -> None:
        row = self.rows.row_of.get(report.key)
        if row is None:
            return
        columns = self.rows.columns
        is_outdated = columns.get("asked", row) == OUTDATED
        columns.set(row, asked=NOT_ASKED)
        if report.search_number is not None:
            columns.set(row, search_number=report.search_number)
            self.index_read += report.search_number == self.index_read + 1
        if is_outdated:
            return
        if report.problems:
            self.incomplete[row] = report.problems
        elif report.summary is not None:
            self.incomplete.pop(row, None)
        if report.summary is None:
            if columns.get("derived", row) == NOT_DERIVED:
                columns.set(row, derived=NOT_DERIVABLE)
                self._touch(row)
            return
        summary = report.summary
        columns.set(row, derived=DERIVED, branches=summary.branches, samples=summary.samples)
        columns["forks"][row] = 0
        columns["ledger"][row] = 0
        for cause, count in summary.forks.items():
            columns["forks"][row, CAUSE_CODE[cause]] = count
        for fate, tokens in summary.ledger.items():
            columns["ledger"][row, FATE_CODE[fate]] = tokens
        self._touch(row)

    def _end_look(self, report: Looked) -> None:
        before = (self.problems, self.failure, self.read_through, self.alive)
        self.marks = self.marks if report.marks is None else report.marks
        self.problems, self.failure, self.alive = report.problems, None, frozenset(report.alive)
        self.read_through = self.read_through or report.done
        self.snapshot += (self.problems, self.failure, self.read_through, self.alive) != before

    def _own_row(self, key: Key, writer: str) -> int | None:
        row = self.rows.row_of.get(key)
        return None if row is None or self.rows.text(row, "writer") != writer else row

    def _touch(self, row: int) -> None:
        self.snapshot += 1
        self.rows.columns.set(row, changed=self.snapshot)

    def _note_time(self, at_ns: int) -> None:
        self.last_activity_ns = max(self.last_activity_ns, at_ns)

    def all_problems(self) -> list[str]:
        """Everything that cannot be read, the run as a whole first."""
        whole = [] if self.failure is None else [self.failure]
        return [*whole, *self.problems, *self.odd, *(one for several in self.incomplete.values() for one in several)]

    def take_index(self, made: str, indexed: Sequence[tuple[int, Key]] = ()) -> None:
        """Take note of rollouts that the search index holds, as read from it; another index has other numbers."""
        columns, row_of = self.rows.columns, self.rows.row_of
        if made != self.index_made:
            self.index_made, self.index_read = made, 0
            columns["search_number"][:] = NOT_INDEXED
            columns["asked"][:] = NOT_ASKED
        are_known = True  # so far: what is not, is read again the next time
        for number, key in indexed:
            row = row_of.get(key)
            are_known = are_known and row is not None
            if row is not None:
                columns.set(row, search_number=number)
            if are_known:
                self.index_read = max(self.index_read, number)

    def wanted(self, count: int, *, search: bool) -> list[Wanted]:
        """Rollouts that are to be read next, the newest first; they count as asked for."""
        columns = self.rows.columns
        no_summary = columns["derived"] == NOT_DERIVED
        no_search = (columns["search_number"] == NOT_INDEXED) & search
        open_rows = np.flatnonzero(columns["placed"] & (columns["asked"] == NOT_ASKED) & (no_summary | no_search))
        chosen = open_rows[::-1][:count]
        columns["asked"][chosen] = ASKED
        return [
            Wanted(self.rows.key(row), *self.whereabouts(row), bool(no_summary[row]), bool(no_search[row]))
            for row in chosen.tolist()
        ]

    def whereabouts(self, row: int) -> tuple[Place, tuple[Spot, ...]]:
        """Where a rollout lies, and what is said of it elsewhere."""
        columns = self.rows.columns
        place = Place(
            self.rows.sources.values[columns.get("place_source", row)],
            columns.get("place_row", row),
            (columns.get("session_low", row), columns.get("session_high", row)),
            (columns.get("event_low", row), columns.get("event_high", row)),
        )
        return place, tuple(self.spots.get(row, {}).values())

    def is_alive(self, row: int) -> bool:
        """Whether its writer still runs."""
        return self.rows.text(row, "writer") in self.alive

    def changed_since(self, snapshot: int) -> Sequence[str]:
        """The rollouts that changed after a snapshot."""
        return list(dict.fromkeys(self.rows.ids[row] for row in self._changed_rows(snapshot)))

    def _changed_rows(self, snapshot: int) -> Iterator[int]:
        yield from np.flatnonzero(self.rows.columns["changed"] > snapshot).tolist()

"""What a server knows of one run, kept up by reports."""

from collections.abc import Iterator, Sequence

import numpy as np

from rolltape.records.rollout import EventKind, Status, StopReason
from rolltape.view.reports import (
    Counted,
    Derived,
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
    CAUSE_CODE,
    DERIVED,
    FATE_CODE,
    NOT_DERIVABLE,
    NOT_DERIVED,
    STATUS_CODE,
    UNENDED,
    Rows,
)
from rolltape.view.table import Array

_CHANGES_SUMMARY = (EventKind.FINISH, EventKind.PRUNE, EventKind.DELIVERY)
_RUNNING_FATE, _PRUNED, _FILTERED = (FATE_CODE[f"dropped:{why}"] for why in ("running", "pruned", "filtered"))


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
        self.problems = 0
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
                self._say(report)
            case Derived():
                self._derive(report)
            case TrainerFigures():
                self.trainer[report.step] = report
                self.snapshot += 1
            case Looked():
                self._end_look(report)

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
            self._say(said)

    def _place(self, row: int, place: Place, *, in_full: bool) -> None:
        self.rows.columns.set(
            row,
            place_source=self.rows.sources.code(place.source),
            place_row=place.row,
            session_low=place.sessions[0],
            session_high=place.sessions[1],
            event_low=place.events[0],
            event_high=place.events[1],
            placed=in_full,
        )

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
            self.rows.columns.set(row, derived=NOT_DERIVED)
        self._touch(row)

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
        columns.set(row, asked=False)
        if report.search_number is not None:
            columns.set(row, search_number=report.search_number)
        if report.summary is None:
            if columns.get("derived", row) == NOT_DERIVED:
                columns.set(row, derived=NOT_DERIVABLE)
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
        before = (self.problems, self.read_through, self.alive)
        self.marks = self.marks if report.marks is None else report.marks
        self.problems, self.alive = report.problems, frozenset(report.alive)
        self.read_through = self.read_through or report.done
        self.snapshot += (self.problems, self.read_through, self.alive) != before

    def _own_row(self, key: Key, writer: str) -> int | None:
        row = self.rows.row_of.get(key)
        return None if row is None or self.rows.text(row, "writer") != writer else row

    def _touch(self, row: int) -> None:
        self.snapshot += 1
        self.rows.columns.set(row, changed=self.snapshot)

    def _note_time(self, at_ns: int) -> None:
        self.last_activity_ns = max(self.last_activity_ns, at_ns)

    def wanted(self, count: int, *, search: bool) -> list[Wanted]:
        """Rollouts that are to be read next, the newest first; they count as asked for."""
        columns = self.rows.columns
        no_summary = columns["derived"] == NOT_DERIVED
        no_search = (columns["search_number"] < 0) & search
        open_rows = np.flatnonzero(columns["placed"] & ~columns["asked"] & (no_summary | no_search))
        chosen = open_rows[::-1][:count]
        columns["asked"][chosen] = True
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

    def statuses(self) -> Array:
        """The status of each rollout, as a code."""
        columns = self.rows.columns
        writers = self.rows.texts["writer"].values
        unended = np.array([STATUS_CODE[Status.RUNNING if one in self.alive else Status.LOST] for one in writers])
        return np.asarray(np.where(columns["finish"] == UNENDED, unended[columns["writer"]], columns["finish"]))

    def has_reward(self, statuses: Array) -> Array:
        """Whether a rollout has a reward, which may itself be NaN."""
        known: Array = self.rows.columns["rewarded"] & (statuses == STATUS_CODE[Status.FINISHED])
        return known

    def ledgers(self, statuses: Array) -> Array:
        """Tokens of each rollout by fate; none where its summary is still to come."""
        columns = self.rows.columns
        ledgers = columns["ledger"].copy()
        ledgers[columns["derived"] != DERIVED] = 0
        running = statuses == STATUS_CODE[Status.RUNNING]
        ledgers[running] = 0
        ledgers[running, _RUNNING_FATE] = columns["sampled_tokens"][running]
        filtered = (columns["filter"] != 0) & (statuses == STATUS_CODE[Status.FINISHED])
        pruned = ledgers[filtered, _PRUNED]
        totals = ledgers[filtered].sum(axis=1)
        ledgers[filtered] = 0
        ledgers[filtered, _PRUNED] = pruned
        ledgers[filtered, _FILTERED] = totals - pruned
        return ledgers

    def in_order(self) -> Array:
        """The rows in the order of their start; by their ids where they started at the same moment."""
        columns = self.rows.columns
        order = np.argsort(columns["started_ns"], kind="stable")
        started = columns["started_ns"][order]
        if not (started[1:] == started[:-1]).any():
            return order
        return np.lexsort((columns["try_index"], np.array(self.rows.ids, "U"), columns["started_ns"]))

    def versions(self) -> tuple[str, ...]:
        """Weight versions, oldest first: those never announced as they first appear, then as they were announced."""
        codes = self.rows.columns["versions"][self.in_order()]
        _, first = np.unique(codes, return_index=True)
        lists = self.rows.lists["versions"].values
        seen = [version for at in np.sort(first).tolist() for version in lists[codes[at]] or ()]
        announced = [version for _, version in sorted(self.announced.items())]
        return tuple(reversed(dict.fromkeys(reversed([*dict.fromkeys(seen), *announced]))))

    def changed_since(self, snapshot: int) -> Sequence[str]:
        """The rollouts that changed after a snapshot."""
        return list(dict.fromkeys(self.rows.ids[row] for row in self._changed_rows(snapshot)))

    def _changed_rows(self, snapshot: int) -> Iterator[int]:
        yield from np.flatnonzero(self.rows.columns["changed"] > snapshot).tolist()

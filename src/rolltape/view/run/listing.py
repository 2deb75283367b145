"""`Listing`: the table of rollouts, filtered, sorted, and page by page."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from rolltape.errors import NoAnswer
from rolltape.records.rollout import BOOKMARK, Status, outcome_of
from rolltape.records.wording import SHORT_ID
from rolltape.tape.index.queries import ordered_versions
from rolltape.view.answers import parse_number, parse_page, parse_sort, parse_step
from rolltape.view.run.oddities import FLAGS, Oddities
from rolltape.view.run.rows import BEHAVIOR_CODE, CAUSE_CODE, FATE_CODE, STATUS_CODE, STATUSES, Array
from rolltape.view.run.state import RunState
from rolltape.view.run.terms import RewardTerms

_TEXTS = ("stop_reason", "source", "task", "environment", "agent", "model", "group")
_LOST = outcome_of((), writer_alive=False).reason
_RUNNING, _PRUNED, _FILTERED = (FATE_CODE[f"dropped:{why}"] for why in ("running", "pruned", "filtered"))

_TERM = "term."  # prefix of a sort by a reward term

Query = Mapping[str, str]


class Listing:
    """The rows of one state, and columns that are computed once from them."""

    def __init__(self, state: RunState) -> None:
        self.state = state
        self.snapshot = state.snapshot
        columns = state.rows.columns
        self.statuses = columns["status"]
        self.derived: Array = columns["branches"] >= 0
        self.has_reward: Array = columns["scored"] & (self.statuses == STATUS_CODE[Status.FINISHED])
        self.rewards: Array = np.where(self.has_reward, columns["reward"], np.nan)  # NaN without a reward
        self.ledgers = self._ledgers()
        self.causes: Array = columns["forks"]
        # NaN: not known yet.
        self.trained = np.where(self.derived, self.ledgers[:, FATE_CODE["trained"]], np.nan)
        self.forks = np.where(self.derived, self.causes.sum(axis=1), np.nan)
        self.order = self._by_start()
        self.versions = self._order_versions()

    @cached_property
    def oddities(self) -> Oddities:
        return Oddities(self)

    @cached_property
    def terms(self) -> RewardTerms:
        return RewardTerms(self)

    @cached_property
    def _reward_range(self) -> list[float] | None:
        """The least and the largest finite reward of the run, or None."""
        known = self.rewards[np.isfinite(self.rewards)]
        return [float(known.min()), float(known.max())] if len(known) else None

    @cached_property
    def task_keys(self) -> Array:
        """A number for each task of a source; a task without an id is identified by its group."""
        columns = self.state.rows.columns
        task, group, source = (columns[name].astype(np.int64) for name in ("task", "group", "source"))
        return np.where(task != 0, source * len(self.state.rows.texts["task"].values) + task, -group - 1)

    def _ledgers(self) -> Array:
        """Tokens of each rollout by fate; all 0 without a summary."""
        columns = self.state.rows.columns
        ledgers: Array = columns["ledger"].copy()
        running = self.statuses == STATUS_CODE[Status.RUNNING]
        ledgers[running] = 0
        ledgers[running, _RUNNING] = columns["sampled_tokens"][running]
        filtered = (columns["filter"] != 0) & (self.statuses == STATUS_CODE[Status.FINISHED])
        pruned = ledgers[filtered, _PRUNED]
        totals = ledgers[filtered].sum(axis=1)
        ledgers[filtered] = 0
        ledgers[filtered, _PRUNED] = pruned
        ledgers[filtered, _FILTERED] = totals - pruned
        return ledgers

    def _by_start(self) -> Array:
        """The rows in the order of their start times, then of their ids."""
        rows, columns = self.state.rows, self.state.rows.columns
        order = np.argsort(columns["started_ns"], kind="stable")
        started = columns["started_ns"][order]
        if not (started[1:] == started[:-1]).any():
            return order
        return np.lexsort((columns["try_index"], np.array(rows.ids, "U"), columns["started_ns"]))

    def _order_versions(self) -> tuple[str, ...]:
        """Weight versions, oldest first."""
        # Like `Index.versions`, from the rows in memory: at 100,000 rollouts SQLite takes a tenth of a second.
        codes, lists = self.state.rows.columns["versions"][self.order], self.state.rows.lists("versions")
        first = np.full(len(lists), len(codes))
        first[codes[::-1]] = np.arange(len(codes))[::-1]  # reversed, so that the first use is written last
        used = [code for code in np.argsort(first, kind="stable").tolist() if first[code] < len(codes)]
        return ordered_versions([version for code in used for version in lists[code] or ()], self.state.announced)

    def page(self, query: Query, matched: Array) -> dict[str, Any]:
        """A page of the matching rows, in the order of the query."""
        rows = self.sorted(matched, query.get("sort") or "started")
        return {
            "total": len(self.state.rows),
            "matched": len(rows),
            "rows": [self.row(row) for row in rows[parse_page(query)].tolist()],
            "terms": list(self.terms.names),
            "reward_range": self._reward_range,
            "snapshot": self.snapshot,
            "progress": self.progress,
        }

    @property
    def progress(self) -> dict[str, int]:
        """How much of the run is indexed and summarized."""
        return self.state.progress._asdict()

    def matching(self, query: Query, searched: Array | None) -> Array:
        """The rows that match a query; `searched` are the rollouts that a search found, or None without a search."""
        columns, rows = self.state.rows.columns, self.state.rows
        keep = np.ones(len(rows), bool)
        if query.get("status"):
            names = query["status"].split(",")
            keep &= np.isin(self.statuses, [code for code, status in enumerate(STATUSES) if status.value in names])
        for name in _TEXTS:
            if query.get(name):
                keep &= columns[name] == rows.texts[name].known(query[name])
        if query.get("task_like"):
            keep &= self._task_like(query["task_like"])
        if query.get("tag"):
            keep &= self._tagged(query["tag"])
        for name in ("noted", "bookmarked"):
            if query.get(name):
                if query[name] not in ("yes", "no"):
                    raise NoAnswer(f"{name} is {query[name][:40]!r}; give yes or no")
                marked = columns["notes"] > 0 if name == "noted" else self._tagged(BOOKMARK)
                keep &= marked == (query[name] == "yes")
        if query.get("cause"):
            keep &= self._forked_by(query["cause"])
        step = parse_step(query)
        if step is not None:
            keep &= columns["step"] == step
        for name, values in self._bounded.items():
            least, most = parse_number(query, f"min_{name}"), parse_number(query, f"max_{name}")
            # A comparison with NaN is false, so missing and unknown values never match.
            keep &= values() >= least if least is not None else True
            keep &= values() <= most if most is not None else True
        for name in FLAGS:
            if query.get(name):
                keep &= self.oddities.mask(name, query[name])
        if searched is not None:
            having = np.zeros(len(rows), bool)
            having[searched[searched <= len(rows)] - 1] = True  # a rollout's row is its number minus one
            keep &= having
        return np.flatnonzero(keep)

    @cached_property
    def _bounded(self) -> dict[str, Callable[[], Array]]:
        """The columns for which a query may set bounds."""
        columns = self.state.rows.columns
        return {
            "reward": lambda: self.rewards,
            "tokens": lambda: columns["sampled_tokens"],
            "turns": lambda: columns["turns"],
            "forks": lambda: self.forks,
            "tool_errors": lambda: self.oddities.tool_errors,
        }

    def _task_like(self, part: str) -> Array:
        rows, part = self.state.rows, part.casefold()
        return np.array([part in (one or "").casefold() for one in rows.texts["task"].values])[rows.columns["task"]]

    def _forked_by(self, cause: str) -> Array:
        if cause not in CAUSE_CODE:
            raise NoAnswer(f"cause is {cause[:40]!r}; give {', '.join(CAUSE_CODE)}")
        return np.asarray(self.causes[:, CAUSE_CODE[cause]] > 0)

    def _tagged(self, tag: str) -> Array:
        """Rollouts with a tag, of their own or of a turn or token."""
        rows = self.state.rows
        whole, inner = (
            np.array([one is not None and tag in one for one in rows.lists(name)])[rows.columns[name]]
            for name in ("tags", "inner_tags")
        )
        return np.asarray(whole | inner)

    def sorted(self, matched: Array, sort: str) -> Array:
        """Rows in the requested order; those without a value always come last, equals are in the order of start."""
        place = np.empty(len(self.order), np.int64)
        place[self.order] = np.arange(len(self.order))
        by_start = matched[np.argsort(place[matched])]
        terms = [f"{_TERM}{term}" for term in self.terms.names]
        name, down = parse_sort(sort, ("started", *self._numbers, *_TEXTS, *terms))
        if name == "started":
            return by_start[::-1] if down else by_start
        keys = self._keys(name)[by_start].astype(np.float64)
        keys = -keys if down else keys  # NaN sorts last
        return by_start[np.argsort(keys, kind="stable")]

    def _keys(self, name: str) -> Array:
        columns, texts = self.state.rows.columns, self.state.rows.texts
        if name in _TEXTS:
            ranks = texts[name].ranks().astype(np.float64)
            ranks[0] = np.nan
            return ranks[columns[name]]
        if name.startswith(_TERM):
            return self.terms.column(name.removeprefix(_TERM))
        return self._numbers[name]()

    @cached_property
    def _numbers(self) -> dict[str, Callable[[], Array]]:
        """The columns of numbers by which rows can be sorted."""
        columns = self.state.rows.columns
        ended = np.where(columns["ended_ns"] == 0, np.nan, columns["ended_ns"].astype(np.float64))
        sampled = np.where(columns["sampled_tokens"] == 0, np.nan, columns["sampled_tokens"])
        return {
            "reward": lambda: self.rewards,
            "tokens": lambda: columns["sampled_tokens"],
            "trained": lambda: self.trained,
            "trained_share": lambda: self.trained / sampled,
            "forks": lambda: self.forks,
            "tool_errors": lambda: self.oddities.tool_errors,
            "status": lambda: self.statuses,
            "ended": lambda: ended,
            "took": lambda: ended - columns["started_ns"],
            "id": lambda: np.unique(np.array(self.state.rows.ids, "U"), return_inverse=True)[1],
            "turns": lambda: columns["turns"],
            "step": lambda: columns["step"],
            "attempt": lambda: columns["attempt"],
        }

    def name(self, row: int) -> dict[str, Any]:
        """The fields that identify a rollout."""
        rows = self.state.rows
        rollout, try_index = rows.key(row)
        place = {"step": rows.get("step", row), "task": rows.text(row, "task"), "attempt": rows.get("attempt", row)}
        return {
            "rollout": rollout,
            "try": try_index,
            "tries": self._count_tries(row),
            "short": rollout[:SHORT_ID],
            **place,
        }

    def _count_tries(self, row: int) -> int:
        """How many tries a row's rollout has."""
        rows = self.state.rows
        return len(rows.tries(rows.ids[row])) if self._some_has_tries else 1

    @cached_property
    def _some_has_tries(self) -> bool:
        return bool(self.state.rows.columns["try_index"].any())

    def row(self, row: int) -> dict[str, Any]:
        """One rollout as a row of the table."""
        rows, columns = self.state.rows, self.state.rows.columns
        status = STATUSES[self.statuses[row]]
        derived = bool(self.derived[row])
        return {
            "id": rows.ids[row],
            "try": rows.get("try_index", row),
            "tries": self._count_tries(row),
            "short": rows.ids[row][:SHORT_ID],
            "step": rows.get("step", row),
            "source": rows.text(row, "source"),
            "task": rows.text(row, "task"),
            "attempt": rows.get("attempt", row),
            "group": rows.text(row, "group"),
            "environment": rows.text(row, "environment"),
            "agent": rows.text(row, "agent"),
            "model": rows.text(row, "model"),
            "status": status.value,
            "stop_reason": rows.text(row, "stop_reason"),
            "reason": rows.text(row, "reason") or (_LOST if status is Status.LOST else None),
            "reward": float(self.rewards[row]) if self.has_reward[row] else None,
            "terms": self.terms.of(row),
            "tool_results": _known(columns["behavior"][row, BEHAVIOR_CODE["tool_results"]]),
            "tool_errors": _known(columns["behavior"][row, BEHAVIOR_CODE["tool_errors"]]),
            "turns": rows.get("turns", row),
            "sampled_tokens": rows.get("sampled_tokens", row),
            "trained_tokens": int(self.trained[row]) if derived else None,
            "branches": rows.get("branches", row) if derived else None,
            "forks": int(self.forks[row]) if derived else None,
            "tags": list(rows.lists("tags")[rows.get("tags", row)] or ()),
            "inner_tags": list(rows.lists("inner_tags")[rows.get("inner_tags", row)] or ()),
            "notes": rows.get("notes", row),
            "filter": rows.text(row, "filter"),
            "started_ns": rows.get("started_ns", row),
            "ended_ns": rows.get("ended_ns", row) or None,
            "live": status is Status.RUNNING,
            "problems": len(rows.missing.get(row, ())),  # its unreadable parts
        }


def _known(count: int) -> int | None:
    return None if count < 0 else int(count)

"""The table of rollouts: filtered, sorted, and a page of it."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rolltape.errors import NoAnswer
from rolltape.records.rollout import Status, outcome_of
from rolltape.view.answers import count_in, number_in, step_in
from rolltape.view.rows import CAUSE_CODE, DERIVED, FATE_CODE, STATUSES, UNENDED
from rolltape.view.standings import are_rewarded, in_order, ledgers_of, statuses_of, versions_of
from rolltape.view.state import RunState
from rolltape.view.table import Array

MOST_ROWS = 500
SHORT_ID = 8
_NAMED = ("stop_reason", "task", "environment", "agent", "model")
_LOST = outcome_of((), writer_alive=False).reason

_SORTS = (
    "started, ended, reward, turns, tokens, trained, forks, status, step, attempt, "
    "task, group, environment, agent, model, stop_reason"
)

Query = Mapping[str, str]


class Listing:
    """The rows of one state, with what is derived from all columns made once."""

    def __init__(self, state: RunState) -> None:
        self.state = state
        self.snapshot = state.snapshot
        self.statuses = statuses_of(state)
        self.has_reward = are_rewarded(state, self.statuses)
        self.rewards: Array = np.where(self.has_reward, state.rows.columns["reward"], np.nan)  # NaN: it has none
        self.ledgers = ledgers_of(state, self.statuses)
        self.derived: Array = state.rows.columns["derived"] == DERIVED
        self.causes: Array = state.rows.columns["forks"] * self.derived[:, np.newaxis]
        # NaN: not known yet.
        self.trained = np.where(self.derived, self.ledgers[:, FATE_CODE["trained"]], np.nan)
        self.forks = np.where(self.derived, self.causes.sum(axis=1), np.nan)
        self.order = in_order(state)
        self.versions = versions_of(state, self.order)

    def page(self, query: Query, matched: Array) -> dict[str, Any]:
        """A page of the rows that match, as the query sorts them."""
        offset, limit = count_in(query, "offset", 0, 2**31), count_in(query, "limit", 100, MOST_ROWS)
        rows = self.sorted(matched, query.get("sort") or "started")
        return {
            "total": len(self.state.rows),
            "matched": len(rows),
            "rows": [self.row(row) for row in rows[offset : offset + limit].tolist()],
            "snapshot": self.snapshot,
        }

    def matching(self, query: Query, searched: Array | None) -> Array:
        """Which rows match; `searched` are the numbers that a search gave, None where nothing is searched for."""
        columns, rows = self.state.rows.columns, self.state.rows
        keep = np.ones(len(rows), bool)
        if query.get("status"):
            names = query["status"].split(",")
            keep &= np.isin(self.statuses, [code for code, status in enumerate(STATUSES) if status.value in names])
        for name in _NAMED:
            if query.get(name) is not None and query[name] != "":
                keep &= columns[name] == rows.texts[name].known(query[name])
        if query.get("group"):
            keep &= columns["group"] == rows.texts["group"].known(query["group"])
        if query.get("tag"):
            keep &= self._tagged(query["tag"])
        if query.get("cause"):
            keep &= self._forked_by(query["cause"])
        step = step_in(query)
        if step is not None:
            keep &= columns["step"] == step
        for name, values in (("reward", self.rewards), ("tokens", columns["sampled_tokens"]), ("forks", self.forks)):
            least, most = number_in(query, f"min_{name}"), number_in(query, f"max_{name}")
            # A comparison with NaN is false: what has no reward, or is not known yet, is not within bounds.
            keep &= values >= least if least is not None else True
            keep &= values <= most if most is not None else True
        if query.get("filtered"):
            if query["filtered"] not in ("yes", "no"):
                raise NoAnswer(f"filtered is {query['filtered'][:40]!r}; give yes or no")
            keep &= (columns["filter"] != 0) == (query["filtered"] == "yes")
        if searched is not None:
            keep &= np.isin(columns["search_number"], searched) & (columns["search_number"] >= 0)
        return np.flatnonzero(keep)

    def _forked_by(self, cause: str) -> Array:
        if cause not in CAUSE_CODE:
            raise NoAnswer(f"cause is {cause[:40]!r}; give {', '.join(CAUSE_CODE)}")
        return np.asarray(self.causes[:, CAUSE_CODE[cause]] > 0)

    def _tagged(self, tag: str) -> Array:
        columns, lists = self.state.rows.columns, self.state.rows.lists
        said = np.array([one is not None and tag in one for one in lists["tags"].values])
        given = np.array([one is not None and tag in one for one in lists["head_tags"].values])
        # Code 0: nothing was said, and what the rollout began with holds.
        return np.where(columns["tags"] != 0, said[columns["tags"]], given[columns["head_tags"]])

    def sorted(self, matched: Array, sort: str) -> Array:
        """Rows in the order asked for; those without a value come last either way, equals in the order of start."""
        place = np.empty(len(self.order), np.int64)
        place[self.order] = np.arange(len(self.order))
        by_start = matched[np.argsort(place[matched])]
        name, down = sort.removeprefix("-"), sort.startswith("-")
        if name == "started":
            return by_start[::-1] if down else by_start
        keys = self._keys(name)[by_start].astype(np.float64)
        keys = -keys if down else keys  # NaN sorts last
        return by_start[np.argsort(keys, kind="stable")]

    def _keys(self, name: str) -> Array:
        columns, texts = self.state.rows.columns, self.state.rows.texts
        match name:
            case "reward":
                return self.rewards
            case "turns" | "step" | "attempt":
                return columns[name]
            case "tokens":
                return columns["sampled_tokens"]
            case "trained":
                return self.trained
            case "forks":
                return self.forks
            case "ended":
                return np.where(columns["finish_ns"] == 0, np.nan, columns["finish_ns"].astype(np.float64))
            case "status":
                return self.statuses
            case "task" | "agent" | "environment" | "model" | "stop_reason" | "group":
                ranks = texts[name].ranks().astype(np.float64)
                ranks[0] = np.nan
                return ranks[columns[name]]
        raise NoAnswer(f"sort is {name[:40]!r}; give one of {_SORTS}, with a - before it for the largest first")

    def row(self, row: int) -> dict[str, Any]:
        """One rollout as a line of the table."""
        rows, columns = self.state.rows, self.state.rows.columns
        unended = columns.get("finish", row) == UNENDED
        status = STATUSES[self.statuses[row]]
        derived = bool(self.derived[row])
        said = rows.listed(row, "tags")
        return {
            "id": rows.ids[row],
            "try": columns.get("try_index", row),
            "short": rows.ids[row][:SHORT_ID],
            "step": columns.get("step", row),
            "task": rows.text(row, "task"),
            "attempt": columns.get("attempt", row),
            "group": rows.text(row, "group"),
            "environment": rows.text(row, "environment"),
            "agent": rows.text(row, "agent"),
            "model": rows.text(row, "model"),
            "status": status.value,
            "stop_reason": rows.text(row, "stop_reason"),
            "reason": _LOST if status is Status.LOST and unended else rows.text(row, "reason"),
            "reward": float(self.rewards[row]) if self.has_reward[row] else None,
            "turns": columns.get("turns", row),
            "sampled_tokens": columns.get("sampled_tokens", row),
            "trained_tokens": int(self.trained[row]) if derived else None,
            "branches": columns.get("branches", row) if derived else None,
            "forks": int(self.forks[row]) if derived else None,
            "tags": list((rows.listed(row, "head_tags") or ()) if said is None else said),
            "filter": rows.text(row, "filter"),
            "started_ns": columns.get("started_ns", row),
            "ended_ns": columns.get("finish_ns", row) or None,
            "live": status is Status.RUNNING,
            "problems": len(self.state.incomplete.get(row, ())),  # what of it cannot be read
        }

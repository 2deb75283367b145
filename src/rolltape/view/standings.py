"""How the rollouts of a run stand, as columns: what their statements come to together."""

import numpy as np

from rolltape.records.rollout import Status
from rolltape.view.rows import DERIVED, FATE_CODE, STATUS_CODE, UNENDED
from rolltape.view.state import RunState
from rolltape.view.table import Array

_RUNNING, _PRUNED, _FILTERED = (FATE_CODE[f"dropped:{why}"] for why in ("running", "pruned", "filtered"))


def statuses_of(state: RunState) -> Array:
    """The status of each rollout, as a code."""
    columns, writers = state.rows.columns, state.rows.texts["writer"].values
    unended = np.array([STATUS_CODE[Status.RUNNING if one in state.alive else Status.LOST] for one in writers])
    return np.asarray(np.where(columns["finish"] == UNENDED, unended[columns["writer"]], columns["finish"]))


def are_rewarded(state: RunState, statuses: Array) -> Array:
    """Whether a rollout has a reward, which may itself be NaN."""
    return np.asarray(state.rows.columns["rewarded"] & (statuses == STATUS_CODE[Status.FINISHED]))


def ledgers_of(state: RunState, statuses: Array) -> Array:
    """Tokens of each rollout by fate; none where its summary is still to come."""
    columns = state.rows.columns
    ledgers: Array = columns["ledger"].copy()
    ledgers[columns["derived"] != DERIVED] = 0
    running = statuses == STATUS_CODE[Status.RUNNING]
    ledgers[running] = 0
    ledgers[running, _RUNNING] = columns["sampled_tokens"][running]
    filtered = (columns["filter"] != 0) & (statuses == STATUS_CODE[Status.FINISHED])
    pruned = ledgers[filtered, _PRUNED]
    totals = ledgers[filtered].sum(axis=1)
    ledgers[filtered] = 0
    ledgers[filtered, _PRUNED] = pruned
    ledgers[filtered, _FILTERED] = totals - pruned
    return ledgers


def in_order(state: RunState) -> Array:
    """The rows in the order of their start; by their ids where they started at the same moment."""
    columns = state.rows.columns
    order = np.argsort(columns["started_ns"], kind="stable")
    started = columns["started_ns"][order]
    if not (started[1:] == started[:-1]).any():
        return order
    return np.lexsort((columns["try_index"], np.array(state.rows.ids, "U"), columns["started_ns"]))


def versions_of(state: RunState, order: Array) -> tuple[str, ...]:
    """Weight versions, oldest first: those never announced as they first appear, then as they were announced."""
    codes, lists = state.rows.columns["versions"][order], state.rows.lists["versions"].values
    first = np.full(len(lists), len(codes))
    first[codes[::-1]] = np.arange(len(codes))[::-1]  # of each the last that is written, which is the first
    used = [code for code in np.argsort(first, kind="stable").tolist() if first[code] < len(codes)]
    seen = dict.fromkeys(version for code in used for version in lists[code] or ())
    announced = [version for _, version in sorted(state.announced.items())]
    return tuple(reversed(dict.fromkeys(reversed([*seen, *announced]))))

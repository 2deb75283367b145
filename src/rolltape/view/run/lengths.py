"""Lengths, truncations, tool errors, statuses and stop reasons of some rollouts, for charts over steps."""

from typing import Any

import numpy as np

from rolltape.view.run.listing import Listing
from rolltape.view.run.rows import STATUSES, Array

_QUANTILES = (0.1, 0.5, 0.9)
_BINS = 30
# If the largest value is so many times the median, and so much above the least, bins of equal width are useless.
_LONG_TAIL, _WIDE = 8.0, 40


def describe_lengths(listing: Listing, rows: Array) -> dict[str, Any]:
    """The figures of these rollouts. A share consists of a count, and the number of rollouts for which it is known."""
    columns, oddities = listing.state.rows.columns, listing.oddities
    ended = rows[columns["ended_ns"][rows] > 0]
    truncated = oddities.truncated[ended]
    results, errors = oddities.tool_results[ended], oddities.tool_errors[ended]
    return {
        "turns": _quantiles(columns["turns"][ended]),
        "tokens": _quantiles(columns["sampled_tokens"][ended]),
        "truncated": _share(truncated == 1, np.isfinite(truncated)),
        "tool_errors": [int(np.nansum(errors)), int(np.nansum(results))],
        "with_tool_errors": _share(errors > 0, np.isfinite(errors)),
        "statuses": count_statuses(listing, rows),
        "stop_reasons": count_texts(listing, "stop_reason", rows),
    }


@np.errstate(over="ignore", invalid="ignore")
def build_histogram(values: Array, *, long_tailed: bool = False) -> dict[str, Any]:
    """Counts in bins of equal width, or with `long_tailed` of equal ratio if a few values are far larger than most.

    Use `long_tailed` only for counts; the value 0 has its own bin then.
    """
    if not len(values):
        return {"edges": [], "counts": [], "log": False, "quantiles": []}
    values = values.astype(np.float64)
    low, high = float(values.min()), float(values.max())
    bins: Any = 1
    if low < high:
        bins = np.linspace(low, high, _BINS + 1)
        # Rewards may differ only by rounding, or by more than a float can hold: then no edges are between them.
        bins = bins if (np.diff(bins) > 0).all() else np.array([low, high])
    is_tail = high >= _LONG_TAIL * max(float(np.median(values)), 1.0) and high - low >= _WIDE
    is_log = long_tailed and low >= 0 and is_tail
    if is_log:
        least = float(values[values > 0].min())
        whole = np.unique(np.floor(np.geomspace(least, high, _BINS + 1)))  # of counts: an edge is a count
        bins = np.append(whole[:-1], max(high, whole[-1]))
        bins = np.insert(bins, 0, 0.0) if low == 0 else bins
    counts, edges = np.histogram(values, bins=bins)
    quantiles = np.quantile(values, (0.5, 0.9, 0.99)).tolist()
    return {"edges": edges.tolist(), "counts": counts.tolist(), "log": is_log, "quantiles": quantiles}


def count_statuses(listing: Listing, rows: Array | slice) -> dict[str, int]:
    """How many of these rollouts have each status."""
    return _counts([status.value for status in STATUSES], listing.statuses[rows])


def count_texts(listing: Listing, column: str, rows: Array) -> dict[str, int]:
    """How many of these rollouts have each text of a column."""
    return _counts(listing.state.rows.texts[column].values, listing.state.rows.columns[column][rows])


def _quantiles(values: Array) -> list[float]:
    """The mean, then quantiles; empty without values."""
    return [float(values.mean()), *np.quantile(values, _QUANTILES).tolist()] if len(values) else []


def _share(having: Array, known: Array) -> list[int]:
    return [int(having.sum()), int(known.sum())]


def _counts(names: Any, codes: Array) -> dict[str, int]:
    counts = np.bincount(codes.astype(np.int64), minlength=len(names)).tolist()
    return {name: count for name, count in zip(names, counts, strict=True) if count and name is not None}

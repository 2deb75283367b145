"""Add up what several workers say of themselves: the figures of `/status`, and Prometheus metrics."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

_SUMMED = ("sessions", "in_flight")
_TALLIES = ("counts", "unbridged", "ignored_params")
_PER_SECOND = ("turns_per_s", "sampled_tokens_per_s")
_SAME = ("rolltape_paused", "rolltape_engines_up")  # each worker says the same


def add_status(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The status of all workers together; latencies are those of the slowest."""
    whole = dict(parts[0])
    for name in _SUMMED:
        whole[name] = sum(part[name] for part in parts)
    for name in _TALLIES:
        whole[name] = dict(sum((Counter(part[name]) for part in parts), Counter()))
    whole["rates"] = {
        name: (sum if name in _PER_SECOND else max)(part["rates"][name] for part in parts) for name in whole["rates"]
    }
    whole["forks_per_session"] = whole["counts"].get("forks", 0) / max(whole["counts"].get("sessions", 0), 1)
    by_engine = zip(*(part["engines"] for part in parts), strict=True)
    whole["engines"] = [
        {**same[0], "up": any(one["up"] for one in same), "sessions": sum(one["sessions"] for one in same)}
        for same in by_engine
    ]
    whole["workers"] = len(parts)
    return whole


def add_metrics(parts: Sequence[bytes]) -> bytes:
    """The metrics of all workers together, in the order of the first; times of creation are the latest."""
    lines: dict[str, float | None] = {}  # by what comes before the value; None: a comment
    for part in parts:
        for line in part.decode().splitlines():
            if line.startswith("#"):
                lines.setdefault(line)
                continue
            name, _, value = line.rpartition(" ")
            is_same = name.startswith(_SAME) or "_created" in name.partition("{")[0]
            before = lines.get(name) or 0.0
            lines[name] = max(before, float(value)) if is_same else before + float(value)
    return "".join(f"{name}\n" if value is None else f"{name} {value!r}\n" for name, value in lines.items()).encode()

"""The gateway's metrics, for Prometheus and for `rolltape status`."""

import time
from collections import Counter as Tally
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from rolltape.records.turn import Finish, TurnFlag

if TYPE_CHECKING:
    from rolltape.gateway.turn.gateway_turn import GatewayTurn

_WINDOW_S = 60.0
_MOST_IGNORED = 1000
_SAME = ("rolltape_paused", "rolltape_engines_up")  # the same for each worker
_LATENCIES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
# By name: the description and the labels.
_COUNTERS = {
    "turns": ("Turns recorded", "api", "finish"),
    "sampled_tokens": ("Tokens sampled by the model",),
    "prompts": ("Prompts, by how each was made and why it was not bridged", "how", "why"),
    "flagged_turns": ("Turns with a flag", "flag"),
    "deliveries": ("Replies, by whether the client received them in full", "delivery"),
    "stop_endings": ("Turns whose reply ended on a stop id, by whether the engine kept the id", "kept"),
    "forks": ("Turns that depart from the earlier turns of their session",),
    "sessions": ("Sessions opened",),
    "sessions_taken_over": ("Sessions taken over from a gateway that died",),
    "errors": ("Requests refused or failed", "status"),
    "client_retries": ("Requests that a client repeated because it received no reply, or that it marked as retries",),
    "interrupted_replies": ("Replies that were continued after an interruption",),
}


class Metrics:
    """Counts of one gateway."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.began_at = time.time()
        self.tally: Tally[str] = Tally()  # the same counts, as `rolltape status` shows them
        self.unbridged: Tally[str] = Tally()
        self.ignored_params: Tally[str] = Tally()  # turns by parameters that were requested but not applied
        self._recent: deque[tuple[float, int]] = deque()  # when a turn ended, and its sampled tokens
        self._added: deque[float] = deque(maxlen=1024)
        self._counters = {
            name: Counter(f"rolltape_{name}", about, labels, registry=self.registry)
            for name, (about, *labels) in _COUNTERS.items()
        }
        self._added_seconds = Histogram(
            "rolltape_added_seconds",
            "What the gateway adds to a turn, without the engine",
            registry=self.registry,
            buckets=_LATENCIES,
        )

    def gauge(self, name: str, about: str, value: Any) -> None:
        """Add a gauge whose value is read on each request."""
        Gauge(f"rolltape_{name}", about, registry=self.registry).set_function(value)

    def count(self, name: str, *labels: str, shown_as: str | None = None, by: int = 1) -> None:
        """Add to a counter, and to the tally under its name or another."""
        counter = self._counters[name]
        (counter.labels(*labels) if labels else counter).inc(by)
        self.tally[shown_as or name] += by

    def turn(self, turn: "GatewayTurn", *, forked: bool) -> None:
        """Count a recorded turn."""
        now = time.time()
        facts, finish, prompt = turn.recorded.facts, turn.outcome.finish, turn.prompt
        sampled = len(turn.recorded.sampled_ids)
        self.count("turns", turn.request.api, finish.value)
        self.tally[f"finish_{finish.value}"] += 1
        self.tally["auxiliary"] += turn.auxiliary is not None
        self.count("sampled_tokens", by=sampled)
        self.count("prompts", prompt.how, prompt.prefix_miss or "", shown_as=prompt.how)
        if prompt.prefix_miss is not None:
            self.unbridged[prompt.prefix_miss] += 1
        if len(self.ignored_params) < _MOST_IGNORED:  # clients choose these names
            self.ignored_params.update(set(turn.ignored_params))
        for flag in facts.flags:
            self.count("flagged_turns", flag.value, shown_as=flag.value)
        if finish is Finish.STOP:
            kept = "missing" if TurnFlag.MISSING_STOP_ID in facts.flags else "kept"
            self.count("stop_endings", kept, shown_as=f"stop_{kept}")
        self.count("interrupted_replies", shown_as="interrupted", by=len(facts.segments) > 1)
        self.count("forks", by=forked)
        added = max(now - turn.received_at - turn.engine_s, 0.0)
        self._added_seconds.observe(added)
        self._added.append(added)
        self._recent.append((now, sampled))
        self._forget(now)

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - _WINDOW_S:
            self._recent.popleft()

    def rates(self) -> dict[str, float]:
        """Turns and tokens per second in the last minute; median and 99th percentile of time added to a turn."""
        now = time.time()
        self._forget(now)
        span = min(max(now - self.began_at, 1e-9), _WINDOW_S)
        added = sorted(self._added) or [0.0]
        return {
            "turns_per_s": len(self._recent) / span,
            "sampled_tokens_per_s": sum(tokens for _, tokens in self._recent) / span,
            "added_ms_median": 1e3 * added[len(added) // 2],
            "added_ms_p99": 1e3 * added[min(int(len(added) * 0.99), len(added) - 1)],
        }

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        text: bytes = generate_latest(self.registry)
        return text


def add_expositions(parts: Sequence[bytes]) -> bytes:
    """The combined metrics of several workers, in Prometheus' text format."""
    return generate_latest(_Sum(parts))


class _Sum(Collector):
    """The sums over several expositions; creation times are the latest."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        self._parts = parts

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}  # by sample and its labels
        for family in (one for part in self._parts for one in text_string_to_metric_families(part.decode())):
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            known = values.setdefault(family.name, {})
            is_same = family.name in _SAME or family.name.endswith("_created")
            for sample in family.samples:
                key = sample.name, tuple(sample.labels.items())
                before = known.get(key, 0.0)
                known[key] = max(before, sample.value) if is_same else before + sample.value
        for name, family in families.items():
            for (sample_name, labels), value in values[name].items():
                family.add_sample(sample_name, dict(labels), value)
            yield family

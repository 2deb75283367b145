"""The gateway's metrics, for Prometheus and for `rolltape status`."""

import time
from collections import Counter as Tally
from collections import deque
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rolltape.records.turn import Delivery, Finish, Turn, TurnFlag

if TYPE_CHECKING:
    from rolltape.gateway.replies import ReplyOutcome
    from rolltape.gateway.turns import Begun

_WINDOW_S = 60.0
_LATENCIES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class Metrics:
    """Counts of one gateway."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.began_at = time.time()
        self.tally: Tally[str] = Tally()
        self.unbridged: Tally[str] = Tally()
        self._recent: deque[tuple[float, int]] = deque()  # when a turn ended, and its sampled tokens
        self._added: deque[float] = deque(maxlen=1024)
        self.turns = self._counter("turns", "Turns recorded", "api", "finish")
        self.sampled = self._counter("sampled_tokens", "Tokens sampled by the model")
        self.prompts = self._counter("prompts", "Prompts by how they were made, and why not bridged", "how", "why")
        self.flagged = self._counter("flagged_turns", "Turns with something odd about them", "flag")
        self.deliveries = self._counter("deliveries", "What became of replies", "delivery")
        self.stops = self._counter("stop_endings", "Turns that ended by themselves, with their stop id or not", "kept")
        self.forks = self._counter("forks", "Turns that go on beside what their session had")
        self.sessions = self._counter("sessions", "Sessions opened")
        self.errors = self._counter("errors", "Requests refused or failed", "status")
        self.retries = self._counter(
            "client_retries", "Requests that a client made again, having got no reply or saying so"
        )
        self.segments = self._counter("interrupted_replies", "Replies that were continued after an interruption")
        self.added = Histogram(
            "rolltape_added_seconds",
            "What the gateway adds to a turn, without the engine",
            registry=self.registry,
            buckets=_LATENCIES,
        )

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"rolltape_{name}", about, labels, registry=self.registry)

    def gauge(self, name: str, about: str, value: Any) -> None:
        """A figure that is looked up when it is asked for."""
        Gauge(f"rolltape_{name}", about, registry=self.registry).set_function(value)

    def turn(self, begun: "Begun", turn: Turn, outcome: "ReplyOutcome", engine_s: float, *, forked: bool) -> None:
        """Count a turn that was recorded."""
        now = time.time()
        sampled = len(turn.sampled_ids)
        self.turns.labels(begun.ask.api.value, outcome.finish.value).inc()
        self.sampled.inc(sampled)
        bridged = begun.prompt.after is not None
        self.prompts.labels("bridged" if bridged else "rendered", begun.prompt.prefix_miss or "").inc()
        for flag in turn.facts.flags:
            self.flagged.labels(flag.value).inc()
        if outcome.finish is Finish.STOP:
            kept = TurnFlag.MISSING_STOP_ID not in turn.facts.flags
            self.stops.labels("kept" if kept else "missing").inc()
            self.tally["stop_kept" if kept else "stop_missing"] += 1
        if len(turn.facts.segments) > 1:
            self.segments.inc()
        added = max(now - begun.started_at - engine_s, 0.0)
        self.added.observe(added)
        self._added.append(added)
        self._recent.append((now, sampled))
        self._forget(now)
        self.tally["turns"] += 1
        self.tally["sampled_tokens"] += sampled
        self.tally["forks"] += forked
        self.forks.inc(forked)
        self.tally["auxiliary"] += begun.auxiliary is not None
        self.tally["interrupted"] += len(turn.facts.segments) > 1
        self.tally[f"finish_{outcome.finish.value}"] += 1
        self.tally["bridged" if bridged else "rendered"] += 1
        if begun.prompt.prefix_miss is not None:
            self.unbridged[begun.prompt.prefix_miss] += 1
        for flag in turn.facts.flags:
            self.tally[flag.value] += 1

    def delivery(self, delivery: Delivery) -> None:
        self.deliveries.labels(delivery.value).inc()
        self.tally[delivery.value] += 1

    def error(self, status: int) -> None:
        self.errors.labels(str(status)).inc()
        self.tally["errors"] += 1

    def retry(self) -> None:
        self.retries.inc()
        self.tally["retries"] += 1

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - _WINDOW_S:
            self._recent.popleft()

    def rates(self) -> dict[str, float]:
        """Turns and tokens per second over the last minute, and what is added to a turn: the median, and most."""
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
        """In Prometheus' text form."""
        text: bytes = generate_latest(self.registry)
        return text

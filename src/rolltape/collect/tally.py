"""What a collection has come to so far: counts, rewards per task, reasons. Grows with tasks, not with rollouts."""

import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rolltape.collect.attempt import Result
from rolltape.collect.environments.protocol import AGENT
from rolltape.collect.local import Launch
from rolltape.records.rollout import Status


class Rewards:
    """A running mean and spread."""

    def __init__(self) -> None:
        self.count = 0
        self._sum = 0.0
        self._mean = 0.0  # as it runs along, for the squares; rounded anew with each reward
        self._squares = 0.0
        self.least = math.inf
        self.most = -math.inf

    def add(self, reward: float) -> None:
        self.count += 1
        self._sum += reward
        before = reward - self._mean
        self._mean += before / self.count
        self._squares += before * (reward - self._mean)
        self.least, self.most = min(self.least, reward), max(self.most, reward)

    @property
    def mean(self) -> float:
        return self._sum / self.count if self.count else 0.0

    @property
    def spread(self) -> float:
        """The standard deviation."""
        return math.sqrt(self._squares / self.count) if self.count else 0.0


class Tally:
    """Counts of one collection."""

    def __init__(self) -> None:
        self.began_at = time.monotonic()
        self.launch: Launch | None = None
        self.rewards = Rewards()
        self.by_seat: dict[tuple[int, str], tuple[str, Rewards]] = {}  # of a task, by its place: what it is called
        self.attempts = 0
        self.statuses: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.unrewarded = 0
        self.turns = 0
        self.sampled_tokens = 0

    @property
    def ended(self) -> int:
        return sum(self.statuses.values())

    @property
    def failed(self) -> int:
        return self.statuses[Status.FAILED.value]

    @property
    def by_task(self) -> list[tuple[str, Rewards]]:
        """Rewards of each seat of each task, in the order of the source."""
        return [one for _, one in sorted(self.by_seat.items(), key=lambda item: item[0]) if one[1].count]

    def add(self, results: Sequence[Result]) -> None:
        """Count attempts, each with all of its seats."""
        self.attempts += len({(result.place, result.attempt) for result in results})
        for result in results:
            self._count(result)

    def _count(self, result: Result) -> None:
        self.statuses[result.status.value] += 1
        self.turns += result.turns
        self.sampled_tokens += result.sampled_tokens
        if result.status is Status.FAILED:
            self.reasons[f"failed: {result.reason}"] += 1
            return
        self.reasons[result.stop_reason.value if result.stop_reason else "completed"] += 1
        name = result.task if result.seat == AGENT else f"{result.task} ({result.seat})"
        _, rewards = self.by_seat.setdefault((result.place, result.seat), (name, Rewards()))
        if result.reward is None:
            self.unrewarded += 1
        else:
            self.rewards.add(result.reward)
            rewards.add(result.reward)

    def figures(self) -> dict[str, Any]:
        """Where it stands, for a line or a script."""
        took_s = max(time.monotonic() - self.began_at, 1e-9)
        left = 0 if self.launch is None else max(self.launch.attempts - self.launch.done_before - self.attempts, 0)
        return {
            "done": self.ended,
            "failed": self.failed,
            "left": left,
            "mean_reward": self.rewards.mean if self.rewards.count else None,
            "turns": self.turns,
            "sampled_tokens": self.sampled_tokens,
            "tokens_per_s": self.sampled_tokens / took_s,
            "seconds": took_s,
            "seconds_left": took_s / self.attempts * left if self.attempts else None,
        }

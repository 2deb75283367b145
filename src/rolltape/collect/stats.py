"""What a collection has come to so far: counts, rewards per task, reasons. Grows with tasks, not with rollouts."""

import math
import re
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from rolltape.collect.collector import Launch
from rolltape.collect.environments.protocol import AGENT
from rolltape.collect.result import Result
from rolltape.records.rollout import Status

_ID = re.compile(r"\b[0-9a-f]{12,}(\.\d+)*\b")  # of a rollout, a turn, a generation: no two failures share it
_MOST_REASONS, _LONGEST_REASON = 1000, 300  # of them, and characters of one
_OTHER = "other reasons"


class Rewards:
    """A running mean and spread."""

    __slots__ = ("_mean", "_squares", "_sum", "count", "least", "most")  # there is one for every task

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
    def mean(self) -> float | None:
        return self._sum / self.count if self.count else None

    @property
    def spread(self) -> float:
        """The standard deviation."""
        return math.sqrt(self._squares / self.count) if self.count else 0.0


class Endings:
    """Rollouts that ended for the same reason."""

    def __init__(self) -> None:
        self.count = 0
        self.rewards = Rewards()

    def add(self, reward: float | None) -> None:
        self.count += 1
        if reward is not None:
            self.rewards.add(reward)


class Figures(NamedTuple):
    """Where a collection stands. Counts are of attempts: those of a game have several rollouts."""

    done: int  # in this process
    failed: int
    running: int
    left: int  # running or not begun
    total: int
    done_before: int  # by earlier processes, or now by others
    mean_reward: float | None
    turns: int
    sampled_tokens: int
    tokens_per_s: float
    seconds: float
    seconds_left: float | None  # None: too few have ended to go by


class Example(NamedTuple):
    """A rollout to look at. Which one that is does not depend on the order in which they end."""

    reward: float
    place: int
    attempt: int
    rollout: str
    task: str


class Tally:
    """Counts of one collection."""

    def __init__(self) -> None:
        self._began_at = time.monotonic()
        self.launch: Launch | None = None  # None: nothing has begun
        self._by_seat: dict[tuple[int, str], tuple[str, Rewards]] = {}  # of a task, by its place: what it is called
        self.endings: dict[tuple[str, str], Endings] = {}  # by status and reason
        self.rewards = Rewards()
        self.rollouts = 0
        self.attempts = 0
        self.failed = 0  # attempts
        self.unrewarded = 0  # rollouts that have finished
        self.turns = 0
        self.sampled_tokens = 0
        self.fates: Counter[str] = Counter()  # of sampled tokens
        self.worst: Example | None = None
        self.broken: Example | None = None

    def launched(self, launch: Launch) -> None:
        """Begin to count."""
        self.launch = launch
        self._began_at = time.monotonic()

    @property
    def by_task(self) -> list[tuple[str, Rewards]]:
        """Rewards of each seat of each task, in the order of the source."""
        return [one for _, one in sorted(self._by_seat.items(), key=lambda item: item[0])]

    def add(self, results: Sequence[Result]) -> None:
        """Count attempts, each with all of its seats; of those that had ended before, the rewards alone."""
        now = [result for result in results if not result.before]
        self.attempts += len({(result.place, result.attempt) for result in now})
        self.failed += len({(one.place, one.attempt) for one in now if one.status is Status.FAILED})
        for result in results:
            self._count(result)

    def _count(self, result: Result) -> None:
        if not result.before:
            self.rollouts += 1
            self.turns += result.turns
            self.sampled_tokens += result.sampled_tokens
            self.fates.update(result.fates or {})
            self.unrewarded += result.status is Status.FINISHED and result.reward is None
            self._ending(result).add(result.reward)
        if result.status is Status.FAILED:
            self.broken = _first(self.broken, _example(result, 0.0))
        elif result.reward is not None:
            self._reward(result, result.reward)

    def _reward(self, result: Result, reward: float) -> None:
        _, rewards = self._by_seat.setdefault((result.place, result.seat), (_name(result), Rewards()))
        rewards.add(reward)
        self.rewards.add(reward)
        self.worst = _first(self.worst, _example(result, reward))

    def _ending(self, result: Result) -> Endings:
        said = [None if result.stop_reason is None else result.stop_reason.value, result.reason]
        reason = _ID.sub("…", ", ".join(one for one in said if one))[:_LONGEST_REASON]
        key = (result.status.value, reason)
        if key not in self.endings and len(self.endings) >= _MOST_REASONS:
            key = (result.status.value, _OTHER)
        return self.endings.setdefault(key, Endings())

    def figures(self, running: int = 0) -> Figures:
        """Where it stands, for a line or a script."""
        took_s = max(time.monotonic() - self._began_at, 1e-9)
        launch = self.launch or Launch(0, 0, 0, 0)
        before = launch.done_before + launch.running_elsewhere
        left = max(launch.attempts - before - self.attempts, 0)
        return Figures(
            done=self.attempts - self.failed,
            failed=self.failed,
            running=running,
            left=left,
            total=launch.attempts,
            done_before=before,
            mean_reward=self.rewards.mean,
            turns=self.turns,
            sampled_tokens=self.sampled_tokens,
            tokens_per_s=self.sampled_tokens / took_s,
            seconds=took_s,
            seconds_left=took_s / self.attempts * left if self.attempts and self.attempts >= running else None,
        )


def _name(result: Result) -> str:
    return result.task if result.seat == AGENT else f"{result.task} ({result.seat})"


def _example(result: Result, reward: float) -> Example:
    return Example(reward, result.place, result.attempt, result.rollout, _name(result))


def _first(one: Example | None, other: Example) -> Example:
    return other if one is None else min(one, other)

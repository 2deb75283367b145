"""Statistics of a running collection: counts, rewards per task, reasons. Their size grows with tasks, not rollouts."""

import math
import re
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from rolltape.collect.collector import Launch
from rolltape.collect.environments.protocol import AGENT
from rolltape.collect.results import RolloutResult, Usage
from rolltape.records.rollout import Status

_ID = re.compile(r"\b[0-9a-f]{12,}(\.\d+)*\b")  # of a rollout, a turn, a generation: different in every failure
_MAX_REASONS, _MAX_REASON_LENGTH = 1000, 300
_OTHER = "other reasons"


class RewardStats:
    """A running mean, standard deviation and range."""

    __slots__ = ("_mean", "_squares", "_sum", "count", "least", "most", "not_finite")  # one per task

    def __init__(self) -> None:
        self.count = 0
        self.not_finite = 0
        self._sum = 0.0
        self._mean = 0.0  # for the squares; it is rounded with each reward
        self._squares = 0.0
        self.least = math.inf
        self.most = -math.inf

    def add(self, reward: float) -> None:
        """Add a reward. One that is not finite is only counted, since it would spoil the mean."""
        if not math.isfinite(reward):
            self.not_finite += 1
            return
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


class EndingStats:
    """Rollouts that ended for the same reason."""

    def __init__(self) -> None:
        self.count = 0
        self.rewards = RewardStats()

    def add(self, reward: float | None) -> None:
        self.count += 1
        if reward is not None:
            self.rewards.add(reward)


class Figures(NamedTuple):
    """The progress of a collection. Counts are of attempts; an attempt at a game has several rollouts."""

    done: int  # in this process
    failed: int
    running: int
    left: int  # running or not begun
    total: int
    done_before: int  # by earlier processes, or by other current ones
    mean_reward: float | None
    turns: int
    sampled_tokens: int
    tokens_per_s: float
    seconds: float
    seconds_left: float | None  # None if too few have ended for an estimate


class ExampleRollout(NamedTuple):
    """An example rollout. The choice does not depend on the order in which rollouts end."""

    reward: float
    task_index: int
    attempt: int
    rollout: str
    task: str


class CollectionStats:
    """Counts the results of a collection."""

    def __init__(self) -> None:
        self._began_at = time.monotonic()
        self.launch: Launch | None = None  # None before the launch
        self._by_seat: dict[tuple[int, str], tuple[str, RewardStats]] = {}  # by task index and seat, with its name
        self.endings: dict[tuple[str, str], EndingStats] = {}  # by status and reason
        self.rewards = RewardStats()
        self.rollouts = 0
        self.attempts = 0
        self.failed = 0  # attempts
        self.unrewarded = 0  # rollouts that have finished
        self.ungraded = 0  # of these, those whose reward could not be computed, including earlier ones
        self.turns = 0
        self.sampled_tokens = 0
        self.usage = Usage()
        self.fates: Counter[str] = Counter()  # of sampled tokens
        self.worst: ExampleRollout | None = None
        self.broken: ExampleRollout | None = None

    def launched(self, launch: Launch) -> None:
        """Start the clock."""
        self.launch = launch
        self._began_at = time.monotonic()

    @property
    def by_task(self) -> list[tuple[str, RewardStats]]:
        """Rewards of each seat of each task, in the order of the source."""
        return [one for _, one in sorted(self._by_seat.items(), key=lambda item: item[0])]

    def add(self, results: Sequence[RolloutResult]) -> None:
        """Count attempts, each with all its seats. For attempts that ended before, only the rewards count."""
        now = [result for result in results if not result.before]
        self.attempts += len({(result.task_index, result.attempt) for result in now})
        self.failed += len({(one.task_index, one.attempt) for one in now if one.status is Status.FAILED})
        for result in results:
            self._count(result)

    def _count(self, result: RolloutResult) -> None:
        self.ungraded += result.is_ungraded
        if not result.before:
            self.rollouts += 1
            self.turns += result.turns
            self.sampled_tokens += result.sampled_tokens
            self.usage += result.usage
            self.fates.update(result.fates or {})
            self.unrewarded += result.status is Status.FINISHED and result.reward is None
            self._ending(result).add(result.reward)
        if result.status is Status.FAILED:
            self.broken = _first(self.broken, _example(result, 0.0))
        elif result.reward is not None:
            self._count_reward(result, result.reward)

    def _count_reward(self, result: RolloutResult, reward: float) -> None:
        _, rewards = self._by_seat.setdefault((result.task_index, result.seat), (_name(result), RewardStats()))
        rewards.add(reward)
        self.rewards.add(reward)
        if not math.isnan(reward):
            self.worst = _first(self.worst, _example(result, reward))

    def _ending(self, result: RolloutResult) -> EndingStats:
        parts = [None if result.stop_reason is None else result.stop_reason.value, result.reason]
        reason = _ID.sub("…", ", ".join(part for part in parts if part))[:_MAX_REASON_LENGTH]
        key = (result.status.value, reason)
        if key not in self.endings and len(self.endings) >= _MAX_REASONS:
            key = (result.status.value, _OTHER)
        return self.endings.setdefault(key, EndingStats())

    def figures(self, running: int = 0) -> Figures:
        """The progress so far, for a line or a script."""
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


def _name(result: RolloutResult) -> str:
    return result.task if result.seat == AGENT else f"{result.task} ({result.seat})"


def _example(result: RolloutResult, reward: float) -> ExampleRollout:
    return ExampleRollout(reward, result.task_index, result.attempt, result.rollout, _name(result))


def _first(one: ExampleRollout | None, other: ExampleRollout) -> ExampleRollout:
    return other if one is None else min(one, other)

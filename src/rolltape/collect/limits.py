"""Limits at which a collection begins no more work: its spending, and the number of groups that is enough."""

import math
import time
from collections.abc import Iterable, Sequence

from rolltape.collect.plan import RolloutIdentity, seat_agent
from rolltape.collect.results import RolloutResult, Usage, task_label, usage_of
from rolltape.collect.settings import CollectSettings
from rolltape.records.rollout import Status
from rolltape.records.wording import plural
from rolltape.tape.run import Run

_Group = tuple[str, str | None]  # task and agent


class SpendingLimit:
    """Counts what a collection has spent of its limits. Tokens and cost include earlier processes; time does not."""

    def __init__(self, settings: CollectSettings, earlier: Usage) -> None:
        self._settings = settings
        self._spent = earlier
        self._began = time.monotonic()

    def add(self, usages: Sequence[Usage]) -> None:
        """Count the usage of ended rollouts."""
        self._spent = sum(usages, self._spent)

    def explain(self) -> str | None:
        """Why no more attempts may begin, or None."""
        spent, tokens, cost = self._spent, self._settings.max_sampled_tokens, self._settings.max_cost
        if tokens is not None and spent.sampled_tokens >= tokens:
            return f"{spent.sampled_tokens:,} tokens were sampled, and --max-sampled-tokens is {tokens:,}"
        limit_s = self._settings.max_time_s
        if limit_s is not None and time.monotonic() - self._began >= limit_s:
            return f"{limit_s:g} s have passed, which is --max-time"
        if cost is None:
            return None
        if spent.cost is None:
            return "--max-cost is set, and the endpoint does not report what a turn costs; give --price-in, --price-out"
        return f"the cost is {spent.cost:.6g}, and --max-cost is {cost:g}" if spent.cost >= cost else None


def load_usage(run: Run, source: str, settings: CollectSettings) -> Usage:
    """The usage of all tries of a source's rollouts at a step. Turns are read only if tokens or cost are limited."""
    if settings.max_sampled_tokens is None and settings.max_cost is None:
        return Usage()
    with run.snapshot() as held:
        keys = [row.key for row in held.index() if (row.step, row.source) == (settings.step, source)]
        return sum((usage_of(one.turns, settings) for one in held.load_each(keys)), Usage())


class EnoughGroups:
    """Counts the groups whose attempts have all ended with rewards that differ."""

    def __init__(self, settings: CollectSettings, identity: RolloutIdentity) -> None:
        self._wanted = settings.enough_groups
        self._size = settings.group_size
        self._agent = identity.agent
        self._rewards: dict[_Group, dict[int, float | None]] = {}  # by attempt; None without a reward
        self._counted: set[_Group] = set()

    def add_earlier(self, run: Run, source: str, step: int) -> None:
        """Add what earlier processes finished."""
        for row in run.index() if self._wanted is not None else ():
            if (row.step, row.source, row.status) == (step, source, Status.FINISHED):
                self._add((task_label(row), row.agent), row.attempt, row.reward)

    def add(self, results: Iterable[RolloutResult]) -> None:
        """Add results that are final."""
        for one in results:
            self._add((one.task, seat_agent(self._agent, one.seat)), one.attempt, one.reward)

    def explain(self) -> str | None:
        """Why no more tasks may begin, or None while there are not enough groups."""
        count = len(self._counted)
        if self._wanted is None or count < self._wanted:
            return None
        return f"rewards differ in {plural(count, 'group')}, and --enough-groups is {self._wanted:,}"

    def _add(self, group: _Group, attempt: int, reward: float | None) -> None:
        rewards = self._rewards.setdefault(group, {})
        rewards[attempt] = reward
        finite = {one for one in rewards.values() if one is not None and math.isfinite(one)}  # others have no advantage
        if len(rewards) >= self._size and len(finite) > 1:
            self._counted.add(group)

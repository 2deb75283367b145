"""Counts groups whose rewards differ, for a collection that is to end once there are enough to train on."""

from collections.abc import Iterable

from rolltape.collect.plan import RolloutIdentity, seat_agent
from rolltape.collect.results import RolloutResult
from rolltape.collect.settings import CollectSettings
from rolltape.records.rollout import Status
from rolltape.tape.run import Run

_Group = tuple[str, str | None]  # task and agent


class EnoughGroups:
    """The groups of a collection whose attempts have all ended, and what they were rewarded with."""

    def __init__(self, settings: CollectSettings, identity: RolloutIdentity) -> None:
        self._wanted = settings.enough_groups
        self._size = settings.group_size
        self._agent = identity.agent
        self._rewards: dict[_Group, dict[int, float | None]] = {}  # by attempt; None: it has none
        self._counted: set[_Group] = set()

    def add_earlier(self, run: Run, source: str, step: int) -> None:
        """Add what earlier processes finished."""
        for row in run.index():
            if (row.step, row.source, row.status) == (step, source, Status.FINISHED):
                self._add((row.task_id or row.group[:8], row.agent), row.attempt, row.reward)

    def add(self, results: Iterable[RolloutResult]) -> None:
        """Add results that are final."""
        for one in results:
            self._add((one.task, seat_agent(self._agent, one.seat)), one.attempt, one.reward)

    def explain(self) -> str | None:
        """Why no more tasks are to begin; None: there are not enough groups yet."""
        count = len(self._counted)
        if self._wanted is None or count < self._wanted:
            return None
        groups = "1 group" if count == 1 else f"{count:,} groups"
        return f"rewards differ in {groups}, and --enough-groups is {self._wanted:,}"

    def _add(self, group: _Group, attempt: int, reward: float | None) -> None:
        rewards = self._rewards.setdefault(group, {})
        rewards[attempt] = reward
        if len(rewards) >= self._size and len({one for one in rewards.values() if one is not None}) > 1:
            self._counted.add(group)

"""The groups of a run as the index has them: which attempts have begun and ended, and what is known of their size."""

import math
import time
from collections.abc import Callable, Iterable

from rolltape.groups.collectors import Collectors, Part
from rolltape.records.rollout import Event, EventKind, Status
from rolltape.samples.credit import counted_tries
from rolltape.tape.run import RolloutRow
from rolltape.tape.stored import Key

GROUP_EVENTS = (EventKind.GROUP, EventKind.COLLECT, EventKind.COLLECTED)


class Gathered:
    """A group that is not settled yet."""

    def __init__(self, first: RolloutRow) -> None:
        self.id = first.group
        self.step = first.step
        self.source = first.source
        self.task_id = first.task_id
        self.last_sign_s = 0.0  # when it was last seen that an attempt began or ended, or got its reward
        self.last_ns = first.started_at_ns  # when something last happened in it
        self._tries: dict[Key, RolloutRow] = {}

    @property
    def part(self) -> Part:
        """The collection that it is of."""
        return Part(self.step, self.source)

    def add(self, row: RolloutRow) -> None:
        """Take in a try that has begun, or changed."""
        before = self._tries.get(row.key)
        self._tries[row.key] = row
        self.last_ns = max(self.last_ns, row.started_at_ns, row.ended_at_ns or 0, row.scored_at_ns or 0)
        if before is None or (before.outcome.status, before.scored_at_ns) != (row.outcome.status, row.scored_at_ns):
            self.last_sign_s = time.monotonic()

    def attempts(self) -> list[RolloutRow]:
        """Its rollouts by attempt; of each the try that counts."""
        return sorted(counted_tries(self._tries.values()), key=lambda row: row.attempt)


def is_finished(row: RolloutRow) -> bool:
    """Whether a rollout has an outcome."""
    return row.outcome.status is Status.FINISHED


def is_rewarded(row: RolloutRow) -> bool:
    """Whether a rollout has a reward that advantages can be computed from."""
    return row.outcome.reward is not None and math.isfinite(row.outcome.reward)


class Gathering:
    """All groups of a run that are not settled, by what changes in the index."""

    def __init__(self, on_group_event: Callable[[Event], None], is_writing: Callable[[str], bool]) -> None:
        self.groups: dict[str, Gathered] = {}
        self.settled: set[str] = set()
        self.collectors = Collectors(is_writing)
        self._on_group_event = on_group_event

    def add(self, rows: Iterable[RolloutRow], events: Iterable[Event]) -> None:
        """Take in rollouts that are new or have changed, and events of GROUP_EVENTS."""
        for event in events:
            match event.kind:
                case EventKind.GROUP:
                    self._on_group_event(event)
                case EventKind.COLLECT:
                    self.collectors.began(event)
                case EventKind.COLLECTED:
                    self.collectors.ended(event)
        for row in rows:
            if row.group not in self.settled:
                if row.group not in self.groups:
                    self.groups[row.group] = Gathered(row)
                self.groups[row.group].add(row)

    def settle(self, group: str) -> None:
        """Let go of a group: it is done with, or skipped."""
        self.settled.add(group)
        self.groups.pop(group, None)

    def unsettled(self, step: int | None = None, source: str | None = None) -> list[Gathered]:
        """The groups of a step and a source, or of all: by step, then by when something last happened in them."""
        wanted = [one for one in self.groups.values() if step in (None, one.step) and source in (None, one.source)]
        return sorted(wanted, key=lambda group: (group.step, group.last_ns, group.id))

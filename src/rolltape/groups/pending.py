"""A pending group of a run with its attempts, and the collections that groups belong to, read from the index."""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from rolltape.records.rollout import Event, Status
from rolltape.samples.credit import counted_tries
from rolltape.tape.run import RolloutRow
from rolltape.tape.stored import Key

EventOrder = tuple[int, str, int]  # of events: time, writer, sequence


class CollectionKey(NamedTuple):
    """What one collection collects: one step of one source of tasks."""

    step: int
    source: str | None


class Collections:
    """The collections of a run: which are running, have ended, or were broken off. Other writers may resume one."""

    def __init__(self, is_writing: Callable[[str], bool]) -> None:
        """`is_writing` returns whether the process of a writer is alive."""
        self._is_writing = is_writing
        self._sizes: dict[CollectionKey, int] = {}
        self._begun: dict[CollectionKey, dict[str, EventOrder]] = {}  # by writer: the last time
        self._ended: dict[CollectionKey, dict[str, EventOrder]] = {}

    def add_begin(self, event: Event) -> None:
        """Add an event that a collection has begun, or was resumed."""
        settings: dict[str, Any] = event.data["settings"]
        key = _parse_key(settings)
        # A resumed collection may have larger groups, never smaller ones.
        self._sizes[key] = max(settings["group_size"], self._sizes.get(key, 0))
        _keep_latest(self._begun.setdefault(key, {}), event)

    def add_end(self, event: Event) -> None:
        """Add an event that a collection has ended."""
        _keep_latest(self._ended.setdefault(_parse_key(event.data), {}), event)

    def group_size(self, key: CollectionKey) -> int | None:
        """How many attempts the groups of a collection have, or None if there is no such collection."""
        return self._sizes.get(key)

    def is_over(self, key: CollectionKey) -> bool:
        """Whether a collection has ended, and was not resumed since: it starts no more rollouts."""
        begun, ended = self._begun.get(key, {}), self._ended.get(key, {})
        return bool(ended) and max(ended.values()) > max(begun.values(), default=(0, "", 0))

    def is_step_over(self, step: int, source: str | None) -> bool:
        """Whether there are collections of a step, of one source or of any, and all of them have ended."""
        keys = self._select(step, source)
        return bool(keys) and all(map(self.is_over, keys))

    def broken_off(self, step: int | None, source: str | None) -> dict[CollectionKey, str]:
        """Collections whose writers all died before the end, each with its last writer. Empty while any is running.

        Without a step, only the collection that began last counts: earlier ones were abandoned.
        """
        keys = self._select(step, source)
        if any(map(self._is_running, keys)):
            return {}
        if step is None:
            keys = sorted(keys, key=lambda key: max(self._begun[key].values()))[-1:]
        return {key: max(begun := self._begun[key], key=begun.__getitem__) for key in keys if not self.is_over(key)}

    def _select(self, step: int | None, source: str | None) -> list[CollectionKey]:
        return [key for key in self._begun if step in (None, key.step) and source in (None, key.source)]

    def _is_running(self, key: CollectionKey) -> bool:
        begun, ended = self._begun.get(key, {}), self._ended.get(key, {})
        return any(
            self._is_writing(writer) for writer, order in begun.items() if writer not in ended or ended[writer] < order
        )


def _parse_key(data: dict[str, Any]) -> CollectionKey:
    return CollectionKey(data["step"], data["source"])


def _keep_latest(orders: dict[str, EventOrder], event: Event) -> None:
    orders[event.writer] = max(event.order, orders.get(event.writer, event.order))


class PendingGroup:
    """A group that a consumer has neither marked as done nor skipped."""

    def __init__(self, first: RolloutRow) -> None:
        self.id = first.group
        self.step = first.step
        self.source = first.source
        self.task_id = first.task_id
        self.last_change_s = 0.0  # when an attempt was last seen to begin, end, or get its reward
        self.last_ns = first.started_at_ns  # when something last happened in it
        self._tries: dict[Key, RolloutRow] = {}

    @property
    def collection(self) -> CollectionKey:
        """The collection that it belongs to."""
        return CollectionKey(self.step, self.source)

    def add(self, row: RolloutRow) -> None:
        """Add a try that has begun, or changed."""
        before = self._tries.get(row.key)
        self._tries[row.key] = row
        self.last_ns = max(self.last_ns, row.started_at_ns, row.ended_at_ns or 0, row.scored_at_ns or 0)
        if before is None or (before.outcome.status, before.scored_at_ns) != (row.outcome.status, row.scored_at_ns):
            self.last_change_s = time.monotonic()

    def attempts(self) -> list[RolloutRow]:
        """Its rollouts by attempt, each as the try that counts."""
        return sorted(counted_tries(self._tries.values()), key=lambda row: row.attempt)


def is_finished(row: RolloutRow) -> bool:
    """Whether a rollout has an outcome."""
    return row.outcome.status is Status.FINISHED


def is_rewarded(row: RolloutRow) -> bool:
    """Whether a rollout has a reward that advantages can be computed from."""
    return row.outcome.reward is not None and math.isfinite(row.outcome.reward)

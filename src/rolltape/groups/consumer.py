"""A consumer of a run's groups: what it was given, is done with or skipped, as the tape has it and as it goes on."""

import os
import threading
import weakref
from collections.abc import Sequence

from rolltape.groups.claim import Claim
from rolltape.groups.gathering import GROUP_EVENTS, Gathered, Gathering
from rolltape.records.group import GroupState
from rolltape.records.rollout import Event, EventKind, Rollout
from rolltape.tape.recording.tape import Tape
from rolltape.tape.run import RolloutRow


class Consumer:
    """Where one consumer stands. Threads may share it: all streams and rooms of a tape that name it do."""

    def __init__(self, tape: Tape, name: str) -> None:
        self.name = name
        self.claim = Claim(tape.directory, name)
        self.lock = threading.RLock()
        self.index = tape.run().tape_index
        self.gathering = Gathering(self._heard, lambda writer: writer in self.index.writers())
        self._revision = -1  # of the index, up to which it was read
        self.held: set[str] = set()  # given here, and neither done nor given back
        self._writer = tape.writer
        self._given_before: set[str] = set()  # to an earlier process, which has not said that it was done with it

    def look(self) -> bool:
        """Take in what is new on the run; whether anything was."""
        with self.lock:
            self.index.advance()
            with self.index.moment():
                rows = self.index.rows(since_revision=self._revision)
                events = self.index.events(*GROUP_EVENTS, since_revision=self._revision)
                self._revision = self.index.revision()
            self.gathering.add(rows, events)
            return bool(rows or events)

    def say(self, tape: Tape, group: Gathered, state: GroupState, reason: str | None = None) -> None:
        """Write down what becomes of a group."""
        self.claim.check()
        data = {"group": group.id, "step": group.step, "consumer": self.name, "state": state.value}
        tape.append_run_event(EventKind.GROUP, data if reason is None else {**data, "reason": reason})
        with self.lock:
            if state is GroupState.GIVEN:
                self.held.add(group.id)
            else:
                self._settle(group.id)

    def was_given_before(self, group: str) -> bool:
        """Whether an earlier process was given it, and has not said that it was done with it."""
        return group in self._given_before

    def rollouts(self, rows: Sequence[RolloutRow]) -> list[Rollout]:
        """Rollouts that have ended, with their turns."""
        return [self.index.load(row.key) for row in rows]

    def _heard(self, event: Event) -> None:
        if event.data.get("consumer") != self.name:
            return
        group, state = event.data["group"], event.data["state"]
        if state in (GroupState.DONE, GroupState.SKIPPED):
            self._settle(group)
        elif event.writer != self._writer and group not in self.gathering.settled:
            self._given_before.add(group)

    def _settle(self, group: str) -> None:
        self.gathering.settle(group)
        self.held.discard(group)
        self._given_before.discard(group)


_Consumers = weakref.WeakKeyDictionary[Tape, dict[str, Consumer]]
_consumers: _Consumers = weakref.WeakKeyDictionary()
_lock = threading.Lock()
# What was opened before a fork must not be carried across it, not even to close it: a child keeps it unused.
_parents: list[_Consumers] = []


def consumer_of(tape: Tape, name: str) -> Consumer:
    """The consumer of that name: one for each tape, so that what one stream has read the next need not read again."""
    with _lock:
        consumers = _consumers.setdefault(tape, {})
        if name not in consumers:
            consumers[name] = Consumer(tape, name)
        return consumers[name]


def _after_fork() -> None:
    global _consumers, _lock
    _parents.append(_consumers)
    _consumers, _lock = weakref.WeakKeyDictionary(), threading.Lock()


os.register_at_fork(after_in_child=_after_fork)

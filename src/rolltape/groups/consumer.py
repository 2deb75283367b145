"""`Consumer`: one named consumer of a run's groups, and the claim that limits its name to one process."""

import contextlib
import enum
import fcntl
import os
import re
import threading
import time
import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from rolltape.errors import GroupsError, TapeWriteError
from rolltape.forking import call_in_child
from rolltape.groups.pending import Collections, EventOrder, PendingGroup
from rolltape.records.policy import PRESETS, CutPolicy
from rolltape.records.rollout import Event, EventKind
from rolltape.tape.recording.tape import Tape
from rolltape.tape.run import RolloutRow
from rolltape.tape.rundir import RunDirectory, make_private_folder, private_opener

_EVENTS = (EventKind.GROUP, EventKind.COLLECT, EventKind.COLLECTED)
_MOMENT_S = 0.05
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class GroupState(enum.StrEnum):
    """What a consumer did with a group. One that is done or skipped is not given again."""

    GIVEN = "given"
    DONE = "done"
    SKIPPED = "skipped"
    REWOUND = "rewound"  # back to the marks that were valid at `to`, the order of an event


class ConsumerClaim:
    """The claim to a consumer's name: one process of a machine at a time takes groups under it.

    It is a lock on a file in the run's folder, held from the first `take` to the last `release`. A forked child does
    not inherit it: otherwise it would outlive its holder.
    """

    def __init__(self, directory: RunDirectory, consumer: str) -> None:
        if not isinstance(consumer, str) or not _NAME.fullmatch(consumer):
            raise GroupsError(f"consumer is {consumer!r}; give a name of letters, digits, dots and dashes")
        self._run = directory.name
        self._consumer = consumer
        self._path = directory.path / "consumers" / f"{consumer}.lock"
        self._lock = threading.Lock()
        self._takers = 0
        self._descriptor = -1
        self._pid = os.getpid()
        call_in_child(self, ConsumerClaim._leave_to_parent)

    def check(self) -> None:
        """Raise GroupsError in a forked child: the name belongs to its parent."""
        if self._pid != os.getpid():
            raise GroupsError(
                f"run {self._run}: process {self._pid} takes groups as consumer {self._consumer!r}, this is its child "
                f"{os.getpid()}; let one process take them and hand them on, or take another name here"
            )

    def _leave_to_parent(self) -> None:
        """In a forked child: close the parent's lock, which stays locked there."""
        self._lock = threading.Lock()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def is_taken(self) -> bool:
        """Whether some process has claimed the name now."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            return not _try_lock(descriptor, fcntl.LOCK_SH)
        finally:
            os.close(descriptor)

    def take(self) -> None:
        """Claim the name. Raises GroupsError if another process has it."""
        with self._lock:
            if not self._takers:
                self._descriptor = self._lock_file()
            self._takers += 1

    def release(self) -> None:
        """Release the name, unless another stream of this process has it."""
        with self._lock:
            self._takers -= 1
            if not self._takers and self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def _lock_file(self) -> int:
        try:
            make_private_folder(self._path.parent)
            descriptor = private_opener(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        except OSError as error:
            raise TapeWriteError(f"{self._path}: cannot be written: {error}") from error
        if not _try_lock(descriptor, fcntl.LOCK_EX):
            time.sleep(_MOMENT_S)  # `is_taken` of another process holds it for a moment
            if not _try_lock(descriptor, fcntl.LOCK_EX):
                holder = os.pread(descriptor, 20, 0).decode(errors="replace")
                os.close(descriptor)
                raise GroupsError(self._describe_holder(holder))
        with contextlib.suppress(OSError):  # a full disk: the name is claimed anyway
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        return descriptor

    def _describe_holder(self, holder: str) -> str:
        if holder == str(os.getpid()):
            who, what = "a stream of this process, on another opening of the tape, takes", "close() it"
        else:
            who, what = f"another process ({holder or 'not known'}) takes", "end it"
        return (
            f"run {self._run}: {who} groups as consumer {self._consumer!r} now; {what}, take another name, or let one "
            "process take them and hand them on"
        )


def _try_lock(descriptor: int, kind: int) -> bool:
    """Lock an open file, and return whether that was possible."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class SettledMark(NamedTuple):
    """An event that a group is done or skipped, and the mark before it. All marks before it were valid with it."""

    order: EventOrder
    group: str
    before: "SettledMark | None"


class Consumer:
    """One consumer of a run's groups: which it was given, is done with, or skipped.

    Threads may share it. All streams and limits of a tape with the same name share one.
    """

    def __init__(self, tape: Tape, name: str) -> None:
        self.name = name
        self.claim = ConsumerClaim(tape.directory, name)
        self.lock = threading.RLock()
        self.index = tape.run().tape_index
        self.collections = Collections(lambda writer: writer in self.index.writers())
        self.groups: dict[str, PendingGroup] = {}  # those that it is neither done with nor has skipped
        self._settled: set[str] = set()  # the others
        self._index_made, self._revision = 0, -1  # the index that was read, and up to which revision
        self.held: set[str] = set()  # given in this process, and neither done nor given back
        self._writer = tape.writer
        self._given_before: set[str] = set()  # to an earlier process that did not mark them as done
        self._marks: list[SettledMark] = []  # all that were read, also those that were rewound
        self._last_mark: SettledMark | None = None  # it, and those before it, are valid

    def refresh(self) -> bool:
        """Read what is new in the run's index, and return whether anything was."""
        with self.lock:
            self.index.advance()
            with self.index.moment():
                made, revision = self.index.revision()
                if made != self._index_made:
                    self._forget()
                rows = self.index.rows(since_revision=self._revision)
                events = self.index.events(*_EVENTS, since_revision=self._revision)
                self._index_made, self._revision = made, revision
            if any(self._is_rewind(event) for event in events) and self._marks:
                self._forget()
                return self.refresh()
            self._add(rows, events)
            return bool(rows or events)

    def _add(self, rows: Iterable[RolloutRow], events: Iterable[Event]) -> None:
        """Add rollouts that are new or have changed, and events about groups and collections."""
        for event in events:
            match event.kind:
                case EventKind.GROUP:
                    self._add_group_event(event)
                case EventKind.COLLECT:
                    self.collections.add_begin(event)
                case EventKind.COLLECTED:
                    self.collections.add_end(event)
        for row in rows:
            if row.group not in self._settled:
                if row.group not in self.groups:
                    self.groups[row.group] = PendingGroup(row)
                self.groups[row.group].add(row)

    def select(
        self, step: int | None = None, source: str | None = None, task_ids: Collection[str] | None = None
    ) -> list[PendingGroup]:
        """Pending groups by step, source and tasks, or all, ordered by step and by when something last happened."""
        wanted = [
            one
            for one in self.groups.values()
            if step in (None, one.step)
            and source in (None, one.source)
            and (task_ids is None or one.task_id in task_ids)
        ]
        return sorted(wanted, key=lambda group: (group.step, group.last_ns, group.id))

    def position(self) -> EventOrder | None:
        """The latest event that marks a group as done or skipped, or None."""
        with self.lock:
            self.refresh()
            return max((mark.order for mark in self._valid_marks()), default=None)

    def rewind(self, tape: Tape, to: EventOrder | None) -> None:
        """Go back to when an event was the latest mark, or, with None, to the beginning.

        Groups that were not done or skipped then are given again.
        """
        self.claim.check()
        to = to or (0, "", 0)
        data = {"group": "", "step": 0, "consumer": self.name, "state": GroupState.REWOUND.value, "to": list(to)}
        with self.lock:
            tape.append_run_event(EventKind.GROUP, data)
            self.held.clear()
            self._forget()
            self.refresh()

    def _is_rewind(self, event: Event) -> bool:
        return event.kind == EventKind.GROUP and (event.data["consumer"], event.data["state"]) == (
            self.name,
            GroupState.REWOUND,
        )

    def _forget(self) -> None:
        """Forget what was read of groups, so that all of it is read again. Collections stay known."""
        self._revision = -1
        self.groups.clear()
        self._settled.clear()
        self._marks.clear()
        self._last_mark = None
        self._given_before.clear()

    def record(
        self,
        tape: Tape,
        group: PendingGroup,
        state: GroupState,
        *,
        reason: str | None = None,
        policy: CutPolicy | None = None,
    ) -> None:
        """Record the new state of a group on the tape, and the policy that cut its samples if that is no preset."""
        self.claim.check()
        data: dict[str, Any] = {"group": group.id, "step": group.step, "consumer": self.name, "state": state.value}
        if reason is not None:
            data["reason"] = reason
        if policy is not None and policy not in PRESETS.values():
            data["policy"] = msgspec.to_builtins(policy)
        tape.append_run_event(EventKind.GROUP, data)
        with self.lock:
            if state is GroupState.GIVEN:
                self.held.add(group.id)
            else:
                self._settle(group.id)

    def was_given_before(self, group: str) -> bool:
        """Whether an earlier process was given the group, and did not mark it as done."""
        return group in self._given_before

    def taken(self) -> set[str]:
        """The groups that it was given, is done with, or skipped. Rewound groups count as given."""
        with self.lock:
            self.refresh()
            return self._settled | self._given_before | self.held

    def _add_group_event(self, event: Event) -> None:
        if event.data.get("consumer") != self.name:
            return
        group, state = event.data["group"], event.data["state"]
        if state == GroupState.REWOUND:
            self._go_back(tuple(event.data["to"]))
        elif state in (GroupState.DONE, GroupState.SKIPPED):
            self._last_mark = SettledMark(event.order, group, self._last_mark)
            self._marks.append(self._last_mark)
            self._settle(group)
        elif event.writer != self._writer and group not in self._settled:
            self._given_before.add(group)

    def _go_back(self, to: EventOrder) -> None:
        """Make the marks valid again that were valid at an event, also those that were rewound since."""
        earlier = (mark for mark in self._marks if mark.order <= to)
        self._last_mark = max(earlier, default=None, key=lambda mark: mark.order)
        settled = {mark.group for mark in self._valid_marks()}
        self._given_before = (self._given_before | self._settled) - settled
        self._settled = settled

    def _valid_marks(self) -> Iterator[SettledMark]:
        mark = self._last_mark
        while mark is not None:
            yield mark
            mark = mark.before

    def _settle(self, group: str) -> None:
        self._settled.add(group)
        self.groups.pop(group, None)
        self.held.discard(group)
        self._given_before.discard(group)


_Consumers = weakref.WeakKeyDictionary[Tape, dict[str, Consumer]]
_consumers: _Consumers = weakref.WeakKeyDictionary()
_lock = threading.Lock()
# A forked child must neither use nor close what its parent opened, so it keeps it unused.
_parents: list[_Consumers] = []


def find_consumer(tape: Tape, name: str) -> Consumer:
    """The consumer of that name, one per tape, so that a second stream need not read everything again."""
    with _lock:
        consumers = _consumers.setdefault(tape, {})
        if name not in consumers:
            consumers[name] = Consumer(tape, name)
        return consumers[name]


def taken_groups(tape: Tape) -> dict[str, set[str]]:
    """The groups that each consumer of a run has taken, by its name."""
    names = {event.data["consumer"] for event in tape.run().remarks(EventKind.GROUP)}
    return {name: find_consumer(tape, name).taken() for name in names}


def _after_fork() -> None:
    global _consumers, _lock
    _parents.append(_consumers)
    _consumers, _lock = weakref.WeakKeyDictionary(), threading.Lock()


os.register_at_fork(after_in_child=_after_fork)

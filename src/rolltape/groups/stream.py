"""A stream of groups as they complete: `async for group in tape.groups(step=3)`, or the same without `async`."""

import asyncio
import logging
import time
import weakref
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Self, TypedDict, Unpack

from rolltape.errors import GroupsError, RecordError
from rolltape.groups.consumer import GroupState, find_consumer
from rolltape.groups.deciding import Give, GroupRequest, Late, Skip, decide, explain_staleness
from rolltape.groups.group import Group, UnfinishedAttempt
from rolltape.groups.pending import PendingGroup
from rolltape.groups.waiting import StreamWait
from rolltape.records.policy import Credit, CutPolicy, cut_and_credit
from rolltape.samples import samples_of_group
from rolltape.tape.recording.tape import Tape

log = logging.getLogger("rolltape.groups")


class Skipped(NamedTuple):
    """A group that is not given, and why."""

    group: str
    step: int
    reason: str


class GroupOptions(TypedDict, total=False):
    """The options of `groups`; GroupRequest has their defaults."""

    step: int | None
    source: str | None
    task_ids: Iterable[str] | None
    policy: CutPolicy | str
    credit: Credit | None
    max_staleness: int | None
    complete: bool
    with_empty: bool
    consumer: str
    group_size: int | None
    straggler_s: float | None
    late: Late | str
    limit: int | None
    idle_s: float | None
    resume_s: float | None
    poll_s: float


def groups(tape: Tape, **options: Unpack[GroupOptions]) -> "GroupStream":
    """Stream the groups of a run that this consumer has not had yet, each as soon as it is complete.

    - `step`, `source`, `task_ids`: give the groups of one step, of one source of tasks, and of these tasks; by default
      all.
    - `policy`, `credit`: how samples are cut, and which numbers they carry; by default `exact` and Credit().
    - `consumer`: the name under which groups are taken. Each consumer is given each group once.
    - `poll_s`: how often to look for new rollouts.

    A group is complete when `group_size` attempts have finished, and have their rewards if the credit has
    advantages. The stream also waits for broken attempts, which may be tried again. It stops waiting when the
    collection has ended, or nothing has begun, ended or been rewarded in the group for `straggler_s`. Then `late`
    decides whether the group is given without the missing attempts, or skipped. With `complete=False` it does not wait:
    it gives what has ended, and ends.

    A group with a trained token more than `max_staleness` versions behind the newest is skipped. So is a group whose
    samples cannot be built, and one with nothing to train, unless `with_empty` is set. The stream ends after `limit`
    groups, when all collections of `step` have ended and their groups are given, or when nothing new has come for
    `idle_s`. It raises GroupsError if the collecting process died before its end, and the collection was not resumed
    within `resume_s`.
    """
    policy, credit = cut_and_credit(options.get("policy", "exact"), options.get("credit"))
    late = options.get("late", Late.GIVE)
    if late not in list(Late):
        raise GroupsError(f"late is {late!r}; give one of {', '.join(Late)}")
    task_ids = options.get("task_ids")
    if isinstance(task_ids, str):
        raise GroupsError(f"task_ids is {task_ids!r}, one text; give a list of task ids")
    fields: dict[str, Any] = {**options, "policy": policy, "credit": credit, "late": Late(late)}
    fields["task_ids"] = None if task_ids is None else frozenset(task_ids)
    return GroupStream(tape, GroupRequest(**fields))


class GroupStream:
    """Gives groups to one coroutine or one thread at a time. Several streams may share a consumer."""

    def __init__(self, tape: Tape, request: GroupRequest) -> None:
        self.skipped: list[Skipped] = []
        self._tape = tape
        self._request = request
        self._consumer = find_consumer(tape, request.consumer)
        self._wait = StreamWait(tape.name, self._consumer.collections, request)
        self._given = 0
        self._next: deque[PendingGroup] = deque()
        self._without_size: set[str] = set()
        self._thread: ThreadPoolExecutor | None = None  # it advances here for coroutines
        self._advancing: Future[Group | None] | None = None
        self._consumer.claim.take()
        self._release = weakref.finalize(self, self._consumer.claim.release)

    def close(self) -> None:
        """End the stream. Groups that are not done stay given; what a cancelled caller left is given back."""
        self._release()
        left, self._advancing = self._advancing, None
        if left is not None:
            left.add_done_callback(give_back_taken)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Group:
        while True:
            advancing, self._advancing = self._advancing, None
            group = self._advance() if advancing is None else advancing.result()
            if group is not None:
                return group
            if not self._release.alive:
                raise StopIteration
            time.sleep(self._request.poll_s)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Group:
        while True:
            if self._advancing is None:
                self._advancing = self._in_thread().submit(self._advance)
            advancing = asyncio.wrap_future(self._advancing)
            # A caller that is cancelled here, or whose loop ends, must not lose a group: the next call returns it.
            await asyncio.wait({advancing})
            self._advancing = None
            group = advancing.result()
            if not self._release.alive:
                raise StopAsyncIteration
            if group is not None:
                return group
            await asyncio.sleep(self._request.poll_s)

    def _in_thread(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "rolltape-groups")
        return self._thread

    def _advance(self) -> Group | None:
        """The next group, or None if there is none now. The stream is closed when there will be no more."""
        self._consumer.claim.check()
        with self._consumer.lock:
            if not self._release.alive or self._given == self._request.limit:
                self.close()
                return None
            if self._consumer.refresh():
                self._wait.begin()
            group = self._find_next()
            if group is not None:
                self._given += 1
                self._wait.begin()
            else:
                self._end_or_wait()
            return group

    def _end_or_wait(self) -> None:
        if self._is_over():
            self.close()
            if self.skipped and not self._given:
                count, reason = len(self.skipped), self.skipped[0].reason
                log.warning("no group was given; %d were skipped, the first: %s", count, reason)
            return
        try:
            self._wait.check(self._incomplete)
        except GroupsError:
            self.close()
            raise

    def _find_next(self) -> Group | None:
        """The first group to give now, or None."""
        if not self._next:
            self._next.extend(self._select())
        while self._next:
            pending = self._next.popleft()
            if self._is_free(pending) and (group := self._give_or_skip(pending)) is not None:
                return group
        return None

    def _select(self) -> list[PendingGroup]:
        request = self._request
        return self._consumer.select(request.step, request.source, request.task_ids)

    def _incomplete(self) -> list[PendingGroup]:
        return [group for group in self._select() if self._is_free(group)]

    def _is_free(self, pending: PendingGroup) -> bool:
        return pending.id not in self._consumer.held and pending.id in self._consumer.groups

    def _give_or_skip(self, pending: PendingGroup) -> Group | None:
        decision = self._decide(pending)
        outcome = self._make_group(pending, decision) if isinstance(decision, Give) else decision
        if isinstance(outcome, Skip):
            self._consumer.record(self._tape, pending, GroupState.SKIPPED, reason=outcome.reason)
            self.skipped.append(Skipped(pending.id, pending.step, outcome.reason))
            log.info("group %s of step %d is skipped: %s", pending.id, pending.step, outcome.reason)
            return None
        return outcome

    def _decide(self, pending: PendingGroup) -> Give | Skip | None:
        consumer = self._consumer
        try:
            return decide(pending, consumer.collections, self._request)
        except GroupsError:
            # Its size may have been written while rollouts were listed. Then the next refresh has it.
            if pending.id in self._without_size:
                raise
            self._without_size.add(pending.id)
            return None

    def _make_group(self, pending: PendingGroup, give: Give) -> Group | Skip:
        consumer, request = self._consumer, self._request
        rollouts = [consumer.index.load(row.key) for row in give.rows]
        versions = consumer.index.versions()
        try:
            samples = tuple(samples_of_group(rollouts, request.policy, credit=request.credit, versions=versions))
        except RecordError as error:
            log.warning("group %s of step %d cannot be given: %s", pending.id, pending.step, error)
            return Skip(f"its samples cannot be built: {error}")
        if not samples and not request.with_empty:
            return Skip(f"nothing to train in {len(rollouts)} rollouts under {request.policy.name}")
        limit = request.max_staleness
        if limit is not None and (why := explain_staleness(samples, versions, limit)) is not None:
            return Skip(why)
        consumer.record(self._tape, pending, GroupState.GIVEN, policy=request.policy)
        again = consumer.was_given_before(pending.id)
        unfinished = tuple(map(UnfinishedAttempt.of, give.others))
        return Group(
            self._tape, consumer, pending, tuple(rollouts), samples, unfinished, missing=give.missing, again=again
        )

    def _is_over(self) -> bool:
        request, collections = self._request, self._consumer.collections
        if not request.complete:
            return True
        if request.idle_s is not None and self._wait.waited_s > request.idle_s:
            return True
        step = request.step
        return step is not None and collections.is_step_over(step, request.source) and not self._incomplete()


def give_back_taken(taken: "Future[Group | None]") -> None:
    """Give back the group that a future has, if it has one: its caller has left."""
    if not taken.cancelled() and taken.exception() is None and (group := taken.result()) is not None:
        group.give_back()

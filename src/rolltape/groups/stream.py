"""Groups as they complete, for a trainer: `async for group in tape.groups(step=3)`, or the same without `async`."""

import asyncio
import logging
import time
import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Self, TypedDict

from rolltape.errors import GroupsError
from rolltape.groups.consumer import Consumer, consumer_of
from rolltape.groups.deciding import Give, GroupRequest, Skip, decided, too_old
from rolltape.groups.gathering import Gathered
from rolltape.groups.group import Group
from rolltape.groups.waiting import Waiting
from rolltape.records.group import GroupState, Late
from rolltape.records.policy import Credit, CutPolicy, cut_and_credit
from rolltape.samples import samples_of_group
from rolltape.tape.recording.tape import Tape

log = logging.getLogger("rolltape.groups")


class Skipped(NamedTuple):
    """A group that was not given, and will not be."""

    group: str
    step: int
    reason: str


class GroupOptions(TypedDict, total=False):
    """What `groups` may be told, for those who hand it on."""

    step: int | None
    source: str | None
    policy: CutPolicy | str
    credit: Credit | None
    max_staleness: int | None
    complete: bool
    consumer: str
    group_size: int | None
    straggler_s: float | None
    late: Late | str
    limit: int | None
    idle_s: float | None
    resume_s: float | None
    poll_s: float


def groups(
    tape: Tape,
    *,
    step: int | None = None,
    source: str | None = None,
    policy: CutPolicy | str = "exact",
    credit: Credit | None = None,
    max_staleness: int | None = None,
    complete: bool = True,
    consumer: str = "trainer",
    group_size: int | None = None,
    straggler_s: float | None = 600.0,
    late: Late | str = Late.GIVE,
    limit: int | None = None,
    idle_s: float | None = None,
    resume_s: float | None = 60.0,
    poll_s: float = 0.2,
) -> "GroupStream":
    """The groups of a run that this consumer has not had yet, each once it is complete, while collection goes on.

    They are those of one `step`, and of one `source` of tasks, or of all.

    A group is complete when `group_size` attempts have finished, and have their rewards if the credit has
    advantages. What broke is waited for, since it may be tried again, until the collection has ended or nothing has
    begun, ended or been rewarded in the group for `straggler_s`; then `late` says whether it is given without, or
    skipped. With `complete=False` nothing is waited for: what has ended is given as it is, and that is all.

    A group with a trained token more than `max_staleness` versions behind the newest is skipped, and so is one with
    nothing to train. The stream ends after `limit` groups, when all collections of `step` have ended and their groups
    are given, or when nothing new has come for `idle_s`. It ends with a GroupsError when the process that collects has
    died before its end, and nobody has resumed it for `resume_s`.
    """
    _check(group_size is None or group_size >= 1, f"group_size is {group_size}; give 1 or more")
    _check(max_staleness is None or max_staleness >= 0, f"max_staleness is {max_staleness}; give 0 or more")
    _check(limit is None or limit >= 1, f"limit is {limit}; give 1 or more")
    _check(late in list(Late), f"late is {late!r}; known are {', '.join(Late)}")
    cutting, crediting = cut_and_credit(policy, credit)
    wanted = GroupRequest(
        step=step,
        source=source,
        policy=cutting,
        credit=crediting,
        max_staleness=max_staleness,
        complete=complete,
        group_size=group_size,
        straggler_s=straggler_s,
        late=Late(late),
    )
    taking = consumer_of(tape, consumer)
    waiting = Waiting(tape.name, taking.gathering.collectors, wanted, resume_s)
    return GroupStream(tape, taking, wanted, waiting, limit=limit, idle_s=idle_s, poll_s=poll_s)


class GroupStream:
    """Gives groups, to a coroutine or to a thread. For one of them at a time; several streams may share a consumer."""

    def __init__(
        self,
        tape: Tape,
        consumer: Consumer,
        wanted: GroupRequest,
        waiting: Waiting,
        *,
        limit: int | None,
        idle_s: float | None,
        poll_s: float,
    ) -> None:
        self.skipped: list[Skipped] = []
        self._tape = tape
        self._consumer = consumer
        self._wanted = wanted
        self._waiting = waiting
        self._limit = limit
        self._idle_s = idle_s
        self._poll_s = poll_s
        self._given = 0
        self._next: deque[Gathered] = deque()
        self._without_size: set[str] = set()
        self._thread: ThreadPoolExecutor | None = None  # in which it advances for coroutines
        self._advancing: Future[Group | None] | None = None
        consumer.claim.take()
        self._release = weakref.finalize(self, consumer.claim.release)

    def close(self) -> None:
        """End the stream. What was given and is not done stays so."""
        self._release()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Group:
        while True:
            pending, self._advancing = self._advancing, None
            group = self._advance() if pending is None else pending.result()
            if group is not None:
                return group
            if not self._release.alive:
                raise StopIteration
            time.sleep(self._poll_s)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Group:
        while True:
            if self._advancing is None:
                self._advancing = self._in_thread().submit(self._advance)
            advancing = asyncio.wrap_future(self._advancing)
            # A caller that is cancelled here, or whose loop ends, must not lose a group: the next call takes it up.
            await asyncio.wait({advancing})
            self._advancing = None
            group = advancing.result()
            if group is not None:
                return group
            if not self._release.alive:
                raise StopAsyncIteration
            await asyncio.sleep(self._poll_s)

    def _in_thread(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "rolltape-groups")
        return self._thread

    def _advance(self) -> Group | None:
        """The next group, if there is one now; when there will be none any more the stream is closed."""
        self._consumer.claim.check()
        with self._consumer.lock:
            if not self._release.alive or self._given == self._limit:
                self.close()
                return None
            if self._consumer.look():
                self._waiting.begin()
            group = self._ready()
            if group is not None:
                self._given += 1
                self._waiting.begin()
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
            self._waiting.go_on(self._incomplete)
        except GroupsError:
            self.close()
            raise

    def _ready(self) -> Group | None:
        """The first of those groups that are to be given."""
        if not self._next:
            self._next.extend(self._consumer.gathering.unsettled(self._wanted.step, self._wanted.source))
        while self._next:
            gathered = self._next.popleft()
            if self._is_free(gathered) and (group := self._given_or_skipped(gathered)) is not None:
                return group
        return None

    def _incomplete(self) -> list[Gathered]:
        unsettled = self._consumer.gathering.unsettled(self._wanted.step, self._wanted.source)
        return [group for group in unsettled if self._is_free(group)]

    def _is_free(self, gathered: Gathered) -> bool:
        return gathered.id not in self._consumer.held and gathered.id in self._consumer.gathering.groups

    def _given_or_skipped(self, gathered: Gathered) -> Group | None:
        decision = self._decided(gathered)
        outcome = self._made(gathered, decision) if isinstance(decision, Give) else decision
        if isinstance(outcome, Skip):
            self._consumer.say(self._tape, gathered, GroupState.SKIPPED, outcome.reason)
            self.skipped.append(Skipped(gathered.id, gathered.step, outcome.reason))
            log.info("group %s of step %d is skipped: %s", gathered.id, gathered.step, outcome.reason)
            return None
        return outcome

    def _decided(self, gathered: Gathered) -> Give | Skip | None:
        consumer = self._consumer
        try:
            return decided(gathered, consumer.gathering, self._wanted)
        except GroupsError:
            # What says its size may have been written while rollouts were listed; the next look has it then.
            if gathered.id in self._without_size:
                raise
            self._without_size.add(gathered.id)
            return None

    def _made(self, gathered: Gathered, give: Give) -> Group | Skip:
        consumer, wanted = self._consumer, self._wanted
        rollouts = consumer.rollouts(give.rows)
        versions = consumer.index.versions()
        samples = tuple(samples_of_group(rollouts, wanted.policy, credit=wanted.credit, versions=versions))
        if not samples:
            return Skip(f"nothing to train in {len(rollouts)} rollouts under {wanted.policy.name}")
        if wanted.max_staleness is not None and (why := too_old(samples, versions, wanted.max_staleness)) is not None:
            return Skip(why)
        consumer.say(self._tape, gathered, GroupState.GIVEN)
        again = consumer.was_given_before(gathered.id)
        return Group(self._tape, consumer, gathered, tuple(rollouts), samples, missing=give.missing, again=again)

    def _is_over(self) -> bool:
        wanted, collectors = self._wanted, self._consumer.gathering.collectors
        if not wanted.complete:
            return True
        if self._idle_s is not None and self._waiting.waited_s > self._idle_s:
            return True
        return (
            wanted.step is not None and collectors.is_step_over(wanted.step, wanted.source) and not self._incomplete()
        )


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise GroupsError(what)

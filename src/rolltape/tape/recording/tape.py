"""The tape as a writer sees it: start rollouts, and say later what became of them."""

import asyncio
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, Unpack

from rolltape.errors import ClosedError, NoSuchRollout, NotJsonError, RecordError, TakenOverError
from rolltape.records.ids import group_id, join_source, rollout_id
from rolltape.records.rollout import EventKind, RolloutHead
from rolltape.records.turn import Delivery
from rolltape.tape.index.launch import LaunchCheck
from rolltape.tape.journal.entries import LoggedEvent, StartedRollout, StartedSession, Statement, event_body
from rolltape.tape.journal.writing import Durability, Journal
from rolltape.tape.recording.fields import as_count, as_items, as_member, as_settings, as_snapshot, as_text, as_version
from rolltape.tape.recording.recorder import RolloutRecorder, score_data
from rolltape.tape.recording.takeover import take_over
from rolltape.tape.recording.turnplace import TurnPlace, turn_of, turn_place
from rolltape.tape.run import Run, read
from rolltape.tape.rundir import RunDirectory, locked
from rolltape.tape.shards.reading import ShardSource
from rolltape.tape.stored import About, Key, is_remark

if TYPE_CHECKING:
    from rolltape.groups.stream import GroupOptions, GroupStream


class _Said(NamedTuple):
    """What to write, and where."""

    journal: Journal
    events: list[LoggedEvent]
    rollout: Key | None = None  # that no other writer must have taken over


_WAIT_FOR_RUN_S = 30.0  # for others that start rollouts, which takes milliseconds

_open_tapes: "weakref.WeakSet[Tape]" = weakref.WeakSet()


class Tape:
    """A run that is open for recording. Threads may share it; a forked child gets a journal of its own.

    Example:

        with rolltape.open("runs/exp1") as tape, tape.rollout(task_id="t1", step=0) as rollout:
            rollout.finish(reward=1.0)
    """

    def __init__(self, directory: RunDirectory, durability: Durability = Durability.PROCESS) -> None:
        self.directory = directory
        self.durability = durability
        self._lock = threading.RLock()
        self._clock_lock = threading.Lock()  # taken last: rollouts take it while they hold their own
        self._open: dict[tuple[str, int], RolloutRecorder] = {}
        self._last_ns = 0
        self._closed = False
        self._begin_journal()
        _open_tapes.add(self)

    def _begin_journal(self) -> None:
        self._journal = Journal(self.directory, self.durability)
        self._launch = LaunchCheck(self.directory, self._journal)
        # Also runs when the program ends without a close; rollouts still open are then found as lost.
        self._closer = weakref.finalize(self, self._journal.close)

    @property
    def name(self) -> str:
        """The run's name."""
        return self.directory.name

    @property
    def writer(self) -> str:
        """This process's name among the run's writers."""
        return self._own().writer

    def rollout(
        self,
        *,
        task_id: str | None = None,
        task: object = None,
        step: int = 0,
        attempt: int = 0,
        source: str | None = None,
        split: str | None = None,
        model: str | None = None,
        agent: str | None = None,
        tags: Sequence[str] = (),
        extra: Mapping[str, Any] | None = None,
        new_try: bool = False,
        try_index: int | None = None,
        resume: bool | Literal["force"] = False,
    ) -> RolloutRecorder:
        """Start a rollout. The same one again is refused, unless `new_try` says that it is run again.

        `source` names where the task comes from, in any words: `"gsm8k"`, `"openai/gsm8k:main"`, `"sums.jsonl"`.
        `split` names its split, `"train"` or `"test"`; the tape and the rollout's id have both as `source#split`.
        `try_index` says which try it is, where others are recorded out of this tape's sight.

        With `resume` the latest try, or the one of `try_index`, goes on if it has not ended and the process that
        recorded it is dead. The recorder then has its `sessions` with their turns; tags and extra are as they were. A
        rollout that is not on the tape is started. One that has ended is refused, or with `new_try` run again.
        "force" takes the rollout from a process that is alive, too, such as one that hangs or was stopped:
        whatever that one still records of it is refused.

            with tape.rollout(task_id="math-17", resume=True) as rollout:
                session = rollout.sessions[0] if rollout.sessions else rollout.session()
        """
        where = f"a rollout of task {task_id!r}" if task_id is not None else "a rollout"
        texts: dict[str, Any] = {
            name: as_text(value, f"{where}: {name}")
            for name, value in {"source": source, "task_id": task_id, "model": model, "agent": agent}.items()
        }
        texts["source"] = join_source(texts["source"], as_text(split, f"{where}: split"))
        task = as_snapshot(task, f"{where}: task")
        step, attempt = as_count(step, f"{where}: step"), as_count(attempt, f"{where}: attempt")
        if try_index is not None:
            try_index = as_count(try_index, f"{where}: try_index")
        try:
            own_id = rollout_id(self.name, **texts, task=task, step=step, attempt=attempt)
        except ValueError as error:
            raise NotJsonError(f"{where}: its task identifies it, and has no one spelling: {error}") from None
        where = f"rollout {own_id}"
        tags, extra = as_tags(tags, where), as_settings(extra, f"{where}: extra")
        with self._lock, locked(self.directory.path, wait_s=_WAIT_FOR_RUN_S if resume else None):
            journal = self._own()
            tries = self._launch.tries(own_id)
            resumed = tries[-1] if tries and try_index is None else try_index
            if resume and resumed is not None and resumed in tries:
                recorder = self._taken_over((own_id, resumed), journal, force=resume == "force")
                if recorder is not None:
                    return recorder
                if try_index is not None or not new_try:
                    raise RecordError(f"{where}: its try {resumed} has ended; give new_try=True to run it again")
            if try_index is not None and try_index in tries:
                raise RecordError(f"{where}: its try {try_index} is on the tape already; leave try_index out")
            if tries and not new_try and try_index is None:
                raise RecordError(
                    f"{where} (task {task_id!r}, step {step}, attempt {attempt}) is on the tape already; "
                    "give another attempt, or new_try=True to run it again"
                )
            head = RolloutHead(
                id=own_id,
                try_index=(tries[-1] + 1 if tries else 0) if try_index is None else try_index,
                group=group_id(self.name, **texts, task=task, step=step),
                run=self.name,
                step=step,
                attempt=attempt,
                **texts,
                task=task,
                tags=tags,
                extra=extra,
                started_at_ns=self._now_ns(),
            )
            pk = journal.next_rollout
            journal.append(StartedRollout(pk, head))
            journal.next_rollout += 1
            recorder = RolloutRecorder(self, journal, pk, head)
            self._open[head.key] = recorder
            return recorder

    def _taken_over(self, key: Key, journal: Journal, *, force: bool) -> RolloutRecorder | None:
        """A rollout that another process left, to go on with; None: it has ended."""

        def shards() -> list[ShardSource]:
            self._launch.tries(key[0])
            return self._launch.shards_holding(key[0])

        taken = take_over(self.directory, journal, key, shards, force=force)
        if taken is None:
            return None
        self._now_ns(self._launch.latest_ns(key[0]))  # whatever is said from now on comes after what others said
        pk = journal.next_rollout
        sessions = [(self.next_session_pk(journal), intake) for intake in taken.sessions]
        started = [StartedSession(number, pk, intake.head) for number, intake in sessions]
        journal.append(StartedRollout(pk, taken.head), *started, rollout=key)
        journal.next_rollout += 1
        recorder = self._open[key] = RolloutRecorder(self, journal, pk, taken.head, sessions)
        return recorder

    def score(
        self,
        rollout_id: str,
        *,
        reward: object,
        terms: Mapping[str, object] | None = None,
        by: str | None = None,
        try_index: int | None = None,
        turn: str | int | None = None,
    ) -> None:
        """Reward a rollout, or one of its turns, now or again: the latest counts, the history stays.

        Without `try_index` it is about the try that counts: the latest finished one, else the latest.
        """
        where = f"rollout {rollout_id}" if turn is None else f"turn {turn} of rollout {rollout_id}"
        data = score_data(reward, terms, where)
        if data is None:
            raise RecordError(f"{where}: no reward; give a number")
        turn_id = None if turn is None else str(turn)
        _append(self._said(Statement(EventKind.SCORE, rollout_id, data, by, try_index, turn_id)))

    def tag(self, rollout_id: str, *tags: str, by: str | None = None, try_index: int | None = None) -> None:
        """Give a rollout, all its tries unless told which, its tags; they take the place of those it had."""
        data = {"tags": list(as_tags(tags, f"rollout {rollout_id}"))}
        _append(self._said(Statement(EventKind.TAG, rollout_id, data, by, try_index)))

    def filter(
        self, rollout_id: str, reason: str | None, *, by: str | None = None, try_index: int | None = None
    ) -> None:
        """Keep a rollout, all its tries unless told which, out of training, and say why; None takes it back."""
        data = {"reason": as_text(reason, f"rollout {rollout_id}: the reason of its filter")}
        _append(self._said(Statement(EventKind.FILTER, rollout_id, data, by, try_index)))

    def say(
        self,
        kind: EventKind,
        rollout_id: str,
        data: dict[str, Any],
        *,
        by: str | None = None,
        try_index: int | None = None,
    ) -> None:
        """Append a statement of any kind about a rollout; `data` is as the kind has it, and is not checked here."""
        _append(self._said(Statement(kind, rollout_id, data, by, try_index)))

    def say_all(self, statements: Iterable[Statement]) -> None:
        """As `say`, for many: all of them are kept, or, if one is refused, none. It costs much less than one by one."""
        with self._lock:
            journal = self._own()
            with self._launch.still():
                events = [event for one in statements for event in self._said(one).events]
            journal.append(*events)

    def deliver(self, turn_id: str, delivery: Delivery | str = Delivery.DELIVERED) -> None:
        """Say whether the client got a turn's reply."""
        _append(self._delivery(turn_id, delivery))

    def deliver_async(self, turn_id: str, delivery: Delivery | str = Delivery.DELIVERED) -> asyncio.Future[None]:
        """As `deliver`, from a coroutine: the future is done when it is durable, and need not be awaited."""
        journal, events, rollout = self._delivery(turn_id, delivery)
        return journal.ticks.submit(None, *events, rollout=rollout)[1]

    def announce_version(self, version: str | int) -> None:
        """Say that a weight version is now in use: versions are ordered as they are announced."""
        self.note(EventKind.VERSION, {"version": as_version(version, f"run {self.name}: the weight version")})

    def note(self, kind: EventKind, data: dict[str, Any]) -> None:
        """Append a statement about the run as a whole; `data` is as the kind has it, and is not checked here."""
        with self._lock:
            journal = self._own()
            journal.append(self.event(kind, None, data=data, after_ns=self._launch.latest_ns(None)))

    def next_try(self, rollout_id: str) -> int:
        """The number that another try of a rollout would have; 0: there is none of it so far."""
        with self._lock:
            self._own()
            return max(self._launch.tries(rollout_id), default=-1) + 1

    def look_again(self) -> None:
        """Have the next question see what was just published, also far away, where one looks only now and then."""
        self._launch.look_again()

    def run(self) -> Run:
        """A reader of the same run."""
        return read(self.directory.path)

    def groups(self, **options: "Unpack[GroupOptions]") -> "GroupStream":
        """Whole groups for a trainer, as they complete, to be had by `async for` or `for`.

        `rolltape.groups.groups` is the same, and says what it takes.
        """
        from rolltape.groups.stream import groups

        return groups(self, **options)

    def close(self) -> None:
        """End recording. Rollouts still open are recorded as failed. Twice is fine."""
        with self._lock:
            if self._closed:
                return
            try:
                if self._journal.pid == os.getpid():
                    for recorder in list(self._open.values()):
                        with contextlib.suppress(TakenOverError):
                            recorder.fail("the tape was closed before it finished")
            finally:
                self._closed = True
                self._closer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def event(
        self,
        kind: EventKind,
        key: tuple[str, int] | None,
        *,
        data: dict[str, Any],
        turn: str | None = None,
        by: str | None = None,
        after_ns: int = 0,
    ) -> LoggedEvent:
        """A statement in the making, later than all that this tape made before, and than `after_ns`."""
        rollout, try_index = key or (None, None)
        body = event_body(self._now_ns(after_ns), kind.value, rollout, try_index, turn, by, data)
        return LoggedEvent(body, is_remark(About(0, kind, turn=turn)))

    def next_session_pk(self, journal: Journal) -> int:
        """A key for a session in that journal."""
        with self._clock_lock:
            journal.next_session += 1
            return journal.next_session - 1

    def own_journal(self, journal: Journal, where: str) -> Journal:
        """That journal, if this process may write to it."""
        if journal.pid != os.getpid():
            raise ClosedError(
                f"{where} was opened in process {journal.pid}, this is its child {os.getpid()}; open a rollout here"
            )
        if self._closed:
            raise ClosedError(f"{where}: the tape of run {self.name} is closed; open it again to record more")
        return journal

    def latest_ns(self, rollout: str) -> int:
        """When others last spoke of a rollout by their clocks, if that is still to come by ours; else 0."""
        with self._lock:
            return 0 if self._closed or self._journal.pid != os.getpid() else self._launch.latest_ns(rollout)

    def forget(self, recorder: RolloutRecorder) -> None:
        """Take a rollout that has ended off the list of open ones."""
        self._open.pop(recorder.head.key, None)

    def after_fork(self) -> None:
        """In a forked child: leave all that is the parent's, so that the first write makes a journal of the child's."""
        self._lock = threading.RLock()
        self._clock_lock = threading.Lock()
        self._open = {}

    def _own(self) -> Journal:
        if self._closed:
            raise ClosedError(f"the tape of run {self.name} is closed; open it again to record more")
        if self._journal.pid != os.getpid():
            _parents.append((self._journal, self._launch))
            self._begin_journal()
        return self._journal

    def _delivery(self, turn_id: str, delivery: Delivery | str) -> _Said:
        data = {"delivery": as_member(Delivery, delivery, f"turn {turn_id}").value}
        turn = turn_place(turn_id)
        if turn.key not in self._open:
            return self._said(Statement(EventKind.DELIVERY, turn.rollout, data, turn=turn.id))
        # While a rollout is open here no other process serves it: there is nobody else's word to look for.
        self._check_turn(turn)
        return _Said(self._own(), [self.event(EventKind.DELIVERY, turn.key, data=data, turn=turn.id)], turn.key)

    def _said(self, statement: Statement) -> _Said:
        kind, rollout, data, by, try_index, turn_id = statement
        by = as_text(by, f"rollout {rollout}: by")
        rollout = as_text(rollout, "the id of a rollout") or ""
        if try_index is not None:
            try_index = as_count(try_index, f"rollout {rollout}: try_index")
        turn = None if turn_id is None else turn_of(turn_id, rollout, try_index)
        if turn is not None:
            try_index = turn.try_index
        with self._lock:
            journal = self._own()
            tries = self._launch.tries(rollout)
            if not tries or (try_index is not None and try_index not in tries):
                asked = "" if try_index is None else f" with a try {try_index}"
                raise NoSuchRollout(
                    f"run {self.name} holds no rollout {rollout}{asked}; give the id that it was opened under"
                )
            after_ns = self._launch.latest_ns(rollout)
            if try_index is not None:
                tries = [try_index]
            elif kind in (EventKind.SCORE, EventKind.TRACE):
                tries = [self._launch.counted_try(rollout, tries)]
            if turn is not None:
                self._check_turn(turn)
            events = [
                self.event(kind, (rollout, one), data=data, turn=turn_id, by=by, after_ns=after_ns) for one in tries
            ]
            return _Said(journal, events, turn.key if turn is not None and kind == EventKind.DELIVERY else None)

    def _check_turn(self, turn: TurnPlace) -> None:
        """Refuse a turn that is not there, where this is known: for rollouts open here, and those that have ended."""
        recorder = self._open.get(turn.key)
        counts = self._launch.turns_of(turn.key) if recorder is None else recorder.turn_counts()
        if counts is None:
            return
        if turn.ordinal >= len(counts):
            raise NoSuchRollout(f"turn {turn.id}: its rollout has {len(counts)} sessions; give the id of a Turn")
        if turn.sequence >= counts[turn.ordinal]:
            raise NoSuchRollout(f"turn {turn.id}: its session has {counts[turn.ordinal]} turns; give the id of a Turn")

    def _now_ns(self, after_ns: int = 0) -> int:
        with self._clock_lock:
            self._last_ns = max(time.time_ns(), self._last_ns + 1, after_ns + 1)
            return self._last_ns


def _append(said: _Said) -> None:
    said.journal.append(*said.events, rollout=said.rollout)


# SQLite connections must not be carried across a fork, not even to close them: a child keeps them unused.
_parents: list[tuple[Journal, LaunchCheck]] = []


def _after_fork() -> None:
    for tape in list(_open_tapes):
        tape.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def open_tape(
    path: str | os.PathLike[str], name: str | None = None, durability: Durability | str = Durability.PROCESS
) -> Tape:
    """Open the run at `path` for recording. A new run is created if there is none, named after its directory.

    Example:

        tape = rolltape.open("runs/exp1")
    """
    level = as_member(Durability, durability, f"run {os.fspath(path)}")
    return Tape(RunDirectory.made_or_opened(path, name), level)


def as_tags(tags: Sequence[str], where: str) -> tuple[str, ...]:
    """Tags as texts."""
    if isinstance(tags, str):
        raise RecordError(f"{where}: tags are the text {tags!r}; give a list of texts")
    texts = as_items(tags, f"{where}: tags", "texts")
    return tuple(text for tag in texts if (text := as_text(tag, f"{where}: a tag")) is not None)

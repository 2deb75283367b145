"""`Tape`: starts rollouts, and appends later events about them."""

import asyncio
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

from rolltape.errors import NoSuchRollout, NotJsonError, RecordError
from rolltape.records.ids import group_id, join_source, rollout_id
from rolltape.records.rollout import EventKind, RolloutHead
from rolltape.records.turn import Delivery
from rolltape.tape.journal.entries import NewEvent
from rolltape.tape.journal.writing import Durability
from rolltape.tape.recording.annotating import AnnotationOptions, change_note_event, note_event, retag_event
from rolltape.tape.recording.fields import as_count, as_member, as_settings, as_snapshot, as_text, as_texts, as_version
from rolltape.tape.recording.rollout import RolloutRecorder, score_data
from rolltape.tape.recording.takeover import take_over
from rolltape.tape.recording.writer import TapeWriter
from rolltape.tape.run import Run, read
from rolltape.tape.rundir import RunDirectory, locked
from rolltape.tape.shards.reading import ShardSource
from rolltape.tape.stored import Key, Summarize

if TYPE_CHECKING:
    from rolltape.groups.stream import GroupOptions, GroupStream

_RENAMED = {
    "say": "append_event",
    "say_all": "append_events",
    "note": "append_run_event",
    "deliver": "mark_delivered",
    "deliver_async": "mark_delivered_async",
}


class Tape:
    """A run that is open for recording. Threads may share it. A forked child gets its own journal.

    Example:

        with rolltape.open("runs/exp1") as tape, tape.rollout(task_id="t1", step=0) as rollout:
            rollout.finish(reward=1.0)
    """

    def __init__(
        self,
        directory: RunDirectory,
        durability: Durability = Durability.PROCESS,
        summarize: Summarize | None = None,
    ) -> None:
        self.directory = directory
        self.durability = durability
        self._writer = TapeWriter(directory, durability, summarize)

    @property
    def name(self) -> str:
        """The run's name."""
        return self.directory.name

    @property
    def writer(self) -> str:
        """The name of this process among the run's writers."""
        return self._writer.journal().writer

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
        foreign_ids: Sequence[str] = (),
        extra: Mapping[str, Any] | None = None,
        new_try: bool = False,
        try_index: int | None = None,
        resume: bool | Literal["force"] = False,
    ) -> RolloutRecorder:
        """Start a rollout. One that is on the tape is refused, unless `new_try`, `try_index` or `resume` is given.

        Args:
            task_id: The task's name in its source. Give this, or `task`.
            task: The task itself, as JSON. Without a `task_id` its content identifies it.
            step: The training step that the rollout is made for.
            attempt: The number of the rollout within its group: 0, 1, …
            source: Where the task comes from, in any words: `"gsm8k"`, `"openai/gsm8k:main"`, `"sums.jsonl"`.
            split: The split of the source, `"train"` or `"test"`. The tape and the id have both as `source#split`.
            model: The model that is sampled from.
            agent: The agent that runs the task.
            tags: Texts to find the rollout by.
            foreign_ids: Its ids in other programs, such as a framework's own rollout id. Readers and commands accept
                them as ids. They belong to this try; another try may have others.
            extra: Further JSON to keep with it.
            new_try: Start another try of a rollout that is on the tape.
            try_index: The number of this try, if other tries are recorded where this tape cannot see them.
            resume: Continue the latest try, or the one of `try_index`, if it has not ended and the process that
                recorded it is dead. The recorder's `sessions` have their turns so far. A rollout that is not on the
                tape is started. One that has ended is refused, or run again with `new_try`. `"force"` also takes a
                rollout from a live process, such as one that hangs; what that process still records is refused.

        Example:

            with tape.rollout(task_id="math-17", step=12, attempt=3, source="gsm8k", split="train") as rollout:
                session = rollout.session()

        Example of a process that was started again:

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
            raise NotJsonError(f"{where}: its task identifies it, but has no canonical JSON: {error}") from None
        where = f"rollout {own_id}"
        tags, extra = as_texts(tags, f"{where}: tags"), as_settings(extra, f"{where}: extra")
        foreign_ids = as_texts(foreign_ids, f"{where}: foreign_ids")
        if "" in foreign_ids:
            raise RecordError(f"{where}: a foreign id is empty; leave it out")
        writer = self._writer
        with writer.lock, locked(self.directory.path):
            journal = writer.journal()
            tries = writer.launch.tries(own_id)
            resumed = tries[-1] if tries and try_index is None else try_index
            if resume and resumed is not None and resumed in tries:
                recorder = self._take_over((own_id, resumed), force=resume == "force")
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
            return writer.start(
                RolloutHead(
                    id=own_id,
                    try_index=(tries[-1] + 1 if tries else 0) if try_index is None else try_index,
                    group=group_id(self.name, **texts, task=task, step=step),
                    run=self.name,
                    step=step,
                    attempt=attempt,
                    **texts,
                    task=task,
                    tags=tags,
                    foreign_ids=tuple(dict.fromkeys(foreign_ids)),
                    extra=extra,
                    started_at_ns=journal.now_ns(),
                )
            )

    def resume(self, rollout_id: str, try_index: int) -> RolloutRecorder:
        """Continue a try of a rollout whose process has died, by its id. The recorder has its sessions and turns.

        It is refused if the try has ended, or if its process is alive.

        Example:

            rollout = tape.resume("857bc8a1c3a94b0d8f1c2b3a4d5e6f70", 0)
        """
        writer = self._writer
        with writer.lock, locked(self.directory.path):
            if try_index not in writer.launch.tries(rollout_id):
                raise NoSuchRollout(f"run {self.name} holds no try {try_index} of rollout {rollout_id}")
            recorder = self._take_over((rollout_id, try_index), force=False)
        if recorder is None:
            raise RecordError(f"rollout {rollout_id}: its try {try_index} has ended; start another with new_try=True")
        return recorder

    def _take_over(self, key: Key, *, force: bool) -> RolloutRecorder | None:
        """Take over a rollout that another process left open, or return None if it has ended."""
        launch, journal = self._writer.launch, self._writer.journal()

        def shards() -> list[ShardSource]:
            launch.tries(key[0])
            return launch.shards_holding(key[0])

        taken = take_over(self.directory, journal, key, shards, force=force)
        if taken is None:
            return None
        journal.now_ns(launch.latest_ns(key[0]))  # events from now on come after those of the earlier writers
        return self._writer.start(taken.head, taken.sessions)

    def score(
        self,
        rollout_id: str,
        *,
        reward: object,
        terms: Mapping[str, object] | None = None,
        by: str | None = None,
        try_index: int | None = None,
        turn: str | None = None,
    ) -> None:
        """Reward a rollout, or one of its turns, also more than once. The latest reward counts, the history stays.

        Like all methods that append events, it accepts a rollout's id, a foreign id, or the beginning of an id. Without
        `try_index`, the reward goes to the try that counts: the latest finished one, else the latest.

        Example:

            tape.score(rollout.id, reward=0.5, terms={"correct": 1.0, "length": -0.5}, by="late-judge")
        """
        where = f"rollout {rollout_id}" if turn is None else f"turn {turn} of rollout {rollout_id}"
        data = score_data(reward, terms, where)
        if data is None:
            raise RecordError(f"{where}: no reward; give a number")
        self._writer.encode(NewEvent(EventKind.SCORE, rollout_id, data, by, try_index, turn)).append()

    def tag(self, rollout_id: str, *tags: str, by: str | None = None, try_index: int | None = None) -> None:
        """Set the tags of a rollout, on all its tries or on one. They replace its earlier tags."""
        data = {"tags": list(as_texts(tags, f"rollout {rollout_id}: tags"))}
        self._writer.encode(NewEvent(EventKind.TAG, rollout_id, data, by, try_index)).append()

    def add_tags(self, rollout_id: str, *tags: str, **options: Unpack[AnnotationOptions]) -> None:
        """Add tags to a rollout, to a turn, or to some of its tokens. The tags that are there stay.

        Args:
            rollout_id: The rollout.
            tags: The tags.
            turn: The id of a turn of it. Without one, the tags are the rollout's.
            tokens: Where tokens of that turn start and stop among its ids. Those of its prompt come first.
            by: Who adds the tags.
            try_index: Which try is meant. Without it, tags go to all tries.

        Example:

            tape.add_tags(rollout.id, "reward-hack", by="ada")
            tape.add_tags(rollout.id, "bookmark", turn=turn.id, tokens=(120, 121), by="ada")
        """
        self._writer.encode(retag_event(rollout_id, added=tags, **options)).append()

    def remove_tags(self, rollout_id: str, *tags: str, **options: Unpack[AnnotationOptions]) -> None:
        """Remove tags from where they were added. The options are those of `add_tags`."""
        self._writer.encode(retag_event(rollout_id, removed=tags, **options)).append()

    def add_note(self, rollout_id: str, text: str, **options: Unpack[AnnotationOptions]) -> str:
        """Write a note on a rollout, on a turn, or on some of its tokens, and return the note's id.

        The options are those of `add_tags`. Without `try_index` the note goes to the try that counts, as a reward does.

        Example:

            note = tape.add_note(rollout.id, "it deletes the failing test", turn=turn.id, by="ada")
            tape.remove_note(rollout.id, note, by="ada")
        """
        event = note_event(rollout_id, text, **options)
        self._writer.encode(event).append()
        return str(event.data["note"])

    def edit_note(self, rollout_id: str, note_id: str, text: str, *, by: str | None = None) -> None:
        """Change the text of a note. The earlier text stays in the history."""
        self._writer.encode(change_note_event(self.run(), rollout_id, note_id, text, by)).append()

    def remove_note(self, rollout_id: str, note_id: str, *, by: str | None = None) -> None:
        """Take a note back. It stays in the history."""
        self._writer.encode(change_note_event(self.run(), rollout_id, note_id, None, by)).append()

    def filter(
        self, rollout_id: str, reason: str | None, *, by: str | None = None, try_index: int | None = None
    ) -> None:
        """Keep a rollout, all its tries or one, out of training for a reason. None takes the filter back."""
        data = {"reason": as_text(reason, f"rollout {rollout_id}: the reason of its filter")}
        self._writer.encode(NewEvent(EventKind.FILTER, rollout_id, data, by, try_index)).append()

    def append_event(
        self,
        kind: EventKind,
        rollout_id: str,
        data: dict[str, Any],
        *,
        by: str | None = None,
        try_index: int | None = None,
    ) -> None:
        """Append an event about a rollout, of any kind but a finish. EventKind describes `data`."""
        self._writer.encode(NewEvent(kind, rollout_id, data, by, try_index)).append()

    def append_events(self, events: Iterable[NewEvent]) -> None:
        """Append many events in one transaction, which is much faster. If one is refused, none is kept."""
        self._writer.encode_all(events).append()

    def append_run_event(self, kind: EventKind, data: dict[str, Any]) -> None:
        """Append an event about the run as a whole. EventKind describes `data`."""
        self._writer.encode_run_event(kind, data).append()

    def announce_version(self, version: str | int) -> None:
        """Announce that a weight version is now in use. Versions are ordered as they are announced."""
        data = {"version": as_version(version, f"run {self.name}: the weight version")}
        self.append_run_event(EventKind.VERSION, data)

    def mark_delivered(self, turn_id: str, delivery: Delivery | str = Delivery.DELIVERED) -> None:
        """Record whether the client got a turn's reply."""
        self._writer.encode_delivery(turn_id, delivery).append()

    def mark_delivered_async(self, turn_id: str, delivery: Delivery | str = Delivery.DELIVERED) -> asyncio.Future[None]:
        """As `mark_delivered`, from a coroutine. The future is done when it is durable, and need not be awaited."""
        return self._writer.submit_delivery(turn_id, delivery)

    def next_try(self, rollout_id: str) -> int:
        """The number that the next try of a rollout would have, or 0 if it has no try so far."""
        rollout_id = as_text(rollout_id, "the id of a rollout") or ""
        with self._writer.lock:
            self._writer.journal()
            return max(self._writer.launch.tries(rollout_id), default=-1) + 1

    def look_again(self) -> None:
        """Make the next call look at remote places too, which are usually looked at only every 30 seconds."""
        self._writer.launch.look_again()

    def run(self) -> Run:
        """A reader of the same run."""
        return read(self.directory.path)

    def groups(self, **options: "Unpack[GroupOptions]") -> "GroupStream":
        """Whole groups for a trainer, as they complete, by `async for` or `for`.

        It is the same as `rolltape.groups.groups`, which describes the options.
        """
        from rolltape.groups.stream import groups

        return groups(self, **options)

    def close(self) -> None:
        """End recording. Rollouts still open are recorded as failed. A second call does nothing."""
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name not in _RENAMED:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            warnings.warn(f"Tape.{name} is now {_RENAMED[name]}", DeprecationWarning, stacklevel=2)
            return getattr(self, _RENAMED[name])


def open_tape(
    path: str | os.PathLike[str],
    name: str | None = None,
    durability: Durability | str = Durability.PROCESS,
    summarize: Summarize | None = None,
) -> Tape:
    """Open a run for recording. `summarize` computes the summary of an ended rollout. Without it, none is computed."""
    level = as_member(Durability, durability, f"run {os.fspath(path)}")
    return Tape(RunDirectory.made_or_opened(path, name), level, summarize)

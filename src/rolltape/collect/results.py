"""What came of attempts: a result for whoever waits for it, and the record that `rolltape collect -o` writes."""

import contextlib
import fcntl
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rolltape.collect.environments.protocol import Ended, Message, Score
from rolltape.errors import RecordError
from rolltape.records.jsonable import encode_numbers
from rolltape.records.rollout import Rollout, RolloutHead, Status, StopReason
from rolltape.records.trace import Trace
from rolltape.records.turn import Turn
from rolltape.tape.rundir import PRIVATE_FILE, is_in_run
from rolltape.traces import trace_of
from rolltape.traces.build import final_reward, main_branch

RECORD_SCHEMA = "rolltape.collected/1"  # a field may be added; a change of meaning raises the version


class RecordInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who made a rollout and for which step, how much it took, and how the agent ended."""

    agent: str | None = None
    seat: str | None = None  # None: the episode has one seat
    model: str | None = None
    step: int  # the training step
    versions: tuple[str, ...] = ()  # of weights, as they first appear
    turns: int
    sampled_tokens: int
    exit_code: int | None = None  # of an agent that is a program
    signal: int | None = None  # that ended it
    timed_out: bool = False


class CollectedRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything about a rollout that has ended. Fields that are None are left out of files."""

    rollout: str
    try_index: int
    run: str
    group: str
    source: str | None = None  # with its split, as in the rollout's id
    split: str | None = None
    task_index: int | None = None  # the task's position in the source
    task_id: str | None = None
    attempt: int
    status: Status
    done: bool  # it has finished: the outcome is the policy's own
    stop_reason: StopReason | None = None
    reason: str | None = None  # why it failed, or why it has no reward
    reward: float | None = None
    reward_terms: dict[str, float] = {}
    content: str | None = None  # the last reply's text, or what a program printed
    prompt: list[Message] | None = None  # the first turn's; None: nothing was asked
    messages: list[Message] | None = None  # the conversation as it was at the end
    task: Any = None
    metrics: dict[str, Any] | None = None  # the last value of each name
    info: RecordInfo
    trace: Trace | None = None

    def to_dict(self) -> dict[str, Any]:
        """The record as plain values, absent fields left out."""
        plain: dict[str, Any] = {"schema": RECORD_SCHEMA, **msgspec.to_builtins(self)}
        if self.trace is not None:
            plain["trace"] = self.trace.to_dict()
        return plain


class RolloutResult(NamedTuple):
    """What came of one seat of one attempt: one rollout that has ended."""

    rollout: str
    try_index: int
    task_index: int  # the task's position in its source
    task: str
    attempt: int
    seat: str
    status: Status
    reason: str | None  # why it failed, or why it has no reward
    stop_reason: StopReason | None = None
    reward: float | None = None
    turns: int = 0
    sampled_tokens: int = 0
    ended: Ended | None = None  # None: the infrastructure broke it, or it ended before
    before: bool = False  # it had ended in an earlier process, and is compared with others only now
    record: CollectedRecord | None = None  # where `CollectSettings.with_records` asks for it
    fates: dict[str, int] | None = None  # tokens by fate under the default policy, where `with_fates` asks for it

    @classmethod
    def of(cls, head: RolloutHead, task_index: int, seat: str, **fields: Any) -> "RolloutResult":
        """The result of the rollout with this head."""
        task = head.task_id or head.group[:8]
        return cls(head.id, head.try_index, task_index, task, head.attempt, seat, **fields)


def describe_error(error: BaseException) -> str:
    """An error as a reason in a record."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def build_record(
    rollout: Rollout,
    *,
    task_index: int | None = None,
    seat: str | None = None,
    ended: Ended | None = None,
    agent_end: Mapping[str, Any] | None = None,
    traced: bool = True,
) -> CollectedRecord:
    """The record of a rollout as it is on the tape.

    `ended` is how its agent ended, where that is still known. `agent_end` has its exit code, signal and time-out; None
    means that they are read from the trace.
    """
    head, outcome = rollout.head, rollout.outcome
    trace = trace_of(rollout)
    turns = [turn for session in rollout.sessions[:1] for turn in main_branch(session)]
    how = (trace.extra or {}) if agent_end is None else agent_end
    return CollectedRecord(
        rollout=head.id,
        try_index=head.try_index,
        run=head.run,
        group=head.group,
        source=head.source,
        split=head.split,
        task_index=task_index,
        task_id=head.task_id,
        attempt=head.attempt,
        status=outcome.status,
        done=outcome.status is Status.FINISHED,
        stop_reason=outcome.stop_reason,
        reason=outcome.reason,
        reward=outcome.reward,
        reward_terms=outcome.reward_terms,
        content=ended.text if ended is not None else _last_text(turns),
        prompt=turns[0].prompt_messages if turns else None,
        messages=list(ended.messages) if ended is not None and ended.messages else _conversation(turns),
        task=head.task,
        metrics=_last_metrics(trace),
        info=RecordInfo(
            agent=head.agent,
            seat=seat,
            model=head.model,
            step=head.step,
            versions=trace.versions,
            turns=len(rollout.turns),
            sampled_tokens=sum(len(turn.sampled_ids) for turn in rollout.turns),
            exit_code=how.get("exit_code"),
            signal=how.get("signal"),
            timed_out=how.get("timed_out", False),
        ),
        trace=trace if traced else None,
    )


def add_score(record: CollectedRecord, score: Score, reason: str | None) -> CollectedRecord:
    """The record of a rollout that was scored after its group was complete, as the tape has it then."""
    scored = msgspec.structs.replace(record, reason=reason, trace=_add_score_to_trace(record.trace, score))
    if score.reward is None:
        return scored
    return msgspec.structs.replace(scored, reward=score.reward, reward_terms=dict(score.terms))


def _add_score_to_trace(trace: Trace | None, score: Score) -> Trace | None:
    if trace is None:
        return None
    data = score.to_data()
    trace = msgspec.structs.replace(trace, reward_data=data) if data else trace
    if score.reward is None:
        return trace
    rewards = [step.reward for step in trace.steps if step.reward is not None]
    final = final_reward(score.reward, rewards, trace.final_reward)
    terms = dict(score.terms)
    return msgspec.structs.replace(trace, total_reward=score.reward, final_reward=final, reward_terms=terms)


def _conversation(turns: list[Turn]) -> list[Message] | None:
    return [message.to_dict() for message in turns[-1].messages.to_list()] if turns else None


def _last_text(turns: list[Turn]) -> str | None:
    return next((turn.reply.text for turn in reversed(turns) if turn.reply is not None), None)


def _last_metrics(trace: Trace) -> dict[str, Any] | None:
    recorded = [step.metrics for step in trace.steps] + [trace.metrics]
    return {name: value for metrics in recorded if metrics for name, value in metrics.items()} or None


class RecordFile:
    """Appends records to a file as JSON lines. Several processes may append at once.

    Records that cannot be written are counted in `lost`; `report` is called for the first of them.
    """

    def __init__(self, path: Path, report: Callable[[str], None]) -> None:
        """Open the file, or create it; raises OSError if that fails."""
        self.path = path
        self.lost = 0
        self._report = report
        mode = PRIVATE_FILE if is_in_run(path) else 0o666
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, mode)
        self._plain = stat.S_ISREG(os.fstat(self._file).st_mode)

    def add(self, record: CollectedRecord) -> None:
        """Write a line; never raises."""
        try:
            self._append(encode_numbers(record.to_dict(), f"rollout {record.rollout}") + b"\n")
        except (OSError, RecordError) as error:
            self.lost += 1
            if self.lost == 1:
                why = (error.strerror or error) if isinstance(error, OSError) else error
                self._report(
                    f"{self.path}: a record could not be written ({why}); the run has it, and the rest goes on"
                )

    def close(self) -> None:
        os.close(self._file)

    def _append(self, line: bytes) -> None:
        with self._locked():
            end = os.fstat(self._file).st_size
            if self._plain and end and os.pread(self._file, 1, end - 1) != b"\n":
                line = b"\n" + line  # a writer that was killed left part of a line
            try:
                rest = memoryview(line)
                while rest:
                    rest = rest[os.write(self._file, rest) :]
            except OSError:
                if self._plain:
                    os.ftruncate(self._file, end)
                raise

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with contextlib.suppress(OSError):  # on a file system without locks only one process may write
            fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)

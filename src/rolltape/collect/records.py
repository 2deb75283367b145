"""`CollectedRecord`: everything about an ended rollout, from the tape, as a line of `rolltape collect -o`.

The file is derived from the tape: `RecordFile.add_missing` adds missing lines, and `rolltape export --what records`
writes it again.
"""

import contextlib
import fcntl
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from rolltape.collect.environments.protocol import Message, Score
from rolltape.errors import RecordError
from rolltape.export.files import destination
from rolltape.records.jsonable import encode_numbers, non_finite
from rolltape.records.rollout import UNGRADED, Rollout, RolloutHead, Status, StopReason
from rolltape.records.trace import Trace
from rolltape.records.turn import Turn
from rolltape.tape.run import Run
from rolltape.tape.rundir import PRIVATE_FILE, is_in_run
from rolltape.tape.stored import Key
from rolltape.traces import trace_of
from rolltape.traces.build import final_reward, main_branch

LAUNCH = "collect"  # in the `extra` of a rollout: the collector's facts at its launch
NOT_COMPARED = "its group is not compared yet"
RECORD_SCHEMA = "rolltape.collected/1"  # a field may be added; a change of meaning raises the version


class RecordInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The origin of a rollout: its agent and step, its usage, and how the agent ended."""

    agent: str | None = None
    seat: str | None = None  # None if the episode has one seat
    model: str | None = None
    step: int  # the training step
    versions: tuple[str, ...] = ()  # of weights, in the order of their first use
    turns: int
    sampled_tokens: int
    exit_code: int | None = None  # of an agent that is a program
    signal: int | None = None  # that ended it
    timed_out: bool = False


class CollectedRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything about an ended rollout. Files omit fields that are None."""

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
    prompt: list[Message] | None = None  # the first turn's; None if the model was not asked
    messages: list[Message] | None = None  # the final conversation
    task: Any = None
    metrics: dict[str, Any] | None = None  # the last value of each name
    info: RecordInfo
    trace: Trace | None = None

    def to_dict(self) -> dict[str, Any]:
        """The record as plain values, without absent fields."""
        plain: dict[str, Any] = {"schema": RECORD_SCHEMA, **msgspec.to_builtins(self)}
        if self.trace is not None:
            plain["trace"] = self.trace.to_dict()
        return plain


def launch_facts(head: RolloutHead) -> dict[str, Any]:
    """The facts that the collector recorded at the launch of a rollout."""
    facts: dict[str, Any] = head.extra.get(LAUNCH, {})
    return facts


def main_turns(rollout: Rollout) -> list[Turn]:
    """The turns on the main branch of a rollout's first session."""
    return [turn for session in rollout.sessions[:1] for turn in main_branch(session)]


def build_record(rollout: Rollout) -> CollectedRecord:
    """Build the record of a rollout from the tape."""
    head, outcome = rollout.head, rollout.outcome
    launch, trace, turns = launch_facts(head), trace_of(rollout), main_turns(rollout)
    end = trace.extra or {}
    return CollectedRecord(
        rollout=head.id,
        try_index=head.try_index,
        run=head.run,
        group=head.group,
        source=head.source,
        split=head.split,
        task_index=launch.get("task_index"),
        task_id=head.task_id,
        attempt=head.attempt,
        status=outcome.status,
        done=outcome.status is Status.FINISHED,
        stop_reason=outcome.stop_reason,
        reason=outcome.reason,
        reward=outcome.reward,
        reward_terms=outcome.reward_terms,
        content=end["text"] if "text" in end else _last_text(turns),
        prompt=turns[0].prompt_messages if turns else None,
        messages=_conversation(turns, trace),
        task=head.task,
        metrics=_last_metrics(trace),
        info=RecordInfo(
            agent=head.agent,
            seat=launch.get("seat"),
            model=head.model,
            step=head.step,
            versions=trace.versions,
            turns=len(rollout.turns),
            sampled_tokens=sum(len(turn.sampled_ids) for turn in rollout.turns),
            exit_code=end.get("exit_code"),
            signal=end.get("signal"),
            timed_out=end.get("timed_out", False),
        ),
        trace=None if launch.get("untraced") else trace,
    )


def add_score(record: CollectedRecord, score: Score) -> CollectedRecord:
    """The record of a rollout with the score from its group's comparison, as on the tape."""
    scored = msgspec.structs.replace(record, reason=score.reason, trace=_add_score_to_trace(record.trace, score))
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
    if trace.filtered == trace.reason:
        trace = msgspec.structs.replace(trace, filtered=None)  # only until it has a reward
    trace = msgspec.structs.replace(trace, reason=None)
    rewards = [step.reward for step in trace.steps if step.reward is not None]
    final = final_reward(score.reward, rewards, trace.final_reward)
    terms = dict(score.terms)
    return msgspec.structs.replace(trace, total_reward=score.reward, final_reward=final, reward_terms=terms)


def _conversation(turns: list[Turn], trace: Trace) -> list[Message] | None:
    """The messages of the last turn, and the results of tool calls in the last step."""
    if not turns:
        return None
    last = (trace.steps[-1].extra if trace.steps else None) or {}
    return [*chat_messages(turns[-1]), *last.get("tool_results", ())]


def chat_messages(turn: Turn) -> list[Message]:
    """The conversation after a turn, in chat form, without the ids that the gateway gives messages."""
    plain = (message.to_dict() for message in turn.messages.to_list())
    return [{name: value for name, value in message.items() if name != "id"} for message in plain]


def _last_text(turns: list[Turn]) -> str | None:
    return next((turn.reply.text for turn in reversed(turns) if turn.reply is not None), None)


def _last_metrics(trace: Trace) -> dict[str, Any] | None:
    recorded = [step.metrics for step in trace.steps] + [trace.metrics]
    return {name: value for metrics in recorded if metrics for name, value in metrics.items()} or None


def records_to_jsonl(rollouts: Iterable[Rollout], out: str) -> int:
    """Write the records of rollouts as JSON lines, and return how many were written."""
    written = 0
    with destination(out) as stream:
        for rollout in rollouts:
            stream.write(_encode_record(build_record(rollout)))
            written += 1
    return written


def _encode_record(record: CollectedRecord) -> bytes:
    return encode_numbers(record.to_dict(), f"rollout {record.rollout}") + b"\n"


class _RecordLine(msgspec.Struct):
    rollout: str
    try_index: int
    reward: float | dict[str, str] | None = None


_LINE = msgspec.json.Decoder(_RecordLine)


def _spell(reward: object) -> str | None:
    return None if reward is None else repr(float(reward))  # type: ignore[arg-type]


class RecordFile:
    """Appends records to a file as JSON lines. Several processes may append at once.

    A rollout gets another line only if its reward differs from that in its last line. If the file cannot be read back,
    such as a pipe, only lines of this process are known.
    Records that cannot be written are counted in `lost`; `report` is called for the first of them.
    """

    def __init__(self, path: Path, report: Callable[[str], None]) -> None:
        """Open the file, or create it; raises OSError if that fails."""
        self.path = path
        self.lost = 0
        self._report = report
        self._reported = False
        self._written: dict[Key, str | None] = {}  # the reward in the last line of each rollout
        mode = PRIVATE_FILE if is_in_run(path) else 0o666
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, mode)
        self._plain = stat.S_ISREG(os.fstat(self._file).st_mode)

    def add(self, record: CollectedRecord) -> None:
        """Write a line if it is new; never raises."""
        key, reward = (record.rollout, record.try_index), _spell(record.reward)
        if self._written.get(key, "") == reward:
            return
        try:
            self._append(_encode_record(record))
            self._written[key] = reward
        except (OSError, RecordError) as error:
            self.lost += 1
            if not self._reported:
                self._reported = True
                why = (error.strerror or error) if isinstance(error, OSError) else error
                self._report(
                    f"{self.path}: a record could not be written ({why}); the run has it, and the collection continues"
                )

    def add_missing(self, run: Run, *, step: int, source: str) -> None:
        """Write the records of a step and source that are missing or have another reward there; never raises OSError.

        Rollouts that wait for their group's comparison are written when it has been made.
        """
        if self._plain:
            self._written = self._read_rewards()
        self.lost = 0
        with run.snapshot() as held:
            missing = [
                row.key
                for row in held.index()
                if (row.step, row.source) == (step, source)
                and row.status in (Status.FINISHED, Status.FAILED)
                and row.reason != UNGRADED + NOT_COMPARED
                and self._written.get(row.key, "") != _spell(row.reward)
            ]
            for rollout in held.load_each(missing):
                self.add(build_record(rollout))

    def _read_rewards(self) -> dict[Key, str | None]:
        """The reward in the last line of each rollout. An incomplete line of a killed process is ignored."""
        found: dict[Key, str | None] = {}
        with contextlib.suppress(OSError), self.path.open("rb") as lines:
            for line in lines:
                with contextlib.suppress(msgspec.MsgspecError, ValueError):
                    known = _LINE.decode(line)
                    reward = non_finite(known.reward) if isinstance(known.reward, dict) else known.reward
                    found[known.rollout, known.try_index] = _spell(reward)
        return found

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

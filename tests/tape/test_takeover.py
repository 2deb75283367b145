"""A rollout whose writer died goes on in another process; a writer that wakes up adds nothing to it any more."""

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import rolltape
from rolltape.errors import DamagedTapeError, RecordError, TakenOverError, TapeWriteError
from rolltape.records.rollout import Status
from rolltape.tape import rundir
from rolltape.tape.journal import fences, file, reading
from rolltape.tape.journal.entries import row_crc
from rolltape.tape.journal.file import log_of
from rolltape.tape.journal.reading import JournalSource
from rolltape.tape.journal.writing import Journal
from rolltape.tape.recording.rollout import RolloutRecorder
from rolltape.tape.recording.session import SessionRecorder
from rolltape.tape.recording.tape import Tape
from rolltape.tape.repair.salvage import unseen_frames
from rolltape.tape.rundir import Place, locked
from rolltape.tape.shards.prune import prune
from rolltape.tape.shards.publish import Publisher, publish_left
from rolltape.tape.shards.seal import make_run, seal
from rolltape.traces.build import trace_of
from rolltape.traces.writer import TraceWriter
from taped import assistant, first_fields, first_turn, next_turn, record_session, spelled_turn, user

WORKER = """
import json, os, signal, sys, rolltape
from taped import first_turn, next_turn

tape = rolltape.open(sys.argv[1])
rollouts = {}

def start(task, **options):
    rollouts[task] = tape.rollout(task_id=task, **options)
    return [len(session.turns) for session in rollouts[task].sessions]

def turn(task, session=0):
    sessions = rollouts[task].sessions
    recorder = sessions[session] if session < len(sessions) else rollouts[task].session()
    turns = recorder.turns
    return (next_turn(recorder, turns[-1], len(turns)) if turns else first_turn(recorder)).id

def finish(task, reward):
    rollouts[task].finish(reward=reward)

def deliver(turn):
    tape.mark_delivered(turn)

def score(task, reward):
    tape.score(rollouts[task].id, reward=reward)

for line in sys.stdin:
    name, arguments, options = json.loads(line)
    try:
        answer = {"value": globals()[name](*arguments, **options)}
    except rolltape.RolltapeError as error:
        answer = {"error": type(error).__name__, "text": str(error)}
    print(json.dumps(answer), flush=True)
"""


class Worker:
    """Another process that records what it is told to, and waits in between."""

    def __init__(self, run: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(run)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{Path(__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}"},
        )

    def tell(self, name: str, *arguments: object, **options: object) -> None:
        assert self.process.stdin
        print(json.dumps([name, arguments, options]), file=self.process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def do(self, name: str, *arguments: object, **options: object) -> Any:
        self.tell(name, *arguments, **options)
        answer = self.answer()
        return answer.get("value", answer.get("error"))

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Callable[[], Worker]]:
    workers: list[Worker] = []

    def started() -> Worker:
        workers.append(Worker(tmp_path / "run"))
        return workers[-1]

    yield started
    for one in workers:
        one.kill()
        for pipe in (one.process.stdin, one.process.stdout):
            if pipe:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def left_by_a_dead_process(run: Path, record: Callable[[Tape], object]) -> None:
    """Record in a process that then dies without closing anything."""
    child = os.fork()
    if child == 0:
        try:
            record(rolltape.open(run))
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            traceback.print_exc()
            os._exit(1)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])


def three_turns(tape: Tape) -> None:
    record_session(tape.rollout(task_id="a", tags=["hard"], extra={"seed": 5}), 3)


def whole(session: SessionRecorder, messages: list[dict[str, Any]], ids: list[int], reply: str, n: int) -> None:
    """Record a turn by its whole prompt, and go on with it as an agent does."""
    sampled = [1000 + n, 2000 + n]
    session.record_turn(
        prompt_messages=messages, prompt_ids=ids, sampled_ids=sampled, reply=assistant(reply), finish="stop"
    )
    messages += [assistant(reply), user(f"next {n}")]
    ids += [*sampled, 7, 8]


def test_a_rollout_goes_on_in_another_process_after_kill_9(tmp_path: Path, worker: Callable[[], Worker]) -> None:
    first = worker()
    first.do("start", "a")
    for session in (0, 0, 1):
        first.do("turn", "a", session)
    first.kill()
    assert rolltape.read(tmp_path / "run").index()[0].outcome.status is Status.LOST
    second = worker()
    assert second.do("start", "a", resume=True) == [2, 1]
    (row,) = rolltape.read(tmp_path / "run").index()
    assert (row.outcome.status, row.turns, row.sampled_tokens, row.sessions) == (Status.RUNNING, 3, 7, 2)
    assert second.do("turn", "a", 0).endswith(".0.2")
    assert second.do("turn", "a", 2).endswith(".2.0")
    second.do("finish", "a", 1.0)
    second.kill()
    run = rolltape.read(tmp_path / "run")
    (rollout,) = run.rollouts()
    assert (rollout.status, rollout.reward) == (Status.FINISHED, 1.0)
    assert [[turn.sequence for turn in session.turns] for session in rollout.sessions] == [[0, 1, 2], [0], [0]]
    assert rollout.sessions[0].turns[2].prompt_ids[:8].tolist() == [1, 2, 3, 4, 5, 11, 11, 21]
    assert (rollout.head.epoch, rollout.head.try_index) == (1, 0)
    assert f"-{first.process.pid}-" in str(rollout.head.continues)
    assert run.problems() == []


def test_what_was_recorded_is_restored_as_it_was(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "tools": [{"name": "search"}],
        "model": "m",
        "renderer": "r",
        "logprob_kind": "raw",
        "stop_ids": [5],
    }

    def record(tape: Tape) -> None:
        session = tape.rollout(task_id="a", tags=["hard"], extra={"seed": 5}).session(**options)
        turn = first_turn(session, side_arrays={"experts": [[1], [2]]})
        next_turn(session, turn, tools=[{"name": "other"}], model="judge", auxiliary="a title")

    left_by_a_dead_process(tmp_path / "run", record)
    before = rolltape.read(tmp_path / "run").rollouts()
    (there,) = before
    with rolltape.open(tmp_path / "run") as tape:
        rollout = tape.rollout(task_id="a", resume=True)
        (session,) = rollout.sessions
        assert [spelled_turn(turn) for turn in session.turns] == [spelled_turn(turn) for turn in there.turns]
        assert (rollout.head.tags, rollout.head.extra) == (("hard",), {"seed": 5})
        assert (session.head, session.turn_count) == (there.sessions[0].head, 2)
        turn = next_turn(session, session.turns[0], 1)
        assert turn.root.tools == [{"name": "search"}]
        assert (turn.facts.model, turn.facts.renderer, turn.facts.logprob_kind) == ("m", "r", "raw")
        rollout.finish(reward=1.0)
        (row,) = tape.run().index()
        assert (row.turns, row.sampled_tokens, row.versions, row.head.tags) == (3, 8, ("7", "8"), ("hard",))


def test_tools_of_a_session_without_turns_must_be_given_again(tmp_path: Path) -> None:
    left_by_a_dead_process(tmp_path / "run", lambda tape: tape.rollout(task_id="a").session(tools=[{"name": "x"}]))
    with rolltape.open(tmp_path / "run") as tape:
        (session,) = tape.rollout(task_id="a", resume=True).sessions
        with pytest.raises(RecordError, match="the tools of its session are not on the tape; give tools"):
            first_turn(session)
        assert first_turn(session, tools=[{"name": "x"}]).root.tools == [{"name": "x"}]


def test_resume_starts_a_rollout_that_there_is_not_and_refuses_one_that_has_ended(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape:
        rollout = tape.rollout(task_id="a", resume=True)
        assert (rollout.sessions, rollout.head.epoch, rollout.try_index) == ((), 0, 0)
        with pytest.raises(RecordError, match="is open in this process already; continue with that recorder"):
            tape.rollout(task_id="a", resume=True)
        rollout.finish(reward=1.0)
        with pytest.raises(RecordError, match="its try 0 has ended; give new_try=True to run it again"):
            tape.rollout(task_id="a", resume=True)
        assert tape.rollout(task_id="a", resume=True, new_try=True).try_index == 1
    with rolltape.open(tmp_path / "run") as tape:
        with pytest.raises(RecordError, match="its try 1 has ended"):  # it failed when its tape was closed
            tape.rollout(task_id="a", resume=True)
        assert tape.rollout(task_id="a", resume=True, try_index=2).try_index == 2
    left_by_a_dead_process(tmp_path / "run", lambda tape: tape.rollout(task_id="a", new_try=True))
    with rolltape.open(tmp_path / "run") as tape:
        with pytest.raises(RecordError, match="is on the tape already"):
            tape.rollout(task_id="a")
        rollout = tape.rollout(task_id="a", resume=True, new_try=True)
        assert (rollout.try_index, rollout.head.epoch) == (3, 1)


def test_a_living_writer_is_named_and_keeps_its_rollout(tmp_path: Path, worker: Callable[[], Worker]) -> None:
    other = worker()
    other.do("start", "a")
    with rolltape.open(tmp_path / "run") as tape:
        with pytest.raises(
            RecordError, match=rf"is being recorded by process {other.process.pid} on .*, which is alive"
        ):
            tape.rollout(task_id="a", resume=True)
        other.stop()
        with pytest.raises(RecordError, match=rf"process {other.process.pid} on \S+ \(stopped\), which is alive"):
            tape.rollout(task_id="a", resume=True)
        other.go_on()
    assert other.do("turn", "a").endswith(".0.0")


def test_a_stopped_writer_that_wakes_up_is_refused(tmp_path: Path, worker: Callable[[], Worker]) -> None:
    other = worker()
    for task in ("a", "b"):
        other.do("start", task)
        turn = other.do("turn", task)
    other.stop()
    other.tell("turn", "a")
    with rolltape.open(tmp_path / "run") as tape:
        rollout = tape.rollout(task_id="a", resume="force")
        (session,) = rollout.sessions
        other.go_on()
        answer = other.answer()
        assert answer["error"] == "TakenOverError"
        assert f"was taken over by process {os.getpid()} on" in answer["text"]
        assert "let that process record it, or start another try with new_try=True" in answer["text"]
        assert other.do("turn", "a", 1) == "TakenOverError"
        assert other.do("finish", "a", 0.0) == "TakenOverError"
        assert other.do("deliver", session.turns[0].id) == "TakenOverError"
        assert other.do("start", "a", resume="force") == "RecordError"
        assert other.do("turn", "b").endswith(".0.1")  # nobody took that one
        assert other.do("deliver", turn) is None
        assert other.do("score", "a", 0.25) is None  # anybody may score a rollout
        next_turn(session, session.turns[0], 1)
        rollout.finish(reward=1.0)
    assert other.process.stdin
    other.process.stdin.close()
    assert other.process.wait() == 0  # its end does not trip over the rollout that is no longer its own
    rollouts = {rollout.head.task_id: rollout for rollout in rolltape.read(tmp_path / "run").rollouts()}
    assert [len(rollouts[task].turns) for task in "ab"] == [2, 2]
    assert rollouts["a"].outcome.reward == 1.0
    assert rolltape.read(tmp_path / "run").problems() == []


def _lines_of_a_commit(act: Callable[[], object], at: int, do: Callable[[], None]) -> None:
    """Run `act`; before the given line that the journal runs in it, counted from 0, do something else first."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.endswith(("journal/writing.py", "journal/entries.py", "journal/fences.py")):
            return None
        if event == "line":
            count += 1
            if count == at + 1:
                sys.settrace(None)
                do()
        return trace

    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(None)


def test_a_writer_stopped_at_any_line_of_a_commit_adds_all_of_a_turn_before_it_is_refused_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "_WAIT_FOR_LOCK_S", 0.0)
    answers, answered = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with rolltape.open(tmp_path / "run") as tape:
                for at in range(400):
                    rollout = tape.rollout(task_id=str(at))
                    session = rollout.session()
                    turn = first_turn(session)
                    stopped: list[int] = []

                    def stop(stopped: list[int] = stopped) -> None:
                        stopped.append(1)
                        os.kill(os.getpid(), signal.SIGSTOP)

                    became = b"kept"
                    try:
                        _lines_of_a_commit(lambda: next_turn(session, turn), at, stop)  # noqa: B023
                    except TakenOverError:
                        became = b"refused"
                    if not stopped:
                        break  # all lines were had
                    os.write(answered, became + b"\n")
                    assert rollout.is_open is (
                        became == b"kept" and not rollout._open.journal._fences.get(rollout.head.key)
                    )
            os._exit(0)
        finally:
            os._exit(1)
    seen: dict[str, int] = {}
    with rolltape.open(tmp_path / "run") as tape, os.fdopen(answers) as lines:
        os.close(answered)
        at = 0
        while os.WIFSTOPPED(status := os.waitpid(child, os.WUNTRACED)[1]):
            taken, refusal = None, ""
            try:
                taken = tape.rollout(task_id=str(at), resume="force")
                found = taken.sessions[0].turn_count
            except RecordError as error:
                refusal = str(error)
            os.kill(child, signal.SIGCONT)
            answer = lines.readline().strip()
            if taken is None:
                assert f"process {child} on" in refusal
                assert "holds the write lock" in refusal
                assert answer == "kept"
            else:
                assert (answer, found) in [("kept", 2), ("refused", 1)]
                next_turn(taken.sessions[0], taken.sessions[0].turns[-1], 5)
                taken.finish(reward=1.0)
            name = f"{answer}, {'the lock was held' if taken is None else 'taken'}"
            seen[name] = seen.get(name, 0) + 1
            at += 1
        assert os.waitstatus_to_exitcode(status) == 0
    assert seen.keys() == {"kept, the lock was held", "kept, taken", "refused, taken"}
    run = rolltape.read(tmp_path / "run")
    assert run.problems() == []
    assert {len(rollout.turns) for rollout in run.rollouts()} == {2, 3}


def test_a_writer_killed_at_any_line_of_a_commit_leaves_a_rollout_to_go_on_with(tmp_path: Path) -> None:
    at, counts = 0, []
    while True:

        def record(tape: Tape, at: int = at) -> None:
            session = tape.rollout(task_id="a").session()
            turn = first_turn(session)
            _lines_of_a_commit(lambda: next_turn(session, turn), at, lambda: os.kill(os.getpid(), signal.SIGKILL))
            os._exit(0)

        child = os.fork()
        if child == 0:
            try:
                record(rolltape.open(tmp_path / str(at)))
            finally:
                os._exit(1)
        if os.WIFEXITED(os.waitpid(child, 0)[1]):
            break
        with rolltape.open(tmp_path / str(at)) as tape, tape.rollout(task_id="a", resume=True) as rollout:
            (session,) = rollout.sessions
            counts.append(session.turn_count)
            next_turn(session, session.turns[-1], 5)
            rollout.finish(reward=1.0)
        assert rolltape.read(tmp_path / str(at)).problems() == []
        at += 5
    assert set(counts) == {1, 2}
    assert counts == sorted(counts)


def test_coroutines_of_a_writer_that_wakes_up_are_refused_and_others_are_not(tmp_path: Path) -> None:
    async def main() -> None:
        with rolltape.open(tmp_path / "run") as mine, rolltape.open(tmp_path / "run") as other:
            taken, kept = mine.rollout(task_id="a"), mine.rollout(task_id="b")
            turn = await taken.session().record_turn_async(**first_fields())
            kept_session = kept.session()
            lost = [taken.sessions[0].record_turn_async(**first_fields()) for _ in range(2)]
            stays = kept_session.record_turn_async(**first_fields())
            delivery = mine.mark_delivered_async(turn.id)
            theirs = other.rollout(task_id="a", resume="force")
            results = await asyncio.gather(*lost, stays, delivery, return_exceptions=True)
            assert [type(result).__name__ for result in results] == [
                "TakenOverError",
                "TakenOverError",
                "Turn",
                "TakenOverError",
            ]
            assert [len(one.sessions[0].turns) for one in (taken, theirs, kept)] == [1, 1, 1]
            assert (taken.is_open, kept.is_open) == (False, True)
            with pytest.raises(TakenOverError):
                taken.session()
            with pytest.raises(TakenOverError):
                mine.mark_delivered(turn.id)
            theirs.finish()
            kept.finish()

    asyncio.run(main())
    assert rolltape.read(tmp_path / "run").problems() == []


def test_a_takeover_of_a_takeover_of_a_takeover(tmp_path: Path) -> None:
    left_by_a_dead_process(tmp_path / "run", three_turns)

    def go_on(tape: Tape) -> None:
        rollout = tape.rollout(task_id="a", resume=True)
        (session, *_) = rollout.sessions
        next_turn(session, session.turns[-1], len(session.turns))
        record_session(rollout, 1)

    for _ in range(3):
        left_by_a_dead_process(tmp_path / "run", go_on)
    run = rolltape.read(tmp_path / "run")
    (row,) = run.index()
    assert (row.outcome.status, row.head.epoch, row.sessions, row.turns) == (Status.LOST, 3, 4, 9)
    (rollout,) = run.rollouts()
    assert [len(session.turns) for session in rollout.sessions] == [6, 1, 1, 1]
    assert len(list((tmp_path / "run" / "journals").glob("*.sqlite"))) == 4
    assert run.problems() == []


@pytest.mark.parametrize("step", ["before the fence", "after the fence", "after the part"])
def test_a_taker_that_dies_on_the_way_hinders_nobody(tmp_path: Path, step: str) -> None:
    left_by_a_dead_process(tmp_path / "run", three_turns)

    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def half_taken(tape: Tape) -> None:
        if step == "before the fence":
            fences._set_fence = die
        elif step == "after the fence":
            Journal.append = die  # type: ignore[method-assign]
        tape.rollout(task_id="a", resume=True)

    left_by_a_dead_process(tmp_path / "run", half_taken)
    with rolltape.open(tmp_path / "run") as tape:
        rollout = tape.rollout(task_id="a", resume=True)
        assert rollout.head.epoch == (1 if step == "before the fence" else 2)
        assert rollout.sessions[0].turn_count == 3
        next_turn(rollout.sessions[0], rollout.sessions[0].turns[-1])
        rollout.finish(reward=1.0)
    run = rolltape.read(tmp_path / "run")
    assert [len(one.turns) for one in run.rollouts()] == [4]
    assert run.problems() == []


def test_of_two_takers_at_once_one_wins(tmp_path: Path) -> None:
    """The first stops between fence and part; the second comes then, and waits for the lock that the first holds."""
    left_by_a_dead_process(tmp_path / "run", three_turns)
    rolltape.open(tmp_path / "run").close()
    released, release = os.pipe()
    reached, reach = os.pipe()
    opened, opens = os.pipe()
    answers: list[int] = []
    children: list[int] = []
    for name in ("first", "second"):
        answer, answered = os.pipe()
        answers.append(answer)
        child = os.fork()
        children.append(child)
        if child == 0:
            try:
                with rolltape.open(tmp_path / "run") as tape:
                    if name == "first":
                        os.read(opened, 1)  # opening a run takes its lock
                        append = tape._writer._journal.append

                        def wait(*entries: Any, append: Any = append, **options: Any) -> None:
                            os.write(reach, b"x")
                            os.read(released, 1)
                            append(*entries, **options)

                        tape._writer._journal.append = wait  # type: ignore[method-assign]
                    else:
                        os.write(opens, b"x")
                        os.read(reached, 1)
                        os.write(release, b"x")  # whether it comes to the lock before or after that, it is the second
                    try:
                        rollout: RolloutRecorder | None = tape.rollout(task_id="a", resume=True)
                        os.write(answered, b"taken")
                    except RecordError as error:
                        rollout = None
                        os.write(answered, str(error).encode())
                    os.close(answered)
                    os.read(released, 1)
                    if rollout is not None:
                        rollout.finish(reward=1.0)
                os._exit(0)
            finally:
                os._exit(1)
        os.close(answered)
    told = [_read(answer) for answer in answers]
    os.write(release, b"x" * 8)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    assert told[0] == "taken"
    assert f"is being recorded by process {children[0]} on" in told[1]
    run = rolltape.read(tmp_path / "run")
    (there,) = run.rollouts()
    assert (there.head.epoch, there.status, len(there.turns)) == (1, Status.FINISHED, 3)
    assert run.problems() == []
    for pipe in (released, release, reached, reach, opened, opens):
        os.close(pipe)


def _read(descriptor: int) -> str:
    with os.fdopen(descriptor) as pipe:
        return pipe.read()


def test_only_the_owner_ends_a_rollout(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as first, rolltape.open(tmp_path / "run") as second:
        rollout = first.rollout(task_id="a")
        record_session(rollout, 1)
        taken = second.rollout(task_id="a", resume="force")
        with pytest.raises(TakenOverError):
            rollout.fail("it hangs")
        assert second.run().index()[0].outcome.status is Status.RUNNING
        taken.finish(reward=0.5)
        assert second.run().index()[0].outcome.reward == 0.5
        rollout = first.rollout(task_id="b")
        second.rollout(task_id="b", resume="force").finish()
        with pytest.raises(TakenOverError), rollout:
            pass  # left without a finish, which is not for this process to record


def test_sealed_before_and_after_a_rollout_is_taken_over_it_is_there_once(tmp_path: Path) -> None:
    left_by_a_dead_process(tmp_path / "run", three_turns)
    assert (seal(tmp_path / "run").rollouts, len(_journals(tmp_path))) == (1, 0)
    for turns in (4, 5):
        with rolltape.open(tmp_path / "run") as tape:
            rollout = tape.rollout(task_id="a", resume=True)
            (session,) = rollout.sessions
            assert rollout.head.epoch == turns - 3
            next_turn(session, session.turns[-1], turns)
            assert tape.run().index()[0].turns == turns
            report = seal(tmp_path / "run")
            assert (report.rollouts, report.running) == (0, 1)
            if turns == 5:
                rollout.finish(reward=1.0)
            else:
                tape._writer._closed = True  # it dies: nobody ends what is open
                tape._writer._closer()
        before = [spelled_turn(turn) for turn in next(tape.run().rollouts()).turns]
        report = seal(tmp_path / "run")
        assert (report.rollouts, report.turns, len(report.removed), report.kept) == (1, turns, 1, {})
        run = rolltape.read(tmp_path / "run")
        (there,) = run.rollouts()
        assert [spelled_turn(turn) for turn in there.turns] == before
        assert len(before) == turns
        assert run.problems() == [] == run.verify_shards()
        assert _journals(tmp_path) == []
    assert there.outcome.reward == 1.0
    assert seal(tmp_path / "run").rollouts == 0


def _journals(folder: Path) -> list[str]:
    return sorted(path.stem for path in (folder / "run" / "journals").glob("*.sqlite"))


def test_a_journal_stays_as_long_as_a_rollout_that_began_in_it_goes_on(tmp_path: Path) -> None:
    def two(tape: Tape) -> None:
        three_turns(tape)
        with tape.rollout(task_id="b") as rollout:
            record_session(rollout, 2)
            rollout.finish(reward=1.0)

    left_by_a_dead_process(tmp_path / "run", two)
    (old,) = _journals(tmp_path)
    with rolltape.open(tmp_path / "run") as tape:
        rollout = tape.rollout(task_id="a", resume=True)
        report = seal(tmp_path / "run")
        assert (report.rollouts, report.kept[old]) == (1, "1 of its rollouts are not sealed")
        next_turn(rollout.sessions[0], rollout.sessions[0].turns[-1])
        rollout.finish(reward=1.0)
        report = seal(tmp_path / "run")  # its new owner is alive still, and what it recorded is sealed
        assert (report.rollouts, report.removed) == (1, (old,))
    assert len(seal(tmp_path / "run").removed) == 1
    run = rolltape.read(tmp_path / "run")
    assert [len(one.turns) for one in run.rollouts()] == [4, 2]
    assert run.problems() == []


def test_a_rollout_that_was_taken_over_can_be_pruned(tmp_path: Path) -> None:
    left_by_a_dead_process(tmp_path / "run", three_turns)
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="a", resume=True) as rollout:
        next_turn(rollout.sessions[0], rollout.sessions[0].turns[-1])
        rollout.finish(reward=1.0)
    report = prune(tmp_path / "run", steps=[0])
    assert (report.rollouts, report.turns, _journals(tmp_path)) == (1, 4, [])
    run = rolltape.read(tmp_path / "run")
    (row,) = run.index()
    assert (row.turns, row.pruned, row.outcome.reward) == (4, ("turns",), 1.0)
    assert run.problems() == []


def test_turns_that_were_pruned_cannot_be_gone_on_with(tmp_path: Path) -> None:
    left_by_a_dead_process(tmp_path / "run", three_turns)
    prune(tmp_path / "run", steps=[0])
    with rolltape.open(tmp_path / "run") as tape:
        with pytest.raises(DamagedTapeError, match="are damaged or were pruned; start another with new_try=True"):
            tape.rollout(task_id="a", resume=True)
        assert tape.rollout(task_id="a", new_try=True).try_index == 1


@pytest.mark.parametrize("published_first", [True, False])
def test_a_rollout_that_was_taken_over_is_published_whole(tmp_path: Path, published_first: bool) -> None:
    def left(tape: Tape) -> None:
        rollout = tape.rollout(task_id="a")
        turns = record_session(rollout, 3, delivery="unknown")
        tape.mark_delivered(turns[0].id)

    left_by_a_dead_process(tmp_path / "run", left)
    with rolltape.open(tmp_path / "run") as tape:
        place = Place(tmp_path / "shared")
        make_run(place, tape.directory)
        if published_first:
            publish_left(tape.directory, place)
            tape.directory.add_published(place.url)
            tape.look_again()
            assert rolltape.read(place.url).index()[0].outcome.status is Status.LOST
        publisher = Publisher(tape, place)
        rollout = tape.rollout(task_id="a", resume=True)
        next_turn(rollout.sessions[0], rollout.sessions[0].turns[-1])
        assert publisher.publish() == frozenset()
        assert publish_left(tape.directory, place) == frozenset()
        assert len(_journals(tmp_path)) == (1 if published_first else 2)
        rollout.finish(reward=1.0)
        here = next(tape.run().rollouts())
        assert publisher.publish() == {rollout.head.key}
        (there,) = rolltape.read(place.url).rollouts()
        assert [spelled_turn(turn) for turn in there.turns] == [spelled_turn(turn) for turn in here.turns]
        assert [turn.facts.delivery for turn in there.turns][:2] == ["delivered", "delivered"]
        assert (there.reward, there.head, len(there.events)) == (1.0, rollout.head, 3)
    publish_left(tape.directory, place)
    assert _journals(tmp_path) == []
    read = rolltape.read(place.url)
    assert [len(one.turns) for one in read.rollouts()] == [4]
    assert read.problems() == []


def test_what_two_dead_writers_left_of_a_rollout_is_published_as_one(tmp_path: Path) -> None:
    left_by_a_dead_process(tmp_path / "run", three_turns)

    def go_on(tape: Tape) -> None:
        (session,) = tape.rollout(task_id="a", resume=True).sessions
        next_turn(session, session.turns[-1])

    left_by_a_dead_process(tmp_path / "run", go_on)
    with rolltape.open(tmp_path / "run") as tape:
        place = Place(tmp_path / "shared")
        make_run(place, tape.directory)
        publish_left(tape.directory, place)
        assert len(_journals(tmp_path)) == 1
    run = rolltape.read(place.url)
    assert [(row.turns, row.outcome.status, row.head.epoch) for row in run.index()] == [(4, Status.LOST, 1)]
    assert [len(one.turns) for one in run.rollouts()] == [4]
    assert run.problems() == []


def test_a_journal_that_is_sealed_and_removed_meanwhile_is_found_in_its_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_by_a_dead_process(tmp_path / "run", three_turns)

    def sealed_meanwhile(path: Path) -> JournalSource:
        monkeypatch.setattr(fences, "JournalSource", JournalSource)
        seal(tmp_path / "run")
        return JournalSource(path)

    monkeypatch.setattr(fences, "JournalSource", sealed_meanwhile)
    with rolltape.open(tmp_path / "run") as tape:
        rollout = tape.rollout(task_id="a", resume=True)
        assert rollout.sessions[0].turn_count == 3
        rollout.finish()
    assert rolltape.read(tmp_path / "run").problems() == []


def test_disk_grows_with_what_is_new_across_takeovers(tmp_path: Path) -> None:
    messages, ids = [user("begin")], list(range(2000))

    def some_turns(tape: Tape) -> None:
        rollout = tape.rollout(task_id="a", resume=True)
        session = rollout.sessions[0] if rollout.sessions else rollout.session()
        for n in range(len(session.turns), len(session.turns) + 20):
            whole(session, messages, ids, f"reply {n}", n)

    for part in range(5):
        left_by_a_dead_process(tmp_path / "run", some_turns)
        for n in range(part * 20, part * 20 + 20):  # what the child has added to its own copies
            messages += [assistant(f"reply {n}"), user(f"next {n}")]
            ids += [1000 + n, 2000 + n, 7, 8]
    for path in (tmp_path / "run" / "journals").glob("*.sqlite"):
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
            rows = connection.execute("SELECT parent, length(new_ids), length(messages) FROM turns").fetchall()
        assert [row for row in rows if row[0] is None] in ([], [(None, 8000, 8)])
        assert all(row[1:] == (8, 8) for row in rows if row[0] is not None)
    (rollout,) = rolltape.read(tmp_path / "run").rollouts()
    np.testing.assert_array_equal(rollout.turns[-1].tokens.to_numpy(), ids[:-2])
    assert len(rollout.turns) == 100


def test_a_prompt_that_was_shortened_is_coded_against_the_turn_that_it_goes_on_from(tmp_path: Path) -> None:
    def forked(tape: Tape) -> None:
        session = tape.rollout(task_id="a").session()
        messages, ids = [user("begin")], list(range(100))
        for n in range(3):
            whole(session, messages, ids, f"reply {n}", n)
        whole(session, [*messages[:2], user("instead")], [*ids[:102], 9], "other", 3)

    left_by_a_dead_process(tmp_path / "run", forked)
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="a", resume=True) as rollout:
        (session,) = rollout.sessions
        for sequence in (0, 2, 3):
            turn = session.turns[sequence]
            prompt = [*(message.to_dict() for message in turn.messages.to_list()), user("more")]
            coded = session._intake.code(
                prompt_messages=prompt,
                prompt_ids=[*turn.tokens.to_numpy().tolist(), 5],
                sampled_ids=[1],
                reply=assistant("ok"),
                finish="stop",
            )
            assert (coded.parent, coded.keep_messages) == (sequence, len(prompt) - 1)


def test_the_trace_of_a_rollout_goes_on_with_its_next_step(tmp_path: Path) -> None:
    def record(tape: Tape) -> None:
        trace = TraceWriter(tape.rollout(task_id="a"))
        for reward in (0.25, 0.5):
            trace.step(prompt=[user("go")], policy_response=assistant("ok"), reward=reward)

    left_by_a_dead_process(tmp_path / "run", record)
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="a", resume=True) as rollout:
        trace = TraceWriter(rollout)
        assert trace.total_reward == 0.75
        assert trace.step(prompt=[user("go"), assistant("ok"), user("on")], reward=1.0) == 2
        rollout.finish(reward=trace.final())
    (there,) = rolltape.read(tmp_path / "run").rollouts()
    assert there.reward == 1.75
    assert [step.reward for step in trace_of(there).steps] == [0.25, 0.5, 1.0]


def test_a_process_that_holds_the_lock_of_the_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "_LONG_S", 0.0)
    left_by_a_dead_process(tmp_path / "run", three_turns)
    with rolltape.open(tmp_path / "run") as tape:
        child = os.fork()
        if child == 0:
            with locked(tmp_path / "run"):
                os.kill(os.getpid(), signal.SIGSTOP)
            os._exit(0)
        os.waitpid(child, os.WUNTRACED)
        named = rf"process {child} holds run\.lock; end that process, and try again"
        with pytest.raises(TapeWriteError, match=named):
            tape.rollout(task_id="a", resume=True)
        with pytest.raises(TapeWriteError, match=named):
            tape.rollout(task_id="new")
        with pytest.raises(TapeWriteError, match=named):
            rolltape.open(tmp_path / "run")
        os.kill(child, signal.SIGCONT)
        os.waitpid(child, 0)
        assert tape.rollout(task_id="a", resume=True).head.epoch == 1


def test_a_session_of_0_1_0_goes_on_with_what_its_last_turn_had(tmp_path: Path) -> None:
    """Its journal has no table of fences, its session no defaults."""

    def record(tape: Tape) -> None:
        session = tape.rollout(task_id="a").session(tools=[{"name": "x"}], model="m")
        first_turn(session)
        next_turn(session, session.turns[-1], model="judge", auxiliary="a title")

    left_by_a_dead_process(tmp_path / "run", record)
    (path,) = (tmp_path / "run" / "journals").glob("*.sqlite")
    _make_old(path)
    with rolltape.open(tmp_path / "run") as tape:
        rollout = tape.rollout(task_id="a", resume=True)
        (session,) = rollout.sessions
        turn = next_turn(session, session.turns[0], 4)
        assert (turn.root.tools, turn.facts.model, turn.sequence) == ([{"name": "x"}], "m", 2)
        rollout.finish(reward=1.0)
    run = rolltape.read(tmp_path / "run")
    assert run.problems() == []
    assert len(next(run.rollouts()).turns) == 3
    assert seal(tmp_path / "run").kept == {}


def _make_old(path: Path) -> None:
    with _changing(path) as connection:
        connection.execute("DROP TABLE fences")
        for pk, rollout, ordinal, head, _ in connection.execute("SELECT * FROM sessions").fetchall():
            fields = json.loads(head)
            del fields["root"], fields["defaults"]
            old = json.dumps(fields).encode()
            row = (old, row_crc(pk, rollout, ordinal, old), pk)
            connection.execute("UPDATE sessions SET head = ?, crc = ? WHERE pk = ?", row)


@contextlib.contextmanager
def _changing(path: Path) -> Iterator[sqlite3.Connection]:
    """A journal to change; its log stays, since what closes last does not write."""
    with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as reading:
        reading.execute("SELECT * FROM about").fetchall()
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
            yield connection


def test_a_living_writer_of_0_1_0_cannot_be_refused_and_keeps_its_rollout(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as old, rolltape.open(tmp_path / "run") as tape:
        record_session(old.rollout(task_id="a"), 1)
        old._writer._journal._connection.execute("DROP TABLE fences")
        with pytest.raises(RecordError, match=r"runs version 0\.1\.0, which cannot be refused; end it first"):
            tape.rollout(task_id="a", resume="force")


def test_a_takeover_leaves_the_log_of_a_dead_writer_where_readers_expect_it(tmp_path: Path) -> None:
    left_by_a_dead_process(tmp_path / "run", three_turns)
    (path,) = (tmp_path / "run" / "journals").glob("*.sqlite")
    with rolltape.open(tmp_path / "run") as tape:
        tape.rollout(task_id="a", resume=True).finish()
    assert log_of(path).stat().st_size > 0
    assert rolltape.read(tmp_path / "run").problems() == []


@pytest.mark.parametrize("damage", ["torn log", "a turn"])
def test_a_damaged_journal_is_left_alone(tmp_path: Path, damage: str) -> None:
    left_by_a_dead_process(tmp_path / "run", three_turns)
    (path,) = (tmp_path / "run" / "journals").glob("*.sqlite")
    log = log_of(path)
    if damage == "torn log":
        data = bytearray(log.read_bytes())
        data[-4500] ^= 0xFF
        log.write_bytes(data)
    else:
        with _changing(path) as connection:
            connection.execute("UPDATE turns SET crc = crc + 1")
    before = {one.name: one.read_bytes() for one in (path, log) if one.exists()}
    with rolltape.open(tmp_path / "run") as tape, pytest.raises(DamagedTapeError, match=f"journal {path}"):
        tape.rollout(task_id="a", resume=True)
    if damage == "torn log":
        assert {one.name: one.read_bytes() for one in (path, log)} == before


def test_a_journal_whose_log_is_missing_is_left_alone(tmp_path: Path) -> None:
    left_by_a_dead_process(tmp_path / "run", three_turns)
    (path,) = (tmp_path / "run" / "journals").glob("*.sqlite")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # then it closes last, and the log goes
    with rolltape.open(tmp_path / "run") as tape, pytest.raises(DamagedTapeError, match=r"its log \(-wal\) is missing"):
        tape.rollout(task_id="a", resume=True)
    assert any("its log (-wal) is missing" in str(one) for one in rolltape.read(tmp_path / "run").problems())


def test_a_part_that_is_missing_is_a_problem_and_its_turns_are_named(tmp_path: Path) -> None:
    left_by_a_dead_process(tmp_path / "run", three_turns)
    (old,) = (tmp_path / "run" / "journals").glob("*.sqlite")
    with rolltape.open(tmp_path / "run") as tape:
        rollout = tape.rollout(task_id="a", resume=True)
        next_turn(rollout.sessions[0], rollout.sessions[0].turns[-1])
        rollout.finish(reward=1.0)
    for path in old.parent.glob(f"{old.stem}*"):
        path.unlink()
    problems = [str(problem) for problem in rolltape.read(tmp_path / "run").problems()]
    assert any(f"was taken over from {old.stem}, whose part is missing" in problem for problem in problems)
    assert any("has a gap before turn 3" in problem for problem in problems)
    left = rolltape.read(tmp_path / "run").index()[0]
    assert (left.turns, left.outcome.status) == (4, Status.FINISHED)


def test_a_fence_that_is_being_written_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left_by_a_dead_process(tmp_path / "run", three_turns)
    (path,) = (tmp_path / "run" / "journals").glob("*.sqlite")
    counts = iter([2, 1])  # frames that are in the log, and that SQLite counts in the next moment
    monkeypatch.setattr(reading, "unseen_frames", lambda journal: next(counts, None) or unseen_frames(journal))
    with contextlib.closing(JournalSource(path)) as source:
        assert source.problems() == []
    assert next(counts, None) is None

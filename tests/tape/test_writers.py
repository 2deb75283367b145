"""Writers: many at once, killed, forked, out of disk. What was acknowledged is on the tape."""

import asyncio
import contextlib
import inspect
import itertools
import os
import random
import shutil
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

import rolltape
from rolltape.errors import ClosedError, RecordError, TapeWriteError
from rolltape.records.rollout import Status
from rolltape.tape.index import launch
from rolltape.tape.journal.entries import Batch, encode_event
from rolltape.tape.journal.writing import Journal, Ticket
from rolltape.tape.recording.rollout import RolloutRecorder
from rolltape.tape.recording.session import SessionRecorder
from rolltape.tape.recording.tape import Tape
from rolltape.tape.recording.writer import TapeWriter
from rolltape.tape.rundir import RunDirectory
from rolltape.tape.stored import check_shortage
from taped import (
    finished,
    first_fields,
    first_turn,
    next_fields,
    next_turn,
    python,
    record_run,
    record_session,
)

WRITER = """
import sys, rolltape
from taped import first_turn, next_turn
with rolltape.open(sys.argv[1]) as tape:
    for rollout_index in range(int(sys.argv[3])):
        with tape.rollout(task_id=sys.argv[2], attempt=rollout_index) as rollout:
            session = rollout.session()
            turn = first_turn(session)
            print(turn.id, flush=True)
            for index in range(int(sys.argv[4])):
                turn = next_turn(session, turn, index)
                print(turn.id, flush=True)
            rollout.finish(reward=1.0)
"""


def test_many_threads_share_a_tape(tmp_path: Path) -> None:
    tape = rolltape.open(tmp_path / "run")

    def work(name: int) -> None:
        with tape.rollout(task_id=f"task-{name}") as rollout:
            record_session(rollout, 20)
            rollout.finish(reward=float(name))

    threads = [threading.Thread(target=work, args=(name,)) for name in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run = tape.run()
    assert sorted(row.outcome.reward or 0.0 for row in run.index()) == [float(name) for name in range(16)]
    assert all(len(rollout.turns) == 20 for rollout in run.rollouts())
    tape.close()
    assert run.problems() == []


def test_threads_that_share_a_session_are_put_in_one_order(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="a") as rollout:
        session = rollout.session()
        first = first_turn(session)
        threads = [threading.Thread(target=next_turn, args=(session, first, index)) for index in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rollout.finish()
        assert [turn.sequence for turn in tape.run().rollout(rollout.id).turns] == list(range(21))


def test_readers_see_several_writers_as_one_run_while_they_write(tmp_path: Path) -> None:
    rolltape.open(tmp_path / "run").close()
    writers = [python(WRITER, str(tmp_path / "run"), f"task-{name}", "4", "30") for name in range(3)]
    run, seen = rolltape.read(tmp_path / "run"), 0
    while any(writer.poll() is None for writer in writers):
        rows = run.index()
        assert len(rows) >= seen
        seen = len(rows)
        for rollout in run.rollouts():
            assert [turn.sequence for turn in rollout.turns] == list(range(len(rollout.turns)))
            assert rollout.status is not Status.LOST or not rollout.writer_alive
        time.sleep(0.02)
    for writer in writers:
        finished(writer)
    assert [row.turns for row in run.index()] == [31] * 12
    assert run.problems() == []


def write_until_killed(path: Path, task: str, acknowledge: int) -> None:
    """Record without end, and tell of each turn after it was recorded."""
    tape = rolltape.open(path)
    for attempt in range(1_000_000):
        with tape.rollout(task_id=task, attempt=attempt) as rollout:
            session = rollout.session()
            turn = first_turn(session)
            for index in range(7):
                os.write(acknowledge, f"{turn.id}\n".encode())
                turn = next_turn(session, turn, index)
            os.write(acknowledge, f"{turn.id}\n".encode())
            rollout.finish(reward=1.0)


def write_until_killed_by_coroutines(path: Path, task: str, acknowledge: int) -> None:
    """As above, from eight sessions whose turns are committed together."""
    tape = rolltape.open(path)

    async def attempts(name: str) -> None:
        for attempt in range(1_000_000):
            with tape.rollout(task_id=f"{task}-{name}", attempt=attempt) as rollout:
                session = rollout.session()
                turn = await session.record_turn_async(**first_fields())
                for index in range(7):
                    os.write(acknowledge, f"{turn.id}\n".encode())
                    turn = await session.record_turn_async(after=turn, **next_fields(index))
                os.write(acknowledge, f"{turn.id}\n".encode())
                rollout.finish(reward=1.0)

    async def every() -> None:
        await asyncio.gather(*(attempts(name) for name in "abcdefgh"))

    asyncio.run(every())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "rounds", "sessions"), [(write_until_killed, 40, 1), (write_until_killed_by_coroutines, 15, 8)]
)
def test_every_acknowledged_turn_survives_kill_9(
    tmp_path: Path, write: Callable[[Path, str, int], None], rounds: int, sessions: int
) -> None:
    dice = random.Random(7)
    acknowledged: set[str] = set()
    for round_ in range(rounds):
        heard, told = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                write(tmp_path / "run", f"round-{round_}", told)
            finally:
                os._exit(1)
        os.close(told)
        with os.fdopen(heard) as pipe:
            acknowledged.update(pipe.readline().strip() for _ in range(dice.randint(1, 20 * sessions)))
            time.sleep(dice.uniform(0, 0.005))
            os.kill(child, signal.SIGKILL)
            assert os.waitpid(child, 0)[1] == signal.SIGKILL
            acknowledged.update(line.strip() for line in pipe if line.endswith("\n"))
    run = rolltape.read(tmp_path / "run")
    found = {turn.id for rollout in run.rollouts() for turn in rollout.turns}
    assert len(acknowledged) > rounds
    assert acknowledged <= found
    lost = [row for row in run.index() if row.outcome.status is not Status.FINISHED]
    assert 0 < len(lost) <= rounds * sessions
    assert {row.outcome.status for row in lost} == {Status.LOST}
    assert {row.outcome.reason for row in lost} == {"its writer ended, and the tape shows no finish"}
    rolltape.seal(tmp_path / "run")
    assert acknowledged <= {turn.id for rollout in run.rollouts() for turn in rollout.turns}


def test_a_rollout_of_a_living_writer_is_running_and_of_a_dead_one_lost(tmp_path: Path) -> None:
    code = "import sys, time, rolltape; from taped import *\n"
    code += "tape = rolltape.open(sys.argv[1]); r = tape.rollout(task_id='a'); record_session(r, 2)\n"
    writer = python(code + "print('ready', flush=True); time.sleep(60)", str(tmp_path / "run"))
    assert writer.stdout is not None
    writer.stdout.readline()
    run = rolltape.read(tmp_path / "run")
    assert [row.outcome.status for row in run.index()] == [Status.RUNNING]
    writer.kill()
    writer.communicate()
    assert [row.outcome.status for row in run.index()] == [Status.LOST]
    assert [(row.turns, row.sampled_tokens) for row in run.index()] == [(2, 5)]
    assert run.problems() == []
    finished(python(code, str(tmp_path / "two")))
    assert [row.outcome.status for row in rolltape.read(tmp_path / "two").index()] == [Status.LOST]
    assert rolltape.read(tmp_path / "two").problems() == []


FULL_DISK = """
import resource, signal, sys, rolltape
from rolltape.errors import TapeWriteError
from taped import *
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
tape = rolltape.open(sys.argv[1])
rollout = tape.rollout(task_id="a")
session = rollout.session()
turn = first_turn(session)
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
failures = 0
for index in range(40):
    try:
        turn = next_turn(session, turn, index, new_messages=[user(str(index) * 50_000)])
    except TapeWriteError as error:
        assert "this was not recorded, all before it was" in str(error), error
        failures += 1
assert 0 < failures < 40, failures
recorded = len(session.turns)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
next_turn(session, turn, 99)
rollout.finish(reward=1.0)
tape.close()
print(recorded + 1)
"""


def test_a_full_disk_refuses_a_turn_keeps_the_rest_and_recording_goes_on(tmp_path: Path) -> None:
    recorded = int(finished(python(FULL_DISK, str(tmp_path / "run"))))
    run = rolltape.read(tmp_path / "run")
    (rollout,) = run.rollouts()
    assert (len(rollout.turns), rollout.reward) == (recorded, 1.0)
    assert rollout.turns[-1].prompt_messages[-1]["content"] == "go on 99"
    assert run.problems() == []


FEW_FILES = """
import os, resource, sys
import rolltape
from taped import first_turn

run = sys.argv[1]
tapes = [rolltape.open(run, name="exp") for _ in range(3)]
for index, tape in enumerate(tapes):
    first_turn(tape.rollout(task_id=str(index)).session())
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)

def outcome(act, more):
    held = len(os.listdir("/proc/self/fd"))  # SQLite keeps some of earlier calls for later ones
    resource.setrlimit(resource.RLIMIT_NOFILE, (held + more, most))
    try:
        return str(act())
    except rolltape.RolltapeError as error:
        return "refused: " + " ".join(one for one in ("ulimit -n", "on the tape already") if one in str(error))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

def read():
    reader = rolltape.read(run)
    return [row.outcome.status.value for row in reader.index()], reader.noticed()

def start():
    return tapes[2].rollout(task_id="0")

for act in (start, read):
    print(*sorted({outcome(act, more) for more in range(40)}), sep="\\n")
"""


def test_a_process_that_may_open_few_files_calls_nothing_lost_and_starts_nothing_twice(tmp_path: Path) -> None:
    outcomes = finished(python(FEW_FILES, str(tmp_path / "run"))).splitlines()
    running = str((["running"] * 3, []))
    assert outcomes == ["refused: on the tape already", "refused: ulimit -n", running, "refused: ulimit -n"]


def test_a_journal_that_cannot_be_opened_is_not_put_down_to_the_limit_of_open_files_where_there_are_enough(
    tmp_path: Path,
) -> None:
    with pytest.raises(sqlite3.OperationalError) as raised:
        sqlite3.connect(f"{(tmp_path / 'none.sqlite').as_uri()}?mode=ro", uri=True)
    assert raised.value.sqlite_errorcode == sqlite3.SQLITE_CANTOPEN
    check_shortage(raised.value, "journal")


def test_a_rollout_that_another_thread_finishes_while_its_tape_is_closed_is_finished_and_others_are_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail = RolloutRecorder.fail

    def fail_late(recorder: RolloutRecorder, reason: str) -> None:
        if recorder is first:
            thread = threading.Thread(target=first.finish)
            thread.start()
            thread.join()
        fail(recorder, reason)

    monkeypatch.setattr(RolloutRecorder, "fail", fail_late)
    with rolltape.open(tmp_path / "run") as tape:
        first, second = (tape.rollout(task_id="task", attempt=attempt) for attempt in range(2))
    found = {row.id: row.outcome.status for row in rolltape.read(tmp_path / "run").index()}
    assert found == {first.id: Status.FINISHED, second.id: Status.FAILED}


def test_a_writer_keeps_few_of_many_other_journals_open_and_asks_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_MOST_HELD", 1)
    for index in range(3):
        finished(python(WRITER, str(tmp_path / "run"), str(index), "1", "0"))
    with rolltape.open(tmp_path / "run") as tape:
        for index in range(3):
            with pytest.raises(RecordError, match="on the tape already"):
                tape.rollout(task_id=str(index))
        open_files = [one.resolve() for one in Path("/proc/self/fd").iterdir()]
    held = [one for one in open_files if tmp_path in one.parents and one.suffix == ".sqlite"]
    assert len(held) == 2  # its own, and one other


def test_a_rollout_that_is_open_when_its_run_is_moved_goes_on_to_its_end(tmp_path: Path) -> None:
    tape = rolltape.open(tmp_path / "run")
    rollout = tape.rollout(task_id="a")
    turns = record_session(rollout, 2)
    (tmp_path / "run").rename(tmp_path / "moved")
    next_turn(rollout.sessions[0], turns[-1])
    rollout.finish(reward=1.0)
    tape.score(rollout.id, reward=2.0)
    with pytest.raises(TapeWriteError, match="cannot be written"):
        tape.rollout(task_id="b")
    tape.close()
    run = rolltape.read(tmp_path / "moved")
    (row,) = run.index()
    assert (row.outcome.status, row.outcome.reward, row.turns) == (Status.FINISHED, 2.0, 3)
    assert run.problems() == []


@pytest.mark.parametrize("deleted", ["run", "run/journals"])
def test_nothing_is_acknowledged_once_the_run_was_deleted(tmp_path: Path, deleted: str) -> None:
    tape = rolltape.open(tmp_path / "run")
    rollout = tape.rollout(task_id="a")
    (turn,) = record_session(rollout, 1)
    shutil.rmtree(tmp_path / deleted)
    for write in (
        lambda: next_turn(rollout.sessions[0], turn),
        lambda: rollout.finish(reward=1.0),
        lambda: tape.score(rollout.id, reward=2.0),
        tape.close,
    ):
        with pytest.raises(TapeWriteError, match="it was deleted; this was not recorded, and all before it is lost"):
            write()


def test_a_forked_child_writes_its_own_journal(tmp_path: Path) -> None:
    tape = rolltape.open(tmp_path / "run")
    parents = tape.rollout(task_id="parents")
    session = parents.session()
    first = first_turn(session)
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            with pytest.raises(ClosedError, match=rf"was opened in process \d+, this is its child {os.getpid()}"):
                next_turn(session, first)
            with pytest.raises(ClosedError, match="open a rollout here"):
                parents.finish()
            with tape.rollout(task_id="childs") as rollout:
                record_session(rollout, 3)
                rollout.finish(reward=1.0)
            tape.close()
            status = 0
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    next_turn(session, first)
    parents.finish(reward=0.0)
    tape.close()
    run = rolltape.read(tmp_path / "run")
    assert [(row.head.task_id, row.turns, row.outcome.reward) for row in run.index()] == [
        ("parents", 2, 0.0),
        ("childs", 3, 1.0),
    ]
    assert len(list((tmp_path / "run" / "journals").glob("*.sqlite"))) == 2
    assert run.problems() == []


def test_a_parent_that_died_is_not_kept_alive_by_its_child(tmp_path: Path) -> None:
    code = """
import os, sys, time, rolltape
tape = rolltape.open(sys.argv[1])
tape.rollout(task_id="a")
heard, told = os.pipe()
child = os.fork()
if child == 0:
    os.write(told, b"up")
    time.sleep(30)
    os._exit(0)
os.read(heard, 2)
print(child, flush=True)
os.kill(os.getpid(), 9)
"""
    writer = python(code, str(tmp_path / "run"))
    assert writer.stdout is not None
    child = int(writer.stdout.readline())
    writer.wait()
    try:
        assert [row.outcome.status for row in rolltape.read(tmp_path / "run").index()] == [Status.LOST]
    finally:
        os.kill(child, signal.SIGKILL)


def test_two_processes_cannot_start_the_same_rollout(tmp_path: Path) -> None:
    code = """
import sys, rolltape
from rolltape.errors import RecordError
started = 0
with rolltape.open(sys.argv[1]) as tape:
    for index in range(100):
        try:
            with tape.rollout(task_id=str(index)) as rollout:
                rollout.finish()
                started += 1
        except RecordError:
            pass
print(started)
"""
    rolltape.open(tmp_path / "run").close()
    writers = [python(code, str(tmp_path / "run")) for _ in range(3)]
    assert sum(int(finished(writer)) for writer in writers) == 100
    assert rolltape.read(tmp_path / "run").problems() == []


def test_submitted_entries_are_durable_after_a_flush(tmp_path: Path) -> None:
    record_run(tmp_path / "run", rollouts=1)
    journal = Journal(RunDirectory.opened(tmp_path / "run"))
    event = encode_event("version", None, {"version": "v"})
    tickets = [Ticket([event]) for _ in range(10)]
    for ticket in tickets:
        journal.submit(ticket)
    assert not any(ticket.done for ticket in tickets)
    journal.flush()
    assert all(ticket.done for ticket in tickets)
    assert len([event for event in rolltape.read(tmp_path / "run").events() if event.kind == "version"]) == 10
    journal.close()


def test_what_cannot_be_written_does_not_take_others_with_it(tmp_path: Path) -> None:
    record_run(tmp_path / "run", rollouts=1)
    journal = Journal(RunDirectory.opened(tmp_path / "run"))
    event = encode_event("version", None, {"version": "v"})

    class Bodyless:
        def write(self, batch: Batch) -> None:
            batch.rows["events"].append((batch.next_event, None, 0))

    fine, bad, also_fine = (Ticket([one]) for one in (event, Bodyless(), event))
    journal.submit(fine)
    journal.submit(also_fine)
    with pytest.raises(TapeWriteError, match="NOT NULL"):
        journal.store(bad)
    assert (fine.stored, bad.stored, also_fine.stored) == (True, False, True)
    journal.close()
    assert rolltape.read(tmp_path / "run").problems() == []


class InterruptAt:
    """A profiler that raises KeyboardInterrupt at one of the places where Python handles signals in the recorder."""

    def __init__(self, number: int) -> None:
        self._left = number

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event in ("call", "c_return") and Path(frame.f_code.co_filename) in _RECORDER:
            self._left -= 1
            if not self._left:
                sys.setprofile(None)
                raise KeyboardInterrupt


_RECORDER = {Path(inspect.getfile(one)) for one in (Journal, SessionRecorder, RolloutRecorder, TapeWriter)}


def _record(tape: Tape, task: str) -> None:
    with tape.rollout(task_id=task) as rollout:
        record_session(rollout, 1)
        rollout.finish(reward=1.0)


def _record_in_loop(tape: Tape, task: str) -> None:
    async def record() -> None:
        with tape.rollout(task_id=task) as rollout:
            session = rollout.session()
            await asyncio.gather(*(session.record_turn_async(**first_fields()) for _ in range(2)))

    asyncio.run(record())


@pytest.mark.filterwarnings("ignore:coroutine")
@pytest.mark.parametrize("act", [_record, _record_in_loop])
def test_an_interrupt_at_any_moment_leaves_the_tape_usable(act: Callable[[Tape, str], None], tmp_path: Path) -> None:
    tape = rolltape.open(tmp_path / "run")
    open_rollout = tape.rollout(task_id="open")
    session = open_rollout.session()
    turn = first_turn(session)
    for number in itertools.count(1):
        sys.setprofile(InterruptAt(number))
        try:
            act(tape, f"task {number}")
        except KeyboardInterrupt:
            interrupted = True
        else:
            interrupted = False
        finally:
            sys.setprofile(None)
        turn = next_turn(session, turn, number)
        tape.rollout(task_id=f"task {number}", new_try=True).finish()
        if not interrupted:
            break
    assert number > 100
    open_rollout.finish()
    tape.close()
    run = rolltape.read(tmp_path / "run")
    assert run.problems() == []
    assert {row.outcome.status for row in run.index()} <= {Status.FINISHED, Status.FAILED}
    assert run.rollout(open_rollout.id).turns[-1].id == turn.id


def test_the_same_try_in_two_journals_is_named_and_the_first_counts(tmp_path: Path) -> None:
    (rollout,) = record_run(tmp_path / "run", rollouts=1, turns=2)
    record_run(tmp_path / "other", rollouts=1, turns=4)
    for path in (tmp_path / "other" / "journals").iterdir():
        path.rename(tmp_path / "run" / "journals" / path.name)
    run = rolltape.read(tmp_path / "run")
    assert [row.turns for row in run.index()] == [2]
    (problem,) = run.problems()
    assert f"try 0 of rollout {rollout} was recorded by" in problem.what

"""Recording from coroutines: one commit for a tick, and each turn acknowledged when it is on the disk."""

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rolltape
from rolltape.errors import ClosedError, MisalignedError, NoSuchRollout, TapeWriteError
from rolltape.records.turn import Delivery, Turn
from rolltape.tape.journal.entries import Batch, RecordedTurn
from rolltape.tape.journal.writing import Journal, Ticket
from rolltape.tape.recording.session import SessionRecorder
from taped import assistant, finished, first_fields, next_fields, next_turn, python, spelled_turn, user


def later(session: SessionRecorder, after: Turn | None = None, index: int = 0, **fields: Any) -> asyncio.Future[Turn]:
    if after is None:
        return session.record_turn_async(**{**first_fields(), **fields})
    return session.record_turn_async(after=after, **{**next_fields(index), **fields})


@contextlib.contextmanager
def commits(tape: rolltape.Tape) -> Iterator[list[str]]:
    """The commits that a tape makes meanwhile."""
    made: list[str] = []
    connection = tape._writer._journal._connection
    connection.set_trace_callback(lambda statement: made.append(statement) if statement == "COMMIT" else None)
    yield made
    connection.set_trace_callback(None)


class FullDisk:
    """Lets no transaction through while it is on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on = False
        plain = Batch.insert

        def insert(batch: Batch, connection: sqlite3.Connection) -> None:
            plain(batch, connection)
            if self.on:
                raise sqlite3.OperationalError("database or disk is full")

        monkeypatch.setattr(Batch, "insert", insert)


def outcomes(found: list[Turn | BaseException]) -> list[str]:
    return [one.id.rpartition(".")[2] if isinstance(one, Turn) else type(one).__name__ for one in found]


async def all_of(*futures: Awaitable[Turn]) -> list[str]:
    """What became of each: its sequence number, or its error."""
    return outcomes(await asyncio.gather(*futures, return_exceptions=True))


def test_the_turns_of_one_tick_are_one_transaction(tmp_path: Path) -> None:
    async def record(session: SessionRecorder, turns: int) -> None:
        turn = await later(session)
        for index in range(1, turns):
            turn = await later(session, turn, index)

    async def main(sessions: list[SessionRecorder]) -> None:
        await asyncio.gather(*(record(session, 10) for session in sessions))

    with rolltape.open(tmp_path / "run") as tape:
        sessions = [tape.rollout(task_id=str(index)).session() for index in range(64)]
        with commits(tape) as made:
            asyncio.run(main(sessions))
        assert len(made) == 10
        assert [row.turns for row in tape.run().index()] == [10] * 64
        assert tape.run().problems() == []


def test_a_turn_is_on_the_disk_when_its_future_is_done_and_not_part_of_the_session_before(tmp_path: Path) -> None:
    async def main(session: SessionRecorder) -> None:
        message = user("hello")
        future = later(session, prompt_messages=[message])
        message["content"] = "changed"
        assert not future.done()
        assert not session.turns
        turn = await future
        assert session.turns == (turn,)
        (read,) = tape.run().rollout(rollout.id).turns
        assert spelled_turn(read) == spelled_turn(turn)
        assert turn.prompt_messages == [user("hello")]

    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="a") as rollout:
        asyncio.run(main(rollout.session()))
        rollout.finish()


def test_a_bad_turn_is_refused_by_the_call_itself(tmp_path: Path) -> None:
    async def main(session: SessionRecorder) -> None:
        with pytest.raises(MisalignedError, match="2 sampled ids but 1 logprobs"):
            later(session, logprobs=[-1.0])
        assert await all_of(later(session)) == ["0"]

    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="a") as rollout:
        session = rollout.session()
        with pytest.raises(RuntimeError, match="no running event loop"):
            later(session)
        assert session.turns == ()
        asyncio.run(main(session))
        rollout.finish()
        assert len(tape.run().rollout(rollout.id).turns) == 1


def test_parallel_turns_of_one_session_are_put_in_the_order_of_their_calls(tmp_path: Path) -> None:
    async def main(session: SessionRecorder) -> list[Turn]:
        first = await later(session)
        with commits(tape) as made:
            whole = [user("hello"), assistant("hi"), user("and")]
            follow_up = [*whole, assistant("reply 9"), user("more")]
            futures = [later(session, first, index) for index in range(8)]
            # The second whole prompt goes on from the first, which is not on the disk yet.
            futures.append(later(session, prompt_messages=whole, prompt_ids=[1, 2, 3, 4, 5, 6], sampled_ids=[7, 8]))
            ids = [1, 2, 3, 4, 5, 6, 7, 8, 9]
            futures.append(later(session, prompt_messages=follow_up, prompt_ids=ids, reply=assistant("reply 9")))
            turns = await asyncio.gather(*futures)
        assert len(made) == 1
        return [first, *turns]

    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="a") as rollout:
        session = rollout.session()
        turns = asyncio.run(main(session))
        rollout.finish()
        assert session.turns == tuple(turns)
        read = tape.run().rollout(rollout.id).turns
    assert [turn.sequence for turn in turns] == list(range(11))
    assert [spelled_turn(turn) for turn in read] == [spelled_turn(turn) for turn in turns]
    assert turns[-1].prompt_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert turns[-1].prompt_tokens.parent is not None


def test_a_failed_commit_refuses_its_turns_and_the_sessions_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(monkeypatch)
    whole = [user("hello"), assistant("hi"), user("and")]

    async def main(one: SessionRecorder, other: SessionRecorder) -> None:
        first = await later(one)
        await later(other)
        disk.on = True
        refused = [later(one, first, 1), later(other, other.turns[0], 1), later(one, first, 2)]
        refused.append(later(one, prompt_messages=whole, prompt_ids=[1, 2, 3, 4, 5, 6]))
        told = await asyncio.gather(*refused, return_exceptions=True)
        assert outcomes(told) == ["TapeWriteError"] * 4
        assert "disk is full; this was not recorded, all before it was" in str(told[0])
        assert "the turn before it could not be written; this was not recorded either" in str(told[2])
        assert (one.turns, len(other.turns)) == ((first,), 1)
        disk.on = False
        # The same again: neither may be coded against one of those that were refused.
        again = [later(one, prompt_messages=whole, prompt_ids=[1, 2, 3, 4, 5, 6]), later(one, first, 3)]
        assert await all_of(*again) == ["1", "2"]
        assert next_turn(other, other.turns[0], 3).sequence == 1
        # And what came after them is found again by its conversation.
        third = next_turn(one, one.turns[2], 4)
        next_turn(one, first, 5)
        fourth = [*third.prompt_messages, assistant("reply 4"), user("go on")]
        found = await later(one, prompt_messages=fourth, prompt_ids=[*third.tokens.to_numpy(), 9])
        assert found.prompt_tokens.keep == len(third.tokens)

    with rolltape.open(tmp_path / "run") as tape:
        rollout = tape.rollout(task_id="a")
        one, other = rollout.session(), rollout.session()
        asyncio.run(main(one, other))
        rollout.finish()
        read = tape.run().rollout(rollout.id)
        assert [[spelled_turn(turn) for turn in session.turns] for session in read.sessions] == [
            [spelled_turn(turn) for turn in session.turns] for session in (one, other)
        ]
    assert rolltape.read(tmp_path / "run").problems() == []


def test_a_turn_submitted_while_the_one_before_it_fails_is_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(monkeypatch)

    async def main(session: SessionRecorder) -> None:
        first = await later(session)
        disk.on = True
        lost = later(session, first, 1)
        submit = Journal.submit

        def submit_late(journal: Journal, ticket: Ticket) -> None:
            journal.flush()  # as by another thread, when the second turn is coded already
            submit(journal, ticket)

        monkeypatch.setattr(Journal, "submit", submit_late)
        orphan = later(session, f"{session.id}.1", 2)  # type: ignore[arg-type]
        monkeypatch.setattr(Journal, "submit", submit)
        disk.on = False
        assert await all_of(lost, orphan) == ["TapeWriteError", "TapeWriteError"]
        assert await all_of(later(session, first, 3)) == ["1"]

    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="a") as rollout:
        asyncio.run(main(rollout.session()))
        rollout.finish()
        read = tape.run().rollout(rollout.id)
        assert [turn.sampled_ids.tolist() for turn in read.turns] == [[4, 5], [23, 21, 22]]
        assert tape.run().problems() == []


def test_a_turn_that_cannot_be_written_takes_only_those_after_it_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = RecordedTurn.write

    def write(entry: RecordedTurn, batch: Batch) -> None:
        if entry.coded.turn.sampled_ids[0] == 21:
            raise OverflowError("too large")
        plain(entry, batch)

    async def main(one: SessionRecorder, other: SessionRecorder) -> None:
        first, others = await asyncio.gather(later(one), later(other))
        monkeypatch.setattr(RecordedTurn, "write", write)
        futures = [later(one, first, 0), later(one, first, 1), later(other, others, 2), later(one, first, 3)]
        assert await all_of(*futures) == ["1", "TapeWriteError", "1", "TapeWriteError"]
        assert await all_of(later(one, first, 4), later(other, others, 5)) == ["2", "2"]

    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="a") as rollout:
        asyncio.run(main(rollout.session(), rollout.session()))
        rollout.finish()
        read = tape.run().rollout(rollout.id)
        assert [[int(turn.sampled_ids[0]) for turn in session.turns] for session in read.sessions] == [
            [4, 20, 24],
            [4, 22, 25],
        ]
        assert tape.run().problems() == []


FULL_DISK = """
import asyncio, resource, signal, sys, rolltape
from rolltape.errors import TapeWriteError
from taped import *
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
tape = rolltape.open(sys.argv[1])
rollout = tape.rollout(task_id="a")
sessions = [rollout.session() for _ in range(8)]
turns = [first_turn(session) for session in sessions]

def sent(index, number, size):
    fields = {**next_fields(number), "new_messages": [user(f"{index} {number}" * size)]}
    return sessions[index].record_turn_async(after=turns[index], **fields)

async def main():
    failures = 0
    for number in range(40):
        sending = [sent(index, number, 2000) for index in range(8)]
        for index, told in enumerate(await asyncio.gather(*sending, return_exceptions=True)):
            if isinstance(told, TapeWriteError):
                failures += 1
            else:
                turns[index] = told
    assert 0 < failures < 320, failures
    assert sum(len(session.turns) for session in sessions) == 328 - failures
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    await asyncio.gather(*(sent(index, 99, 1) for index in range(8)))
    rollout.finish(reward=1.0)
    return failures

resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
failures = asyncio.run(main())
tape.close()
print(336 - failures)
"""


def test_a_full_disk_refuses_turns_keeps_the_rest_and_recording_goes_on(tmp_path: Path) -> None:
    recorded = int(finished(python(FULL_DISK, str(tmp_path / "run"))))
    run = rolltape.read(tmp_path / "run")
    (rollout,) = run.rollouts()
    assert (len(rollout.turns), rollout.reward) == (recorded, 1.0)
    assert all(session.turns[-1].sampled_ids[0] == 119 for session in rollout.sessions)
    assert run.problems() == []


def test_a_cancelled_wait_leaves_the_turn_on_the_tape(tmp_path: Path) -> None:
    async def main(session: SessionRecorder) -> None:
        async def record(after: Turn | None, index: int) -> Turn:
            return await later(session, after, index)

        first = await record(None, 0)
        tasks = [asyncio.create_task(record(first, index)) for index in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        assert await asyncio.gather(*tasks, return_exceptions=True) != []
        assert [task.cancelled() for task in tasks] == [False, True, False]
        assert [turn.sampled_ids[0] for turn in session.turns] == [4, 20, 21, 22]
        assert await all_of(later(session, session.turns[2], 5)) == ["4"]

    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="a") as rollout:
        asyncio.run(main(rollout.session()))
        rollout.finish()
        assert len(tape.run().rollout(rollout.id).turns) == 5
        assert tape.run().problems() == []


def test_a_loop_that_ends_too_early_leaves_its_turns_to_the_next_commit(tmp_path: Path) -> None:
    async def leave(session: SessionRecorder) -> None:
        later(session)

    async def stay(session: SessionRecorder) -> None:
        assert await all_of(later(session)) == ["1"]

    tape = rolltape.open(tmp_path / "run")
    rollout = tape.rollout(task_id="a")
    session = rollout.session()
    loop = asyncio.new_event_loop()
    task = loop.create_task(leave(session))
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert task.done()
    loop.close()
    assert len(session.turns) == 0
    asyncio.run(stay(session))
    rollout.finish()
    tape.close()
    run = rolltape.read(tmp_path / "run")
    assert [row.turns for row in run.index()] == [2]
    assert run.problems() == []


def test_threads_and_several_loops_share_sessions(tmp_path: Path) -> None:
    async def in_loop(sessions: list[SessionRecorder]) -> None:
        for index in range(20):
            turns = [later(session, session.turns[0], index) for session in sessions]
            assert all(turn.sequence > 0 for turn in await asyncio.gather(*turns))

    def in_thread(sessions: list[SessionRecorder]) -> None:
        for index in range(20):
            for session in sessions:
                next_turn(session, session.turns[0], index)

    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="a") as rollout:
        sessions = [rollout.session() for _ in range(4)]
        for session in sessions:
            session.record_turn(**first_fields())
        # In debug mode a loop refuses what is done to it by another thread.
        kinds: list[Callable[[list[SessionRecorder]], None]] = [
            in_thread,
            lambda given: asyncio.run(in_loop(given), debug=True),
        ]
        failures: list[threading.ExceptHookArgs] = []
        hook, threading.excepthook = threading.excepthook, failures.append
        threads = [threading.Thread(target=kind, args=(sessions,)) for kind in kinds * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        threading.excepthook = hook
        assert failures == []
        rollout.finish()
        read = tape.run().rollout(rollout.id)
        for session, found in zip(sessions, read.sessions, strict=True):
            assert [turn.sequence for turn in found.turns] == list(range(81))
            assert [spelled_turn(turn) for turn in found.turns] == [spelled_turn(turn) for turn in session.turns]
    assert rolltape.read(tmp_path / "run").problems() == []


def test_a_finish_counts_the_turns_that_are_on_their_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk(monkeypatch)

    async def main() -> None:
        fine, broken = tape.rollout(task_id="fine"), tape.rollout(task_id="broken")
        session, lost = fine.session(), broken.session()
        future = later(session)
        fine.finish(reward=1.0)
        assert future.done()
        with pytest.raises(ClosedError, match="is finished already"):
            later(session, await future)
        disk.on = True
        late = later(lost)
        with pytest.raises(TapeWriteError, match="disk is full"):
            broken.finish()
        disk.on = False
        assert await all_of(late) == ["TapeWriteError"]
        broken.finish(reward=0.0)

    with rolltape.open(tmp_path / "run") as tape:
        asyncio.run(main())
        assert [(row.turns, row.outcome.reward) for row in tape.run().index()] == [(1, 1.0), (0, 0.0)]
        assert tape.run().problems() == []


@pytest.mark.parametrize("durability", ["process", "power"])
def test_only_a_commit_that_waits_for_the_disk_is_off_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: str
) -> None:
    threads: list[int] = []
    plain = Batch.insert

    def insert(batch: Batch, connection: sqlite3.Connection) -> None:
        threads.append(threading.get_ident())
        plain(batch, connection)

    async def record(session: SessionRecorder) -> None:
        turn = await later(session)
        for index in range(5):
            turn = await later(session, turn, index)

    async def main(sessions: list[SessionRecorder]) -> None:
        await asyncio.gather(*map(record, sessions))

    with rolltape.open(tmp_path / "run", durability=durability) as tape, tape.rollout(task_id="a") as rollout:
        sessions = [rollout.session() for _ in range(8)]
        monkeypatch.setattr(Batch, "insert", insert)
        asyncio.run(main(sessions))
        monkeypatch.setattr(Batch, "insert", plain)
        rollout.finish()
        assert len(tape.run().rollout(rollout.id).turns) == 48
    assert len(threads) < 48
    assert (threading.get_ident() in threads) == (durability == "process")


def test_deliveries_of_one_tick_are_one_transaction_and_need_no_wait(tmp_path: Path) -> None:
    async def main(session: SessionRecorder) -> None:
        turns = await asyncio.gather(*(later(session, delivery="unknown") for _ in range(4)))
        with pytest.raises(NoSuchRollout, match="its session has 4 turns"):
            tape.mark_delivered_async(f"{session.id}.4")
        later(session)
        with pytest.raises(NoSuchRollout, match="its session has 4 turns"):
            tape.mark_delivered_async(f"{session.id}.4")  # it may yet be refused
        with commits(tape) as made:
            tape.mark_delivered_async(turns[0].id)
            tape.mark_delivered_async(turns[1].id, Delivery.UNDELIVERED)
            assert await tape.mark_delivered_async(turns[2].id, "delivered") is None  # type: ignore[func-returns-value]
        assert len(made) == 1

    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="a") as rollout:
        session = rollout.session()
        asyncio.run(main(session))
        rollout.finish()
        read = tape.run().rollout(rollout.id)
        delivered = [turn.facts.delivery.value for turn in read.turns]
        assert delivered == ["delivered", "undelivered", "delivered", "unknown", "delivered"]

        async def late() -> None:
            await tape.mark_delivered_async(session.turns[3].id)

        asyncio.run(late())
        assert tape.run().rollout(rollout.id).turns[3].facts.delivery is Delivery.DELIVERED


def test_a_session_marks_its_own_turns_as_delivered_also_after_its_rollout_has_ended(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="a") as rollout:
        session, other = rollout.session(), rollout.session()

        async def open_ones() -> None:
            turns = await asyncio.gather(*(later(session, delivery="unknown") for _ in range(3)))
            with pytest.raises(NoSuchRollout, match="not a turn of session"):
                other.mark_delivered_async(turns[0])
            with commits(tape) as made:
                session.mark_delivered_async(turns[0])
                await session.mark_delivered_async(turns[1], "undelivered")
            assert len(made) == 1

        async def late_one() -> None:
            await session.mark_delivered_async(session.turns[2])

        asyncio.run(open_ones())
        rollout.finish()
        asyncio.run(late_one())
        found = tape.run().rollout(rollout.id)
    assert [turn.facts.delivery.value for turn in found.turns] == ["delivered", "undelivered", "delivered"]

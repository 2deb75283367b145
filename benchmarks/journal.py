"""Small turns per second that survive the death of the process, from 64 sessions at once, and what a finish costs."""

import asyncio
import contextlib
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

import rolltape
from benchmarks.figures import Figure, main, seconds
from benchmarks.workload import agent_session
from rolltape.records.turn import Turn
from rolltape.tape.recording.tape import open_tape

SESSIONS, TURNS_EACH, RUNS = 64, 100, 3
TARGET = 5_000
LONG_TURNS = 5_000


def figures() -> Iterator[Figure]:
    """Turns per second, and those of SQLite alone with the same bytes and a commit for each turn; each the quickest
    of some runs, which was disturbed least."""
    tasks = max(_recorded(_by_tasks) for _ in range(RUNS))
    one_thread = max(_recorded(lambda work: _by_threads(work, 1)) for _ in range(RUNS))
    many_threads = max(_recorded(lambda work: _by_threads(work, SESSIONS)) for _ in range(RUNS))
    floor = max(_sqlite_alone_per_s(tasks.turn_bytes) for _ in range(RUNS))
    note = "a commit for each tick"
    yield Figure(f"{SESSIONS} coroutines", tasks.turns_per_s, "turns/s", TARGET, at_most=False, note=note)
    yield Figure(f"{SESSIONS} coroutines, finished and closed", tasks.finished_per_s, "turns/s")
    yield Figure("one thread", one_thread.turns_per_s, "turns/s", note="a commit for each turn")
    yield Figure(f"{SESSIONS} threads", many_threads.turns_per_s, "turns/s")
    yield Figure("SQLite alone", floor, "commits/s", note=f"one insert of {tasks.turn_bytes} bytes a commit")
    yield from finish_figures()


def finish_figures() -> Iterator[Figure]:
    """The finish of a long rollout: how long its caller waits, and the CPU that its summary takes in the background,
    beside the CPU of recording its turns."""
    plain = min(_finished(open_tape) for _ in range(RUNS))
    made = min(_finished(rolltape.open) for _ in range(RUNS))
    note = f"{plain.waited_s * 1e3:.1f} ms where no summary is made"
    yield Figure(f"finish at {LONG_TURNS:,} turns: the caller waits", made.waited_s * 1e3, "ms", note=note)
    background_s = made.finishing_s - plain.finishing_s
    note = f"{background_s / made.recording_s:.2f} × the {made.recording_s:.2f} s of CPU that recording its turns took"
    yield Figure(f"finish at {LONG_TURNS:,} turns: CPU in the background", background_s * 1e3, "ms", note=note)


class FinishCost(NamedTuple):
    """What the finish of a long rollout took."""

    waited_s: float
    finishing_s: float  # CPU until the tape is closed
    recording_s: float  # CPU of its turns


def _finished(open_run: Callable[[Path], rolltape.Tape]) -> FinishCost:
    with tempfile.TemporaryDirectory() as folder, open_run(Path(folder) / "run") as tape:
        rollout = tape.rollout(task_id="long")
        session = rollout.session()
        turns = _turns(0, LONG_TURNS)
        recording_s = _cpu_s(lambda: _by_threads([(session, turns)], 1))
        start = time.process_time()
        waited_s = seconds(lambda: rollout.finish(reward=1.0))
        tape.close()
        return FinishCost(waited_s, time.process_time() - start, recording_s)


Work = list[tuple[rolltape.SessionRecorder, list[dict[str, Any]]]]


class Recorded(NamedTuple):
    """One measured recording."""

    turns_per_s: float
    finished_per_s: float  # the same turns over the time until all rollouts are finished and the tape is closed
    turn_bytes: int  # on the tape


def _recorded(record: Callable[[Work], None]) -> Recorded:
    turns = SESSIONS * TURNS_EACH
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        with rolltape.open(path) as tape:
            rollouts = [tape.rollout(task_id=f"task-{seed}") for seed in range(SESSIONS)]
            work = [(rollout.session(), _turns(seed)) for seed, rollout in enumerate(rollouts)]
            before = _bytes_under(path)
            start = time.perf_counter()
            record(work)
            recorded_s = time.perf_counter() - start
            for rollout in rollouts:
                rollout.finish(reward=1.0)
        closed_s = time.perf_counter() - start
        return Recorded(turns / recorded_s, turns / closed_s, (_bytes_under(path) - before) // turns)


def _by_tasks(work: Work) -> None:
    """Each session's turns in a task of its own, as the gateway has them."""

    async def one(session: rolltape.SessionRecorder, turns: list[dict[str, Any]]) -> None:
        turn = None
        for given in turns:
            turn = await session.record_turn_async(after=turn, **given)

    async def every() -> None:
        await asyncio.gather(*(one(session, turns) for session, turns in work))

    uvloop.run(every())


def _by_threads(work: Work, threads: int) -> None:
    """The sessions dealt out to threads; each thread takes its sessions in turn."""

    def record(own: Work) -> None:
        latest: list[Turn | None] = [None] * len(own)
        for number in range(len(own[0][1])):
            for index, (session, turns) in enumerate(own):
                latest[index] = session.record_turn(after=latest[index], **turns[number])

    workers = [threading.Thread(target=record, args=(work[first::threads],)) for first in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def _turns(seed: int, turns: int = TURNS_EACH) -> list[dict[str, Any]]:
    made = list(agent_session(turns, new_tokens=64, sampled=24, seed=seed).as_new())
    made[0]["prompt_messages"], made[0]["prompt_ids"] = made[0].pop("new_messages"), made[0].pop("new_prompt_ids")
    return made


def _cpu_s(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def _sqlite_alone_per_s(row_bytes: int) -> float:
    """The floor: the same bytes in one table, one transaction a turn."""
    count = SESSIONS * TURNS_EACH
    row = bytes(range(256)) * (row_bytes // 256 + 1)
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(sqlite3.connect(Path(folder) / "floor.sqlite", isolation_level=None)) as connection,
    ):
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("CREATE TABLE turns (session INTEGER, sequence INTEGER, body BLOB)")
        start = time.perf_counter()
        for number in range(count):
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("INSERT INTO turns VALUES (?, ?, ?)", (number % SESSIONS, number, row[:row_bytes]))
            connection.execute("COMMIT")
        return count / (time.perf_counter() - start)


def _bytes_under(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


if __name__ == "__main__":
    main({"journal": figures})

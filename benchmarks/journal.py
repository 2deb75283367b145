"""Small turns per second that survive the death of the process, from 64 interleaved sessions."""

import asyncio
import contextlib
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvloop

import rolltape
from benchmarks.figures import Figure, main, seconds
from benchmarks.workload import agent_session
from rolltape.records.turn import Turn

SESSIONS, TURNS_EACH, RUNS = 64, 100, 3
TARGET = 5_000


def figures() -> Iterator[Figure]:
    """Turns per second, and those of SQLite alone with the same bytes and a commit for each turn; each the quickest
    of some runs, which was disturbed least."""
    tasks, turn_bytes = max(_recorded_per_s(_by_tasks) for _ in range(RUNS))
    one_thread, _ = max(_recorded_per_s(lambda work: _by_threads(work, 1)) for _ in range(RUNS))
    many_threads, _ = max(_recorded_per_s(lambda work: _by_threads(work, SESSIONS)) for _ in range(RUNS))
    floor = max(_sqlite_alone_per_s(turn_bytes) for _ in range(RUNS))
    yield Figure(f"{SESSIONS} coroutines", tasks, "turns/s", TARGET, at_most=False, note="a commit for each tick")
    yield Figure("one thread", one_thread, "turns/s", note="a commit for each turn")
    yield Figure(f"{SESSIONS} threads", many_threads, "turns/s")
    yield Figure("SQLite alone", floor, "commits/s", note=f"one insert of {turn_bytes} bytes a commit")


Work = list[tuple[rolltape.SessionRecorder, list[dict[str, Any]]]]


def _recorded_per_s(record: Callable[[Work], None]) -> tuple[float, int]:
    """Turns per second, and the bytes on the tape for each."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        with rolltape.open(path) as tape:
            work = [(tape.rollout(task_id=f"task-{seed}").session(), _turns(seed)) for seed in range(SESSIONS)]
            before = _bytes_under(path)
            taken_s = seconds(lambda: record(work))
        return SESSIONS * TURNS_EACH / taken_s, (_bytes_under(path) - before) // (SESSIONS * TURNS_EACH)


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
        for number in range(TURNS_EACH):
            for index, (session, turns) in enumerate(own):
                latest[index] = session.record_turn(after=latest[index], **turns[number])

    workers = [threading.Thread(target=record, args=(work[first::threads],)) for first in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def _turns(seed: int) -> list[dict[str, Any]]:
    made = list(agent_session(TURNS_EACH, new_tokens=64, sampled=24, seed=seed).as_new())
    made[0]["prompt_messages"], made[0]["prompt_ids"] = made[0].pop("new_messages"), made[0].pop("new_prompt_ids")
    return made


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

"""Small turns per second that survive the death of the process, from 64 interleaved sessions."""

import contextlib
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rolltape
from benchmarks.figures import Figure, main
from benchmarks.workload import agent_session

SESSIONS, TURNS_EACH = 64, 100
TARGET = 5_000


def figures() -> Iterator[Figure]:
    """Turns per second, and how far that is from SQLite alone with the same bytes and a commit for each turn."""
    with tempfile.TemporaryDirectory() as folder:
        one_thread, turn_bytes = _recorded_per_s(Path(folder) / "one", threads=1)
        many_threads, _ = _recorded_per_s(Path(folder) / "many", threads=SESSIONS)
        floor = _sqlite_alone_per_s(Path(folder) / "floor.sqlite", turn_bytes)
    yield Figure("one thread", one_thread, "turns/s", TARGET, at_most=False)
    yield Figure(f"{SESSIONS} threads", many_threads, "turns/s", TARGET, at_most=False)
    yield Figure("SQLite alone", floor, "commits/s", note=f"one insert of {turn_bytes} bytes a commit")
    yield Figure("one thread / SQLite alone", one_thread / floor, "×")
    yield Figure(f"{SESSIONS} threads / SQLite alone", many_threads / floor, "×")


def _recorded_per_s(path: Path, threads: int) -> tuple[float, int]:
    """Turns per second, and the bytes on the tape for each."""
    given = [_turns(seed) for seed in range(SESSIONS)]
    with rolltape.open(path) as tape:
        sessions = [tape.rollout(task_id=f"task-{index}").session() for index in range(SESSIONS)]
        before = _bytes_under(path)

        def record(own: list[int]) -> None:
            latest: dict[int, Any] = {}
            for number in range(TURNS_EACH):
                for index in own:
                    fields = dict(given[index][number])
                    if number:
                        fields["after"] = latest[index]
                    latest[index] = sessions[index].record_turn(**fields)

        workers = [
            threading.Thread(target=record, args=(list(range(first, SESSIONS, threads)),)) for first in range(threads)
        ]
        start = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        taken_s = time.perf_counter() - start
    return SESSIONS * TURNS_EACH / taken_s, (_bytes_under(path) - before) // (SESSIONS * TURNS_EACH)


def _turns(seed: int) -> list[dict[str, Any]]:
    made = list(agent_session(TURNS_EACH, new_tokens=64, sampled=24, seed=seed).as_new())
    made[0]["prompt_messages"], made[0]["prompt_ids"] = made[0].pop("new_messages"), made[0].pop("new_prompt_ids")
    return made


def _sqlite_alone_per_s(path: Path, row_bytes: int) -> float:
    """The floor: the same bytes in one table, one transaction a turn."""
    count = SESSIONS * TURNS_EACH
    row = bytes(range(256)) * (row_bytes // 256 + 1)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
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

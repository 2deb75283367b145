"""Measurements of the collector, each in a process of its own: `python -m benchmarks.collecting MODE …` prints one."""

import asyncio
import json
import resource
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pyarrow.parquet as pq
import uvloop

from rolltape.collect.collector import Collector, Launch
from rolltape.collect.environments.protocol import AGENT
from rolltape.collect.plan import EarlierRollouts, RolloutIdentity, check_resumable, load_earlier, plan_attempts
from rolltape.collect.results import RolloutResult
from rolltape.collect.settings import CollectSettings
from rolltape.collect.sources import open_source
from rolltape.records.rollout import EventKind, Status
from rolltape.tape.recording.tape import open_tape
from rolltape.tape.run import read
from rolltape.tiny import shipped_model

IN_FLIGHT = 256
GROUP = 8
TURNS = 8  # of an attempt that has several
EARLY = 2_000  # rollouts, after which memory is looked at first


def talk(task: dict[str, Any], seed: int) -> Any:
    """An episode of the `message` environment: it says something as often as there are turns."""
    for number in range(TURNS):
        yield f"Question {number} of {task['id']}: how many boats are there now?"
    return float(seed % 2)


async def _requests(engine: str, count: str) -> dict[str, float]:
    body = json.dumps({"input_ids": list(range(100))}).encode()
    left = iter(range(int(count)))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def one_after_another() -> None:
            for _ in left:
                async with client.post(f"{engine}/generate", data=body) as answer:
                    json.loads(await answer.read())

        start = time.process_time()
        await asyncio.gather(*(one_after_another() for _ in range(IN_FLIGHT)))
        return {"cpu_s": time.process_time() - start, "requests": float(count)}


async def _attempts(engine: str, source: str, run: str) -> dict[str, float]:
    settings = CollectSettings(
        source=source,
        engines=(f"sglang:{engine}",),
        model=str(shipped_model()),
        max_concurrent=IN_FLIGHT,
        group_size=GROUP,
        with_fates=True,  # as the command has it
    )
    seen = {"turns": 0.0, "rollouts": 0.0, "failed": 0.0, "early_mb": 0.0}
    clocks: list[tuple[float, float]] = []

    def launched(_: Launch) -> None:
        clocks.append((time.process_time(), time.perf_counter()))

    def ended(results: list[RolloutResult]) -> None:
        for result in results:
            seen["rollouts"] += 1
            seen["turns"] += result.turns
            seen["failed"] += result.status is not Status.FINISHED
            if seen["rollouts"] == EARLY:
                seen["early_mb"] = _rss_mb()

    with open_tape(run) as tape:
        await Collector(settings, tape).run(launched, ended)
        cpu_s, wall_s = time.process_time() - clocks[0][0], time.perf_counter() - clocks[0][1]
        return {**seen, "cpu_s": cpu_s, "wall_s": wall_s, "late_mb": _rss_mb(), "in_flight": _in_flight(Path(run))}


def _in_flight(run: Path) -> float:
    """How many rollouts were open at once on average, from the first that ended to the last that began."""
    tape = read(run)
    began = {row.key: row.head.started_at_ns for row in tape.index()}
    ended = {(one.rollout, one.try_index): one.at_ns for one in tape.events() if one.kind == EventKind.FINISH}
    first, last = min(ended.values()), max(began.values())
    open_ns = sum(max(min(ended[key], last) - max(start, first), 0) for key, start in began.items())
    return open_ns / (last - first)


def _list(source: str) -> dict[str, float]:
    before, start = _peak_mb(), time.process_time()
    settings = CollectSettings(source=source, group_size=GROUP)
    identity = RolloutIdentity("run", 0, "instant", "chat")
    with tempfile.TemporaryDirectory() as folder, open_tape(Path(folder) / "run") as tape:
        tasks = open_source(source)
        known = load_earlier(tape.run(), tasks.name, 0)
        count = sum(1 for _ in plan_attempts(enumerate(tasks), settings, identity, known, lambda _: (AGENT,)))
        assert count == len(tasks) * GROUP
        return {"seconds": time.process_time() - start, "grown_mb": _peak_mb() - before}


def _resume(source: str, run: str) -> dict[str, float]:
    settings = CollectSettings(source=source, group_size=GROUP)
    tasks = open_source(source)
    before = _peak_mb()
    with open_tape(run) as tape:

        def look() -> EarlierRollouts:
            check_resumable(tape, tape.run(), settings, tasks.name, resume=True)
            return load_earlier(tape.run(), tasks.name, 0)

        known_s = min(_cpu_s(look) for _ in range(3))
        known = look()
        identity = RolloutIdentity(tape.name, 0, "instant", "chat")
        plan_s = _cpu_s(lambda: list(plan_attempts(enumerate(tasks), settings, identity, known, lambda _: (AGENT,))))
    grown_mb = _peak_mb() - before
    floor_s = min(_cpu_s(lambda: _ids_alone(Path(run))) for _ in range(3))
    return {"floor_s": floor_s, "known_s": known_s, "plan_s": plan_s, "grown_mb": grown_mb}


def _ids_alone(run: Path) -> list[Any]:
    """The ids of all rollouts, as SQLite and Parquet give them."""
    found: list[Any] = []
    for path in run.glob("journals/*.sqlite"):
        connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
        found += connection.execute("SELECT id FROM rollouts").fetchall()
        connection.close()
    for path in run.glob("shards/*/rollouts.parquet"):
        found += pq.read_table(path, columns=["rollout"]).column(0).to_pylist()
    return found


def _cpu_s(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def _rss_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def _peak_mb() -> float:
    # Not getrusage's, which a process begins with its parent's.
    (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


_MODES: dict[str, Callable[..., dict[str, float]]] = {
    "requests": lambda *given: uvloop.run(_requests(*given)),
    "attempts": lambda *given: uvloop.run(_attempts(*given)),
    "list": _list,
    "resume": _resume,
}

if __name__ == "__main__":
    print(json.dumps(_MODES[sys.argv[1]](*sys.argv[2:])))

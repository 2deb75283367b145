"""The collector at scale: a turn beside a plain request, what memory grows with, and what resuming reads."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer

import rolltape
from benchmarks.collecting import EARLY, GROUP, IN_FLIGHT, TURNS
from benchmarks.figures import Figure, main
from benchmarks.finished import make_finished, task_file
from benchmarks.gateway_load import served
from rolltape.collect.settings import CollectSettings
from rolltape.gateway.prompts import ChatPrompts
from rolltape.tiny import shipped_model

_TASKS = 2_500


def figures(rollouts: int = 100_000) -> Iterable[Figure]:
    """Against an engine that answers at once; CPU seconds, since other processes share the machine."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with served([sys.executable, "-m", "benchmarks.instant", _reply_ids()]) as engine:
            yield from _flight_figures(folder, engine.url)
        yield from _listing_figures(folder)
        yield from resume_figures(folder, rollouts)


def _reply_ids() -> str:
    folder = shipped_model()
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("42", add_special_tokens=False).ids
    return ",".join(map(str, [*ids, ChatPrompts(folder).stop_ids[0]]))


def _flight_figures(folder: Path, engine: str) -> Iterable[Figure]:
    plain = _apart("requests", engine, 4 * EARLY)
    long = _apart("attempts", engine, _talk_file(folder, 100), folder / "long")
    short = _apart("attempts", engine, task_file(folder / "short.jsonl", _TASKS), folder / "short")
    request_ms = 1e3 * plain["cpu_s"] / plain["requests"]
    yield Figure("a plain request to the engine", request_ms, "ms", note=f"{IN_FLIGHT} at once, by aiohttp")
    for name, one in (("attempts of one turn", short), (f"attempts of {TURNS} turns", long)):
        turn_ms = 1e3 * one["cpu_s"] / one["turns"]
        note = f"{turn_ms / request_ms:.0f} plain requests; {one['turns']:,.0f} turns in {one['wall_s']:.0f} s"
        yield Figure(f"{name}: a turn", turn_ms, "ms", 5, note=note)
        yield Figure(f"{name}: in flight", one["in_flight"], "", 0.9 * IN_FLIGHT, at_most=False, note="on average")
        yield Figure(f"{name}: broken", one["failed"], "", 0)
    first, last = short["early_mb"], short["late_mb"]
    note = f"{last:.0f} MB, the engine's client, the gateway and the tokenizer included"
    yield Figure(f"memory after {_TASKS * GROUP:,} rollouts / after {EARLY:,}", last / first, "×", 1.1, note=note)


def _listing_figures(folder: Path) -> Iterable[Figure]:
    listed = _apart("list", task_file(folder / "many.jsonl", 10_000))
    note = f"{listed['seconds']:.1f} s of CPU"
    yield Figure("memory to list 10,000 tasks × 8", listed["grown_mb"], "MB", 20, note=note)


def resume_figures(folder: Path, attempts: int = 100_000) -> Iterable[Figure]:
    """Resuming a collection all of whose attempts have finished, beside reading their ids alone."""
    source = task_file(folder / "done.jsonl", attempts // GROUP)
    settings = CollectSettings(source=str(source), group_size=GROUP)
    run = folder / "done"
    count = make_finished(run, settings)
    for name in ("in one journal", "in shards"):
        if name == "in shards":
            rolltape.seal(run)
        rolltape.read(run).index()  # the index is made by whoever reads the run first
        found = _apart("resume", source, run)
        note = f"{1e3 * found['known_s']:.0f} ms against {1e3 * found['floor_s']:.0f} ms for {count:,} ids alone"
        yield Figure(f"{name}: what is done / their ids read", found["known_s"] / found["floor_s"], "×", 4, note=note)
        note = "an id hashed and looked up for each attempt"
        yield Figure(f"{name}: finding nothing left to do", found["plan_s"], "s", note=note)
        yield Figure(f"{name}: memory for it", found["grown_mb"], "MB", 60)


def _talk_file(folder: Path, tasks: int) -> Path:
    """Tasks for attempts of several turns."""
    path = folder / "long.jsonl"
    entry = {"environment": "message", "episode": "python:benchmarks.collecting:talk"}
    path.write_text("".join(json.dumps({"id": f"talk-{number}"} | entry) + "\n" for number in range(tasks)))
    return path


def _apart(*arguments: object) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.collecting", *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=Path(__file__).parents[1])
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


if __name__ == "__main__":
    main({"collect": figures})

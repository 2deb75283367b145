"""Collections for tests: a task file, an engine that says what it is told, and what came of it."""

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rolltape
from gateways import scripted
from rolltape.collect.collector import Collector
from rolltape.collect.results import RolloutResult
from rolltape.collect.settings import CollectSettings
from rolltape.records.rollout import Rollout, Status
from rolltape.tape.recording.tape import open_tape
from rolltape.tiny import shipped_model
from scripted_engine import Script, ScriptedEngine

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "src" / "rolltape" / "demo" / "tasks"
SUMS = [{"id": f"sum-{n}", "prompt": f"What is {n} + 1?", "answer": n + 1} for n in range(1, 5)]


def task_file(folder: Path, tasks: Sequence[Mapping[str, Any]] = SUMS, name: str = "tasks.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return path


def instant(script: Script = lambda asked: "4") -> ScriptedEngine:
    """An engine that answers at once, each request for itself."""
    return scripted(script, conversation=lambda asked: None)


def by(engine: ScriptedEngine) -> dict[str, Any]:
    """The settings that name an engine."""
    return {"engines": (f"sglang:{engine.url}",), "model": str(shipped_model())}


async def collected(
    source: Path | str, run: Path, engine: ScriptedEngine | None = None, *, resume: bool = False, **settings: Any
) -> list[RolloutResult]:
    """Collect all of it, with a scripted engine or the shipped model; the results as they were told."""
    if engine is not None:
        settings |= by(engine)
    results: list[RolloutResult] = []
    with open_tape(run) as tape:
        collector = Collector(CollectSettings(source=str(source), **settings), tape, resume=resume)
        await collector.run(lambda launch: None, results.extend)
    return results


def collected_at_once(
    source: Path | str, run: Path, script: Script = lambda asked: "4", **how: Any
) -> list[RolloutResult]:
    """The same in one go, by an engine of its own."""

    async def go() -> list[RolloutResult]:
        async with instant(script) as engine:
            return await collected(source, run, engine, **how)

    return asyncio.run(go())


def rollouts(run: Path) -> list[Rollout]:
    return list(rolltape.read(run).rollouts())


def finished_per_task(run: Path, step: int = 0) -> Counter[str]:
    """How often each task was attempted to the end; a rollout that was finished twice would count twice."""
    heads = [one.head for one in rollouts(run) if one.status is Status.FINISHED and one.head.step == step]
    return Counter(str(head.task_id) for head in heads)


def command(*arguments: object) -> "subprocess.Popen[str]":
    """`rolltape collect` as a process, at the root of the repository."""
    return subprocess.Popen(
        [sys.executable, "-m", "rolltape.cli", "collect", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

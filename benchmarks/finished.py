"""A run all of whose attempts have finished, as `rolltape collect` leaves it, recorded without asking an engine."""

import asyncio
import json
from pathlib import Path
from typing import Any

import rolltape
from rolltape.collect.settings import CollectSettings
from rolltape.collect.sources import open_source
from rolltape.collect.tasks import Task
from rolltape.records.rollout import EventKind

MODEL, AGENT = "instant", "chat"
_AT_A_TIME = 64


def task_file(path: Path, tasks: int) -> Path:
    """Write tasks of the `problem` kind, each with some text of its own."""
    with path.open("w") as file:
        for number in range(tasks):
            prompt = f"There are {number} boats, and one more comes. How many are there? " + "Think it over. " * 20
            file.write(json.dumps({"id": f"task-{number}", "prompt": prompt, "answer": number + 1}) + "\n")
    return path


def make_finished(run: Path, settings: CollectSettings) -> int:
    """Record every attempt of these settings as finished, in one journal; return how many there are."""
    with rolltape.open(run) as tape, open_source(settings.source) as source:
        kept = settings.fixed_by_resume(source.name)
        tape.append_run_event(EventKind.COLLECT, {"settings": kept, "model": MODEL})
        attempts = ((task, attempt) for task in source for attempt in range(settings.group_size))

        async def record_some() -> int:
            count = 0
            for task, attempt in attempts:
                await _record(tape, settings.step, task, attempt)
                count += 1
            return count

        async def record_all() -> int:
            return sum(await asyncio.gather(*(record_some() for _ in range(_AT_A_TIME))))

        return asyncio.run(record_all())


async def _record(tape: Any, step: int, task: Task, attempt: int) -> None:
    fields: dict[str, Any] = {"source": task.source, "task_id": task.id, "task": task.data, "step": step}
    with tape.rollout(**fields, attempt=attempt, model=MODEL, agent=AGENT) as rollout:
        await rollout.session().record_turn_async(
            prompt_messages=[{"role": "user", "content": task.data["prompt"]}],
            prompt_ids=list(range(100)),
            sampled_ids=[19, 17, 4089],
            logprobs=[-0.125, -0.25, -0.5],
            reply={"role": "assistant", "content": "42"},
            finish="stop",
            weight_version="1",
        )
        rollout.finish(reward=0.0)

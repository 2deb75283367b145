"""A whole evaluation of Inspect through a gateway that knows sessions by headers, as docs/how-to/gateway.md has it."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

import rolltape
from gateways import rig
from importing import imported

pytestmark = pytest.mark.slow  # Inspect takes several seconds to start

TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match
from inspect_ai.solver import solver


@solver
def recorded():
    async def solve(state, generate):
        headers = {"x-rolltape-session": state.uuid, "x-rolltape-task": str(state.sample_id)}
        return await generate(state, extra_headers=headers)

    return solve


@task
def sums():
    samples = [
        Sample(id="one", input="What is 1 + 1?", target="2"),
        Sample(id="two", input="What is 2 + 2?", target="4"),
    ]
    return Task(dataset=samples, solver=recorded(), scorer=match())
"""


async def test_samples_and_epochs_of_inspect_are_tasks_and_attempts(tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text(TASK)
    async with rig(tmp_path / "run", lambda _: "It is 2", open=True) as it:
        env = {**os.environ, "ROLLTAPE_BASE_URL": f"{it.gateway.url}/v1", "ROLLTAPE_API_KEY": "any"}
        options = ["--model", "openai-api/rolltape/tiny", "--epochs", "2", "--log-format", "json", "--display", "none"]
        evaluating = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "inspect_ai", "eval", "sums.py", *options), cwd=tmp_path, env=env
        )
        assert await evaluating.wait() == 0
    (log,) = (tmp_path / "logs").glob("*.json")
    samples = json.loads(log.read_text())["samples"]
    held = list(rolltape.read(tmp_path / "run").rollouts())
    assert sorted((one.head.task_id, one.head.attempt) for one in held) == [
        ("one", 0),
        ("one", 1),
        ("two", 0),
        ("two", 1),
    ]
    assert {sample["scores"]["match"]["value"] for sample in samples if sample["id"] == "one"} == {"C"}
    run = rolltape.read(tmp_path / "run")
    for sample in samples:
        rollout = run.rollout(sample["uuid"])
        assert rollout.head.task_id == sample["id"]
        assert rollout.turns[0].reply is not None
        assert rollout.turns[0].reply.text == sample["output"]["choices"][0]["message"]["content"]
    assert imported("inspect", log, tmp_path / "imported").imported == 4
    for sample in samples:
        again = rolltape.read(tmp_path / "imported").rollout(sample["uuid"])
        assert (again.head.task_id, again.head.attempt) == (sample["id"], sample["epoch"] - 1)
        assert again.reward == {"C": 1.0, "I": 0.0}[sample["scores"]["match"]["value"]]

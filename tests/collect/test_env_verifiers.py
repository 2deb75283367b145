"""Environments of verifiers, with its real interception server and scoring, on a scripted engine."""

import asyncio
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

import rolltape
from collecting import collected, collected_at_once, instant, rollouts, task_file
from rolltape.collect.environments import environment_named
from rolltape.collect.tasks import Task
from rolltape.errors import SourceError, TaskError
from rolltape.records.rollout import Status, StopReason
from scripted_engine import Asked, Mishap, Step

# A taskset with a harness that runs in verifiers' own process, so that nothing has to be downloaded. A new name for
# each test, since a module is imported once.
TASKSET = '''
import asyncio
import httpx
import verifiers.v1 as vf


LEFT = []  # attempts that have ended


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, task: SumData, trace: vf.Trace) -> float:
        if task.answer == "raise":
            raise RuntimeError("the rubric broke")
        return float(task.answer in trace.last_reply)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for n in (1, 2, 3):
            yield SumTask(SumData(id=f"sum-{n}", prompt=f"What is {n} + 1?", answer=str(n + 1)), self.config.task)


class AskConfig(vf.HarnessConfig):
    turns: int = 1
    tool: bool = False


class Ask(vf.Harness[AskConfig]):
    """Asks `turns` times, or until the model calls no tool any more."""

    NEEDS_CONTAINER = False
    EXECUTES_CODE = False
    APPENDS_SYSTEM_PROMPT = True

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        head = {"model": ctx.model}
        if self.config.tool:
            parameters = {"type": "object", "properties": {"n": {"type": "integer"}}}
            head["tools"] = [{"type": "function", "function": {"name": "double", "parameters": parameters}}]
        messages = [{"role": "user", "content": data.prompt}]
        try:
            return await self.ask(head, messages, endpoint, secret)
        finally:
            await asyncio.sleep(0)  # as one that has a process to end
            LEFT.append(data.id)

    async def ask(self, head, messages, endpoint, secret):
        async with httpx.AsyncClient(timeout=None, trust_env=False) as http:
            for _ in range(self.config.turns):
                body = {**head, "messages": messages}
                keys = {"Authorization": f"Bearer {secret}"}
                answered = await http.post(f"{endpoint}/chat/completions", json=body, headers=keys)
                if answered.status_code != 200:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=answered.text)
                message = answered.json()["choices"][0]["message"]
                messages.append(message)
                if self.config.tool and not message.get("tool_calls"):
                    break
                for call in message.get("tool_calls") or ():
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": "4"})
                if not self.config.tool:
                    messages.append({"role": "user", "content": "Are you sure?"})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["Ask", "Sums"]
'''
_NUMBERS = itertools.count()

pytestmark = pytest.mark.slow  # importing verifiers takes several seconds


@pytest.fixture
def taskset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a taskset that lies in the working directory."""
    monkeypatch.chdir(tmp_path)
    name = f"toy_sums_{next(_NUMBERS)}"
    (tmp_path / f"{name}.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def config_file(folder: Path, taskset: str, harness: str) -> str:
    (folder / "toy.toml").write_text(
        f'[env.taskset]\nid = "{taskset}"\n[env.agent.harness]\nid = "{taskset}"\n{harness}\n'
    )
    return "verifiers:toy.toml"


def test_tasks_agent_loop_and_rewards_are_those_of_verifiers(tmp_path: Path, taskset: str) -> None:
    results = collected_at_once(f"verifiers:{taskset}", tmp_path / "run", lambda asked: "It is 3.", group_size=2)
    assert sorted((one.task, one.attempt, one.reward) for one in results) == [
        ("sum-1", 0, 0.0),
        ("sum-1", 1, 0.0),
        ("sum-2", 0, 2.0),
        ("sum-2", 1, 2.0),
        ("sum-3", 0, 0.0),
        ("sum-3", 1, 0.0),
    ]
    right = next(one for one in rollouts(tmp_path / "run") if one.reward == 2.0)
    assert right.outcome.reward_terms == {"right": 2.0, "length": 8.0}
    assert right.head.task["prompt"] == "What is 2 + 1?"
    (turn,) = right.turns
    assert [message["content"] for message in turn.prompt_messages] == ["What is 2 + 1?"]
    data = rolltape.trace_of(right).reward_data
    assert data is not None
    assert data["rewards"] == {"right": {"score": 1.0, "weight": 2.0}}


def test_a_file_of_settings_chooses_the_harness_and_tools_are_called_in_its_loop(tmp_path: Path, taskset: str) -> None:
    name = config_file(tmp_path, taskset, "turns = 3\ntool = true")

    def script(asked: Asked) -> str:
        if "<tool_response>" in asked.prompt:
            return "It is 4."
        return '<tool_call>\n{"name": "double", "arguments": {"n": 2}}\n</tool_call>'

    results = collected_at_once(name, tmp_path / "run", script, group_size=1)
    assert {one.task: one.reward for one in results} == {"sum-1": 0.0, "sum-2": 0.0, "sum-3": 2.0}
    assert {one.turns for one in results} == {2}
    assert {len(list(rolltape.linearize(one).samples())) for one in rollouts(tmp_path / "run")} == {1}


def test_an_attempt_that_runs_out_of_turns_is_scored_as_verifiers_scores_it(tmp_path: Path, taskset: str) -> None:
    name = config_file(tmp_path, taskset, "turns = 5")
    results = collected_at_once(name, tmp_path / "run", lambda asked: "It is 3.", group_size=1, max_turns=2)
    assert {(one.stop_reason, one.turns) for one in results} == {(StopReason.MAX_TURNS, 2)}
    assert {one.task: one.reward for one in results} == {"sum-1": 0.0, "sum-2": 2.0, "sum-3": 0.0}


def test_tasks_of_ones_own_are_checked_as_those_of_the_taskset(tmp_path: Path, taskset: str) -> None:
    own = task_file(tmp_path, [{"id": "own", "prompt": "What is 6 + 1?", "answer": "7"}])
    results = collected_at_once(
        own, tmp_path / "run", lambda asked: "7", group_size=1, environment=f"verifiers:{taskset}"
    )
    assert [(one.task, one.reward) for one in results] == [("own", 2.0)]
    with pytest.raises(TaskError, match=r"^it is not a task of verifiers:\w+: answer: field required; correct it$"):
        environment_named(f"verifiers:{taskset}").check(Task(data={"prompt": "What is 6 + 1?"}))


def test_a_rubric_that_raises_breaks_its_attempt_alone_and_resume_runs_it_again(tmp_path: Path, taskset: str) -> None:
    tasks = [{"id": "good", "prompt": "1?", "answer": "1"}, {"id": "bad", "prompt": "2?", "answer": "raise"}]
    own, how = task_file(tmp_path, tasks), {"group_size": 1, "environment": f"verifiers:{taskset}"}
    results = collected_at_once(own, tmp_path / "run", lambda asked: "1", **how)
    ended = {one.task: (one.status, one.reward) for one in results}
    assert ended == {"good": (Status.FINISHED, 2.0), "bad": (Status.FAILED, None)}
    assert "the rubric broke" in str(next(one.reason for one in results if one.task == "bad"))
    again = collected_at_once(own, tmp_path / "run", lambda asked: "1", resume=True, **how)
    assert [(one.task, one.try_index) for one in again] == [("bad", 1)]


def test_an_engine_that_fails_is_no_outcome_of_the_policy(tmp_path: Path, taskset: str) -> None:
    async def go() -> None:
        async with instant() as engine:
            engine.mishaps[0] = Mishap.REFUSED
            how: dict[str, Any] = {"group_size": 1, "limit": 1, "engine_retry_s": 0.1}
            results = await collected(f"verifiers:{taskset}", tmp_path / "run", engine, **how)
        assert [(one.status, one.reward) for one in results] == [(Status.FAILED, None)]

    asyncio.run(go())


def test_an_attempt_that_is_cancelled_has_left_its_harness_when_the_collection_is_over(
    tmp_path: Path, taskset: str
) -> None:
    async def go() -> None:
        asked = asyncio.Event()

        def never(_: Asked) -> Step:
            asked.set()
            return Step("It is 3.", token_delay_s=600.0)

        async with instant(never) as engine:
            how: dict[str, Any] = {"group_size": 1, "limit": 1}
            collecting = asyncio.ensure_future(collected(f"verifiers:{taskset}", tmp_path / "run", engine, **how))
            await asked.wait()
            collecting.cancel()
            await asyncio.gather(collecting, return_exceptions=True)
            assert sys.modules[taskset].LEFT == ["sum-1"]

    asyncio.run(go())
    assert [one.outcome.reason for one in rollouts(tmp_path / "run")] == ["cancelled before it had ended"]


def test_servers_that_could_not_be_started_are_started_again_for_the_next_attempt(tmp_path: Path, taskset: str) -> None:
    """The environment's own `start` fails the first time."""
    own = """

class Flaky(vf.SingleAgentEnv):
    started = 0

    async def start(self):
        Flaky.started += 1
        if Flaky.started == 1:
            raise OSError("the port is taken")


__all__.append("Flaky")
"""
    (tmp_path / f"{taskset}.py").write_text(TASKSET + own)
    results = collected_at_once(
        f"verifiers:{taskset}", tmp_path / "run", lambda asked: "2", group_size=1, limit=2, max_concurrent=1
    )
    assert [(one.task, one.status) for one in results] == [("sum-1", Status.FAILED), ("sum-2", Status.FINISHED)]
    assert "the port is taken" in str(results[0].reason)


def test_other_agents_are_told_that_verifiers_has_a_loop_of_its_own(tmp_path: Path, taskset: str) -> None:
    (result,) = collected_at_once(
        f"verifiers:{taskset}", tmp_path / "run", group_size=1, limit=1, agent="command:true", sandbox="none"
    )
    assert result.status is Status.FAILED
    assert "has an agent loop of its own; leave --agent out" in str(result.reason)


def test_what_cannot_be_loaded_is_named_before_anything_runs(tmp_path: Path, taskset: str) -> None:
    with pytest.raises(TaskError, match=r"verifiers:no-such-thing cannot be loaded: ModuleNotFoundError"):
        environment_named("verifiers:no-such-thing")
    (tmp_path / "bad.toml").write_text(f'[env.taskset]\nid = "{taskset}"\nsize = 1\n')
    with pytest.raises(
        TaskError, match=r"^verifiers:bad.toml: taskset.size: extra inputs are not permitted; correct it$"
    ):
        environment_named("verifiers:bad.toml")
    with pytest.raises(TaskError, match="nothing after its colon"):
        environment_named("verifiers:")
    with pytest.raises(TaskError, match="has no splits"):
        collected_at_once(f"verifiers:{taskset}", tmp_path / "run", split="test")
    (tmp_path / "endless_sums.py").write_text(TASKSET + "\nSums.INFINITE = True\n")
    with pytest.raises(SourceError, match="no last task; give --limit"):
        collected_at_once("verifiers:endless-sums", tmp_path / "run")

"""Every example file, collected with the shipped model."""

import json
from collections import Counter
from pathlib import Path

import pytest

import rolltape
from collecting import EXAMPLES, ROOT, rollouts, task_file
from commands import Cli, rows
from rolltape.records.rollout import Status

_SINGLE = ["problem", "distill", "rubric", "preference", "message"]


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # where the functions that the examples name are found


@pytest.mark.parametrize("name", _SINGLE)
def test_an_example_file_is_collected_rewarded_and_traced(name: str, tmp_path: Path, cli: Cli) -> None:
    source, run = EXAMPLES / f"{name}.jsonl", tmp_path / "run"
    tasks = [json.loads(line)["id"] for line in source.read_text().splitlines()]
    result = cli("collect", source, "--run", run, "-g", 3)
    assert result.code == 0, result.err
    held = rollouts(run)
    assert Counter(one.head.task_id for one in held) == dict.fromkeys(tasks, 3)
    assert len({one.head.group for one in held}) == len(tasks)
    assert {one.status for one in held} == {Status.FINISHED}
    for one in held:
        trace = rolltape.trace_of(one)
        assert trace.steps
        assert trace.steps[-1].stop_reason == one.outcome.stop_reason
        assert trace.total_reward == one.reward
        assert (one.reward is None) == (name == "distill")
    assert cli("check", run).code == 0


def test_rewards_differ_within_groups(tmp_path: Path, cli: Cli) -> None:
    tasks = [json.loads(line) for line in (EXAMPLES / "problem.jsonl").read_text().splitlines()]
    source = task_file(tmp_path, [task for task in tasks if task["id"] in ("multiply", "within", "boxed")])
    events = rows(cli("collect", source, "--run", tmp_path / "run", "-g", 8, "--json"))
    by_task: dict[str, set[float]] = {}
    for event in events:
        if event["event"] == "rollout":
            by_task.setdefault(event["task"], set()).add(event["reward"])
    assert any(len(rewards) > 1 for rewards in by_task.values())


def test_seats_of_a_game_are_rollouts_of_their_own(tmp_path: Path, cli: Cli) -> None:
    tasks = [json.loads(line) for line in (EXAMPLES / "game.jsonl").read_text().splitlines()]
    source = task_file(tmp_path, [task for task in tasks if task["id"] in ("guess-50", "self-play")])
    run = tmp_path / "run"
    result = cli("collect", source, "--run", run, "-g", 1, "--max-turns", 5, "--json")
    assert result.code == 0, result.err
    events = rows(result)
    told = {(event["task"], event["seat"]): event for event in events if event["event"] == "rollout"}
    assert set(told) == {("guess-50", "agent"), ("self-play", "X"), ("self-play", "O")}
    assert len({event["rollout"] for event in told.values()}) == 3
    assert all("reward" in event for event in told.values())
    assert events[-1]["left"] == 0
    assert {one.head.agent for one in rollouts(run)} == {"chat", "chat:X", "chat:O"}
    assert cli("check", run).code == 0

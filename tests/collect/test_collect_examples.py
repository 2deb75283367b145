"""Every example file, collected with the shipped model."""

import json
from pathlib import Path

import pytest

import rolltape
from collecting import EXAMPLES, rollouts, task_file
from commands import Cli, rows
from rolltape.records.rollout import Status

# What docs/how-to/collect/environments.md says of each file, if more than its name.
_FLAGS: dict[str, list[str]] = {"game": ["--force-no-thinking"]}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.jsonl")))
def test_an_example_file_is_collected_rewarded_and_traced(name: str, tmp_path: Path, cli: Cli) -> None:
    source, run = EXAMPLES / f"{name}.jsonl", tmp_path / "run"
    tasks = {json.loads(line)["id"] for line in source.read_text().splitlines()}
    result = cli("collect", source, "--run", run, "--group-size", 4, "--max-reply-tokens", 400, *_FLAGS.get(name, []))
    assert result.code == 0, result.err
    held = rollouts(run)
    assert {one.status for one in held} == {Status.FINISHED}
    groups: dict[tuple[str | None, str | None], list[float | None]] = {}
    for one in held:
        groups.setdefault((one.head.task_id, one.head.agent), []).append(one.reward)
        trace = rolltape.trace_of(one)
        assert len(trace.steps) == len(one.turns)
        if name != "game":  # where another seat may bring on the end, even before this one has moved
            assert trace.steps[-1].stop_reason == one.outcome.stop_reason
        assert trace.total_reward == one.reward
    assert {task for task, _ in groups} == tasks
    assert {len(rewards) for rewards in groups.values()} == {4}
    if name == "distill":
        assert {reward for rewards in groups.values() for reward in rewards} == {None}
    else:
        assert any(len(set(rewards)) > 1 for rewards in groups.values()), groups
    assert cli("check", run).code == 0


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

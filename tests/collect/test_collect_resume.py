"""Killed, interrupted and resumed: every task is attempted exactly as often as was asked, and nothing twice."""

import asyncio
import json
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import rolltape
from collecting import (
    EXAMPLES,
    SUMS,
    by,
    collected,
    collected_at_once,
    command,
    finished_per_task,
    instant,
    rollouts,
    task_file,
)
from commands import Cli, rows
from gateways import eventually
from rolltape.collect.agents import scratch_folder
from rolltape.collect.collector import Collector
from rolltape.collect.settings import CollectSettings
from rolltape.collect.tasks import seed_of
from rolltape.records.rollout import Status, StopReason
from rolltape.tape.recording.tape import open_tape
from rolltape.tiny import shipped_model
from rolltape.traces import Capture
from scripted_engine import Step


@pytest.mark.slow
@pytest.mark.parametrize("name", ["problem", "preference"])
def test_killed_at_random_moments_and_resumed_it_ends_with_every_attempt_once(
    name: str, tmp_path: Path, cli: Cli
) -> None:
    source, run = EXAMPLES / f"{name}.jsonl", tmp_path / "run"
    wanted = {json.loads(line)["id"]: 4 for line in source.read_text().splitlines()}
    chance = random.Random(name)
    arguments = [source, "--run", run, "-g", 4, "--max-concurrent", 4, "--json"]
    for kill in range(4):
        process = command(*arguments, *(["--resume"] if kill else []))
        assert process.stdout is not None
        ended = chance.randrange(0 if kill else 1, 5)
        while ended and (line := process.stdout.readline()):
            ended -= json.loads(line)["event"] == "rollout"
        time.sleep(chance.uniform(0.0, 0.5))
        process.kill()
        process.communicate()
    process = command(*arguments, "--resume")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["whole"]
    assert finished_per_task(run) == wanted
    held = rollouts(run)
    assert {one.status for one in held if one.status is not Status.FINISHED} <= {Status.LOST}
    lost = {one.id for one in held if one.status is Status.LOST}
    assert all(one.head.try_index > 0 for one in held if one.status is Status.FINISHED and one.id in lost)
    assert all(one.reward is not None for one in held if one.status is Status.FINISHED)
    assert cli("check", run).code == 0


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 2])
def test_interrupted_it_leaves_a_whole_tape_and_goes_on_later(signals: int, tmp_path: Path, cli: Cli) -> None:
    run = tmp_path / "run"
    arguments = [EXAMPLES / "problem.jsonl", "--run", run, "-g", 6, "--max-concurrent", 2, "--json"]
    process = command(*arguments)
    assert process.stdout is not None
    while json.loads(process.stdout.readline())["event"] != "rollout":
        pass
    for _ in range(signals):
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "stopping: running attempts have" in err
    assert json.loads(out.splitlines()[-1])["whole"] is False
    statuses = {one.status for one in rollouts(run)}
    assert Status.FINISHED in statuses
    assert statuses <= {Status.FINISHED, Status.FAILED}
    assert cli("check", run).code == 0
    assert cli("collect", *arguments, "--resume").code == 0
    assert set(finished_per_task(run).values()) == {6}


async def test_what_outlasts_the_grace_time_is_cancelled_and_tried_again(tmp_path: Path) -> None:
    source, run = task_file(tmp_path, SUMS[:1]), tmp_path / "run"
    how: dict[str, Any] = {"source": str(source), "group_size": 2, "grace_s": 0.2}
    async with instant(lambda asked: Step("1 2 3 4 5 6 7 8 9 2", token_delay_s=0.05)) as engine:
        with open_tape(run) as tape:
            collector = Collector(CollectSettings(**how, **by(engine)), tape)
            going = asyncio.ensure_future(collector.run(lambda launch: None, lambda results: None))
            await eventually(lambda: engine.requests == 2)
            collector.end()
            await going
        assert [one.outcome.reason for one in rollouts(run)] == ["cancelled before it had ended"] * 2
        results = await collected(source, run, engine, resume=True, group_size=2)
    assert [result.try_index for result in results] == [1, 1]
    assert finished_per_task(run) == {"sum-1": 2}


def test_a_source_that_was_moved_is_still_the_same_source(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    run = tmp_path / "run"
    collected_at_once(task_file(tmp_path), run, group_size=1)
    assert collected_at_once(task_file(tmp_path / "elsewhere"), run, resume=True, group_size=1) == []
    assert finished_per_task(run) == {task["id"]: 1 for task in SUMS}


async def test_a_broken_attempt_keeps_its_record_beside_the_new_try(tmp_path: Path) -> None:
    source, run = task_file(tmp_path, SUMS[:1]), tmp_path / "run"
    script = tmp_path / "agent.py"
    script.write_text("raise SystemExit(3)")
    how: dict[str, Any] = {"group_size": 1, "agent": f"command:python {script}"}
    async with instant() as engine:
        (first,) = await collected(source, run, engine, **how)
        assert first.status is Status.FAILED
        script.write_text(_ASK_ONCE)
        (second,) = await collected(source, run, engine, resume=True, **how)
        assert await collected(source, run, engine, resume=True, **how) == []
    assert (second.rollout, second.try_index, second.status) == (first.rollout, 1, Status.FINISHED)
    assert [one.status for one in rollouts(run)] == [Status.FAILED, Status.FINISHED]
    assert list((run / "scratch").iterdir()) == []


@pytest.mark.slow
def test_two_steps_killed_in_between_and_resumed_have_each_attempt_once_time_outs_included(
    tmp_path: Path, cli: Cli
) -> None:
    source, run = task_file(tmp_path), tmp_path / "run"
    # The first attempt at the third task, whose answer is 4, comes to no end at step 0.
    slow = lambda asked: Step("4", token_delay_s=30.0 if asked.number == 6 else 0.0)  # noqa: E731
    with instant(slow).in_thread() as engine:
        how = ["-g", 3, "--timeout", 2, "--max-concurrent", 1, "--engine", f"sglang:{engine.url}"]
        arguments = [source, "--run", run, *how, "--model", shipped_model(), "--json"]
        for step in (0, 1):
            process = command(*arguments, "--step", step)
            assert process.stdout is not None
            left = 8 if step == 0 else 2
            while left and (line := process.stdout.readline()):
                left -= json.loads(line)["event"] == "rollout"
            process.kill()
            process.communicate()
        for step in (0, 1):
            process = command(*arguments, "--step", step, "--resume")
            _, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
    assert finished_per_task(run, 0) == finished_per_task(run, 1) == {task["id"]: 3 for task in SUMS}
    held = [one for one in rollouts(run) if one.status is Status.FINISHED]
    at = [[one for one in held if one.head.step == step] for step in (0, 1)]
    assert {one.head.group for one in at[0]}.isdisjoint({one.head.group for one in at[1]})
    assert len({one.id for one in held}) == len({seed_of(one.id) for one in held}) == 2 * 3 * len(SUMS)
    ends = [(one.outcome.stop_reason, one.reward) for one in at[0] if one.head.task_id == "sum-3"]
    assert sorted(ends) == [(StopReason.COMPLETED, 1.0), (StopReason.COMPLETED, 1.0), (StopReason.TIMEOUT, 0.0)]
    samples = rows(cli("samples", run, "--step", 0, "--task", "sum-3", "--json"))
    assert [sample["advantage"] for sample in samples if sample["reward"]] == pytest.approx([1 / 3, 1 / 3])


def test_a_group_that_was_whole_but_not_compared_is_compared_by_resuming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tastes_of_resume.py").write_text(
        "open_ = False\n\n\ndef longer(task, one, other):\n"
        "    assert open_, 'closed'\n    return len(one.text) - len(other.text)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import tastes_of_resume  # type: ignore[import-not-found]

    task = {"id": "t", "environment": "preference", "prompt": "Say.", "function": "python:tastes_of_resume:longer"}
    source, run = task_file(tmp_path, [task]), tmp_path / "run"
    replies = lambda asked: "a" * (1 + asked.number)  # noqa: E731
    before = collected_at_once(source, run, replies, group_size=3)
    assert [result.reward for result in before] == [None] * 3
    assert {result.reason for result in before} == {
        "ungraded: not compared: AssertionError: closed (tastes_of_resume.py, line 5)"
    }
    tastes_of_resume.open_ = True
    assert [one.before for one in collected_at_once(source, run, replies, group_size=3, resume=True)] == [True] * 3
    held = {len(one.turns[0].reply.text): one.reward for one in rollouts(run) if one.turns[0].reply is not None}
    assert held == {1: 0.0, 2: 0.5, 3: 1.0}


@pytest.mark.parametrize("closed_at_first", [False, True])
def test_what_programs_left_is_compared_also_when_the_programs_are_long_gone(
    closed_at_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tastes_of_files.py").write_text(
        "open_ = False\n\n\ndef longer(task, one, other):\n"
        "    assert open_, 'closed'\n    return len(one.text) - len(other.text)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import tastes_of_files  # type: ignore[import-not-found]

    # A short reply makes a long file: what was left counts, and neither the reply nor what was printed.
    (tmp_path / "agent.py").write_text(
        f"{_ASK_ONCE}\nopen('out.txt', 'w').write('b' * (9 - len(reply['choices'][0]['message']['content'])))"
    )
    compares = {"function": "python:tastes_of_files:longer", "file": "out.txt"}
    source = task_file(tmp_path, [{"id": "t", "environment": "preference", "prompt": "Say.", **compares}])
    how: dict[str, Any] = {"group_size": 3, "agent": f"command:{sys.executable} {tmp_path / 'agent.py'}"}
    replies = lambda asked: "a" * (1 + asked.number)  # noqa: E731
    tastes_of_files.open_ = not closed_at_first
    collected_at_once(source, tmp_path / "run", replies, **how, capture=Capture.OFF if closed_at_first else Capture.ALL)
    if closed_at_first:
        assert [one.reward for one in rollouts(tmp_path / "run")] == [None] * 3
        tastes_of_files.open_ = True
        again = collected_at_once(source, tmp_path / "run", replies, **how, resume=True)
        assert [one.before for one in again] == [True] * 3
    held = {len(one.turns[0].reply.text): one.reward for one in rollouts(tmp_path / "run") if one.turns[0].reply}
    assert held == {1: 1.0, 2: 0.5, 3: 0.0}


async def test_folders_of_a_killed_collector_are_removed_and_those_of_a_living_one_are_not(tmp_path: Path) -> None:
    run = tmp_path / "run"
    rolltape.open(run).close()
    (run / "scratch" / "left" / "work").mkdir(parents=True)
    with scratch_folder(run) as living, scratch_folder(run) as other:
        assert {one.name for one in (run / "scratch").iterdir()} == {living.name, other.name}
    assert list((run / "scratch").iterdir()) == []


_ASK_ONCE = """
import json, os, sys, urllib.request
told = json.load(sys.stdin)
body = json.dumps({"model": told["model"], "messages": told["messages"]}).encode()
url = told["openai_base_url"] + "/chat/completions"
reply = json.load(urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})))
print(reply["choices"][0]["message"]["content"])
"""

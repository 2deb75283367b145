"""`rolltape demo`: the shipped model learns, and everything that it prints is true of the run."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rolltape
from collecting import rollouts
from commands import Cli
from rolltape.collect.environments import ENVIRONMENT_NAMES
from rolltape.demo.story import GROUP_SIZE, NEXT, STEPS
from rolltape.demo.trainer import round_to_bfloat16
from rolltape.records.fork import ForkCause
from rolltape.records.rollout import Rollout, Status
from rolltape.tokens import read_tokens


def demo(folder: Path, *arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "rolltape.cli", "demo", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


def mean_reward(held: list[Rollout], step: int) -> float:
    rewards = [one.reward or 0.0 for one in held if one.head.step == step]
    return sum(rewards) / len(rewards)


@pytest.mark.slow
def test_the_demo_trains_in_an_empty_folder_and_shows_what_became_of_it(tmp_path: Path) -> None:
    shown = demo(tmp_path)
    assert shown.returncode == 0, shown.stderr
    run = tmp_path / "runs" / "demo"
    held = rollouts(run)
    assert len(held) == STEPS * GROUP_SIZE * 5
    assert {one.status for one in held} == {Status.FINISHED}
    assert mean_reward(held, STEPS - 1) > mean_reward(held, 0) + 0.2
    table = re.findall(r"^ +(\d+) +(\d\.\d+) +\d+ +\d+ +[\d,]+$", shown.stdout, re.MULTILINE)
    assert table == [(str(step), f"{mean_reward(held, step):.3f}") for step in range(STEPS)]
    # The weights of each step are those that the step before left.
    turns = [(one.head.step, turn) for one in held for turn in one.turns]
    sampled_by = {(step, part.last_version) for step, turn in turns for part in turn.facts.segments}
    assert sampled_by == {(step, str(step)) for step in range(STEPS)}
    commands = re.findall(r"^\$ rolltape (\w+)", shown.stdout, re.MULTILINE)
    assert commands == ["trace", "trace", "tree", "samples", "ledger", "ledger", "check", "tokens"]
    assert '"The answer is 85."' in shown.stdout
    assert re.search(rf"^● 1 .*\[{ForkCause.THINKING_STRIPPED.value}\]$", shown.stdout, re.MULTILINE)
    assert "under exact, keep-head, slime: no breaches" in shown.stdout
    records = list(read_tokens(run))
    assert {record.step for record in records} == set(range(STEPS))
    assert {record.rollout for record in records} <= {one.id for one in held}
    mismatches = [record.mismatch_kl[record.trained_mask].max() for record in records if record.mismatch_kl is not None]
    assert 0 < max(mismatches) < 0.1
    assert NEXT in shown.stdout
    assert re.search(r"^http://127.0.0.1:\d+/demo\n.*\nIt answers\.", shown.stdout, re.MULTILINE)
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}


def test_what_is_in_the_place_of_a_run_stays(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for place in ("mine", "runs/demo"):
        (tmp_path / place).mkdir(parents=True)
        refused = cli("demo", place)
        assert (refused.code, refused.err) == (
            2,
            f"rolltape: {place} exists; name a new folder, or remove it\n",
        )
        assert (tmp_path / place).is_dir()


def test_a_run_of_ones_own_in_the_place_of_the_demo_stays(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with rolltape.open("runs/demo") as tape:
        tape.rollout(task_id="mine").finish(reward=1.0)
    refused = cli("demo")
    assert (refused.code, refused.err) == (
        2,
        "rolltape: runs/demo exists; name a new folder, or remove it\n",
    )
    assert [one.head.task_id for one in rollouts(Path("runs/demo"))] == ["mine"]


def test_commands_that_come_next_are_commands(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the demo ends with, with the shipped model in the place of an engine, and nothing run."""
    monkeypatch.chdir(tmp_path)
    assert max(map(len, NEXT.splitlines())) <= 80
    (task,) = re.findall(r"a line is (\{.*\})\.$", NEXT, re.MULTILINE)
    (tmp_path / "tasks.jsonl").write_text(f"{task}\n")
    lines = re.findall(r"^  rolltape (.*)$", NEXT.replace("\\\n", ""), re.MULTILINE)
    own = [line.replace("vllm:http://127.0.0.1:8000 --model FOLDER", "tiny").split() for line in lines]
    assert [words[0] for words in own] == ["collect", "doctor", "collect", "collect"]
    own[-1][own[-1].index("claude-code")] += ":/bin/true"
    for words in (own[0], *own[2:]):
        planned = cli(*words, "--dry-run")
        assert planned.code == 0, planned.err
        assert "What is 2 + 2?" in planned.out


def test_example_tasks_and_the_scripted_session_are_written(cli: Cli, tmp_path: Path) -> None:
    written = cli("demo", "--tasks", tmp_path / "tasks")
    assert written.code == 0, written.err
    assert {path.stem for path in (tmp_path / "tasks").iterdir()} == set(ENVIRONMENT_NAMES)
    again = cli("demo", "--tasks", tmp_path / "tasks")
    assert again.code == 2
    assert "exists; name another folder, or remove it" in again.err
    taken = cli("demo", "--tasks", tmp_path / "tasks" / "game.jsonl")
    assert taken.code == 4
    assert "game.jsonl: cannot be written: File exists; name another folder" in taken.err
    recorded = cli("demo", "--scripted", tmp_path / "scripted")
    assert recorded.code == 0, recorded.err
    assert [one.head.task_id for one in rollouts(tmp_path / "scripted")] == ["fix-parser"] * 2
    assert cli("demo", "--scripted", tmp_path / "scripted").code == 2
    assert cli("demo", "--scripted", "--tasks", tmp_path / "more").code == 2


def test_bfloat16_rounds_to_the_nearest_and_to_even() -> None:
    step = 2.0**-7  # between neighbors just above 1
    given = np.array([1 + step / 4, 1 + step / 2, 1 + 3 * step / 2, -(1 + 3 * step / 4)], np.float32)
    assert round_to_bfloat16(given).tolist() == [1, 1, 1 + 2 * step, -(1 + step)]

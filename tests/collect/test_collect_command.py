"""`rolltape collect`: what it says, and where."""

import json
from pathlib import Path

import pytest

from collecting import SUMS, command, instant, rollouts, task_file
from commands import Cli, rows
from rolltape.capture.engines.embedded.shipped import shipped_model
from scripted_engine import Step


def test_events_for_scripts_say_all_that_happens(tmp_path: Path, cli: Cli) -> None:
    source = task_file(tmp_path)
    with instant().in_thread() as engine:
        how = ("--engine", f"sglang:{engine.url}", "--model", shipped_model())
        result = cli("collect", source, "--run", tmp_path / "run", "-g", 2, "--json", *how)
    assert result.code == 0
    launch, *told, end = rows(result)
    assert launch == {"event": "launch", "tasks": 4, "attempts": 8, "done_before": 0, "running_elsewhere": 0}
    assert {event["event"] for event in told} == {"rollout"}
    assert {event["rollout"] for event in told} == {one.id for one in rollouts(tmp_path / "run")}
    assert {"done": 8, "failed": 0, "left": 0, "mean_reward": 0.25, "whole": True}.items() <= end.items()


def test_records_are_written_one_by_one_as_attempts_end(tmp_path: Path) -> None:
    out = tmp_path / "rollouts.jsonl"
    source = task_file(tmp_path, SUMS[:2])
    slow = lambda asked: Step("1 2 3 4", token_delay_s=0 if asked.number == 0 else 60.0)  # noqa: E731
    with instant(slow).in_thread() as engine:
        how = ("--engine", f"sglang:{engine.url}", "--model", shipped_model())
        process = command(source, "--run", tmp_path / "run", "-g", 1, "-o", out, "--json", *how)
        assert process.stdout is not None
        while json.loads(process.stdout.readline())["event"] != "rollout":
            pass
        (line,) = out.read_text().splitlines()
        process.kill()
        process.communicate()
    record = json.loads(line)
    assert record.keys() >= {"rollout", "task", "attempt", "status", "reward", "stop_reason", "turns"}


def test_the_report_lists_tasks_in_their_order_and_why_attempts_ended(tmp_path: Path, cli: Cli) -> None:
    source = task_file(tmp_path)
    with instant(lambda asked: Step("4", token_delay_s=0.02 * (9 - asked.number))).in_thread() as engine:
        how = ("--engine", f"sglang:{engine.url}", "--model", shipped_model())
        result = cli("collect", source, "--run", tmp_path / "run", "-g", 2, *how)
    lines = result.out.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["sum-1", "sum-2", "sum-3", "sum-4"]
    assert [line.split()[2] for line in lines[1:5]] == ["0", "0", "1", "0"]
    assert "8  completed" in result.out
    assert "ledger (exact): " in result.out
    assert "8 attempts" in result.err


def test_resuming_what_is_done_says_so_and_runs_nothing(tmp_path: Path, cli: Cli) -> None:
    source = task_file(tmp_path)
    with instant().in_thread() as engine:
        how = ("--engine", f"sglang:{engine.url}", "--model", shipped_model(), "-g", 2)
        cli("collect", source, "--run", tmp_path / "run", *how)
        refused = cli("collect", source, "--run", tmp_path / "run", *how)
        again = cli("collect", source, "--run", tmp_path / "run", "--resume", *how)
        assert engine.requests == 8
    assert refused.code == 2
    assert "give --resume to go on" in refused.err
    assert again.code == 0
    assert "4 tasks, 8 attempts, 8 done before" in again.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--agent", "nobody"], "nobody"),
        (["--environment", "chess"], "chess"),
        (["--traces", "some"], "--traces some: all or off"),
        (["--engine", "vapour"], "vapour"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(flags: list[str], said: str, tmp_path: Path, cli: Cli) -> None:
    source = task_file(tmp_path)
    result = cli("collect", source, "--run", tmp_path / "run", *flags)
    assert result.code == 2
    assert said in result.err
    assert "Traceback" not in result.err


def test_a_collection_that_never_began_needs_no_resuming(tmp_path: Path, cli: Cli) -> None:
    source = task_file(tmp_path)
    assert cli("collect", source, "--run", tmp_path / "run", "-g", 1, "--engine", "sglang:http://127.0.0.1:9").code == 2
    with instant().in_thread() as engine:
        how = ("--engine", f"sglang:{engine.url}", "--model", shipped_model())
        assert cli("collect", source, "--run", tmp_path / "run", "-g", 1, *how).code == 0

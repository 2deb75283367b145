"""`rolltape collect`: what it says, and where."""

import json
from pathlib import Path

import pytest

from collecting import SUMS, command, instant, rollouts, task_file
from commands import Cli, rows
from rolltape.records.rollout import Status
from rolltape.tiny import shipped_model
from scripted_engine import Mishap, Step


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
    assert {"done": 8, "failed": 0, "left": 0, "total": 8, "mean_reward": 0.25, "whole": True}.items() <= end.items()
    assert end["endings"] == [{"status": "finished", "reason": "completed", "rollouts": 8, "mean_reward": 0.25}]


@pytest.mark.slow
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
    assert record.keys() >= {"rollout", "task", "attempt", "status", "reward", "stop_reason", "info", "trace"}


def test_the_report_lists_tasks_in_their_order_and_why_attempts_ended(tmp_path: Path, cli: Cli) -> None:
    source = task_file(tmp_path)
    with instant(lambda asked: Step("4", token_delay_s=0.02 * (9 - asked.number))).in_thread() as engine:
        how = ("--engine", f"sglang:{engine.url}", "--model", shipped_model())
        result = cli("collect", source, "--run", tmp_path / "run", "-g", 2, *how)
    lines = result.out.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["sum-1", "sum-2", "sum-3", "sum-4"]
    assert [line.split()[2] for line in lines[1:5]] == ["0", "0", "1", "0"]
    assert "rewards differ in 0 of 4 groups" in lines
    assert "finished         8         0.25  completed" in lines
    assert "8 rollouts, 8 turns, 16 sampled tokens, mean reward 0.25" in lines
    assert "ledger (exact): 16 trained" in lines
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
    assert "give --resume to continue" in refused.err
    assert again.code == 0
    assert "4 tasks, 8 attempts, 8 done before" in again.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--agent", "nobody"], "nobody"),
        (["--environment", "chess"], "chess"),
        (["--traces", "some"], "--traces some: use all, off, or sampled with a share from 0 to 1"),
        (["--traces", "sampled"], "--traces sampled: "),
        (["--traces", "sampled:2"], "--traces sampled:2: "),
        (["--traces", "sampled:nan"], "--traces sampled:nan: "),
        (["--traces", "off:0.1"], "--traces off:0.1: "),
        (["--engine", "vapour"], "'vapour' names no engine"),
        (["--top-p", "2"], "--top-p 2.0: Expected `float` <= 1.0"),
        (["--max-reply-tokens", "0"], "--max-reply-tokens 0: Expected `int` >= 1"),
        (["--force", "min_p=many"], "--force min_p=many: "),
        (["--force", "luck=1"], "--force luck=1: give NAME=VALUE"),
        (["--routed-experts"], "routed_experts is given, which tiny does not take"),
        (["--thinking-retention", "some"], "'--thinking-retention': 'some' is not one of 'template', 'tool_cycle'"),
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


def test_attempts_that_failed_show_in_the_exit_code_until_they_are_resumed(tmp_path: Path, cli: Cli) -> None:
    source, run = task_file(tmp_path, SUMS[2:4]), tmp_path / "run"
    with instant().in_thread() as engine:
        how = ("--engine", f"sglang:{engine.url}", "--model", shipped_model(), "-g", 1, "--max-concurrent", 1)
        engine.mishaps = dict.fromkeys(range(3), Mishap.WRONG_LENGTHS)
        first = cli("collect", source, "--run", run, *how)
        engine.mishaps = {}
        second = cli("collect", source, "--run", run, *how, "--resume")
    assert first.code == 5
    lines = first.out.splitlines()
    (failed,) = [line for line in lines if line.startswith("failed ")]
    assert "2 sampled ids but 1 logprobs" in failed
    assert lines[-1].startswith("the same command with --resume ")
    assert second.code == 0
    assert "--resume" not in second.out


def test_ids_in_reasons_do_not_keep_failures_apart(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agents_of_collect.py").write_text("def lost(assignment):\n    raise ValueError(assignment.rollout)\n")
    monkeypatch.syspath_prepend(tmp_path)
    result = cli("collect", task_file(tmp_path), "--run", tmp_path / "run", "--agent", "python:agents_of_collect:lost")
    assert result.code == 5
    (failed,) = [line for line in result.out.splitlines() if line.startswith("failed ")]
    raised = "python:agents_of_collect:lost raised ValueError: … (agents_of_collect.py, line 2)"
    assert failed.split() == ["failed", "32", *raised.split()]


def test_a_report_on_many_tasks_is_short(tmp_path: Path, cli: Cli) -> None:
    tasks = [{"id": f"sum-{n}", "prompt": f"What is {n} + 1?", "answer": n + 1} for n in range(100)]
    with instant().in_thread() as engine:
        how = ("--engine", f"sglang:{engine.url}", "--model", shipped_model(), "-g", 1)
        result = cli("collect", task_file(tmp_path, tasks), "--run", tmp_path / "run", *how)
    lines = result.out.splitlines()
    assert "… and 80 more" in lines
    assert len(lines) < 35
    assert "100 rollouts, 100 turns, 200 sampled tokens, mean reward 0.01" in lines


@pytest.mark.slow
def test_whoever_listens_may_leave(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with instant().in_thread() as engine:
        how = ("--engine", f"sglang:{engine.url}", "--model", shipped_model(), "--json")
        process = command(task_file(tmp_path), "--run", run, "-g", 4, *how)
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read()
        assert process.wait() == 4
    assert said.count("events cannot be written (Broken pipe)") == 1
    assert "Traceback" not in said
    assert [one.status for one in rollouts(run)] == [Status.FINISHED] * 16


def test_the_help_is_in_groups_and_fits_a_terminal(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = cli("collect", "--help").out.splitlines()
    assert max(map(len, lines)) <= 80
    groups = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    first = ["Arguments:", "Tasks:", "Run:", "Agent:", "Sandbox:", "Engine:", "Sampling:", "Judge:", "Pace:"]
    assert groups[: len(first)] == first

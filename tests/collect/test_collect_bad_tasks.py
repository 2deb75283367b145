"""`rolltape collect` on task files that cannot be used: each is refused with its place, and nothing runs."""

import socket
import sys
from pathlib import Path

import pytest

from commands import Cli
from rolltape.tiny import shipped_model

GOOD = '{"id": "a", "prompt": "What is 1 + 1?", "answer": 2}'
BAD = {
    "no object": ('["What is 2 + 2?", 4]', "line 2: this is a list; a task is an object"),
    "broken JSON": ('{"id": "b", "prompt": "What', "line 2, column 23: not valid JSON (unterminated string)"),
    "repeated id": ('{"id": "a", "prompt": "?", "answer": 1}', "line 2: its id 'a' is that of line 1 already"),
    "odd id": ('{"id": [1], "prompt": "?", "answer": 1}', "line 2: its id is [1]; give text or a number"),
    "no such number": ('{"id": "b", "prompt": "?", "answer": NaN}', "line 2: answer is nan, which JSON has no number"),
    "key twice": ('{"id": "b", "prompt": "?", "prompt": "!", "answer": 1}', "line 2: the key 'prompt' appears twice"),
    "no such environment": ('{"id": "b", "environment": "chess"}', "line 2: there is no environment 'chess'"),
    "no prompt": ('{"id": "b", "answer": 1}', 'line 2: it has no prompt; add "prompt"'),
    "nothing to check": ('{"id": "b", "prompt": "?"}', "line 2: it has neither an answer nor a check"),
    "unknown checker": ('{"id": "b", "prompt": "?", "check": {"numbr": 1}}', "line 2: its check: object contains"),
    "bad pattern": (
        '{"id": "b", "prompt": "?", "check": {"regex": "("}}',
        "line 2: its check.regex '(' is not a regular",
    ),
    "no such function": (
        '{"id": "b", "prompt": "?", "check": "python:nowhere_at_all:f"}',
        "line 2: python:nowhere_at_all:f: there is no module nowhere_at_all",
    ),
    "no judge": ('{"id": "b", "environment": "rubric", "prompt": "?", "criteria": ["x"]}', "line 2: its judge has no"),
    "no such game": ('{"id": "b", "environment": "game", "game": "go"}', "line 2: there is no game 'go'"),
    "file outside": (
        '{"id": "b", "prompt": "?", "answer": 1, "files": {"../x": ""}}',
        "line 2: its files: '../x' is not in the working directory",
    ),
}


@pytest.mark.parametrize(("line", "message"), BAD.values(), ids=BAD)
def test_a_bad_task_is_refused_with_its_place_and_nothing_runs(
    line: str, message: str, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in ("ROLLTAPE_JUDGE_URL", "ROLLTAPE_JUDGE_MODEL"):
        monkeypatch.delenv(variable, raising=False)
    Path("tasks.jsonl").write_text(f"{GOOD}\n{line}\n")
    result = cli("collect", "tasks.jsonl", "--run", "run")
    assert result.code == 2
    assert result.err.startswith(f"rolltape: tasks.jsonl, {message}")
    assert result.out == ""
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, "none.jsonl: there is no such file"),
        ("empty.jsonl", "\n", "empty.jsonl is empty: there is no task in it; give a source with tasks"),
        ("tasks.txt", GOOD, "tasks.txt is not a task file"),
        ("tasks.json", GOOD, "tasks.json holds one object, without a list in it"),
    ],
)
def test_a_file_without_tasks_is_refused(
    name: str, content: str | None, message: str, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(name).write_text(content)
    result = cli("collect", name, "--run", "run")
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert not Path("run").exists()


@pytest.mark.parametrize("runner", ["local", "ray"])
def test_an_unknown_agent_leaves_no_run_behind(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tasks.jsonl").write_text(GOOD)
    result = cli("collect", "tasks.jsonl", "--run", "run", "--agent", "nobody", "--runner", runner)
    assert result.code == 2
    assert "nobody" in result.err
    assert not Path("run").exists()


def test_an_engine_that_does_not_answer_leaves_no_run_behind(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tasks.jsonl").write_text(GOOD)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        engine = f"sglang:http://127.0.0.1:{unused.getsockname()[1]}"
    result = cli("collect", "tasks.jsonl", "--run", "run", "--engine", engine, "--model", shipped_model())
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("rolltape: no engine answers: sglang http://127.0.0.1:")
    assert not Path("run").exists()


def test_a_cluster_without_ray_leaves_no_run_behind(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    Path("tasks.jsonl").write_text(GOOD)
    result = cli("collect", "tasks.jsonl", "--run", "run", "--runner", "ray")
    assert (result.code, result.out) == (2, "")
    assert "--runner ray: this needs ray" in result.err
    assert not Path("run").exists()


def test_an_unknown_environment_of_the_flag_is_told_once(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tasks.jsonl").write_text(GOOD + "\n" + GOOD.replace('"a"', '"b"'))
    result = cli("collect", "tasks.jsonl", "--run", "run", "--environment", "chess")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("rolltape: --environment: there is no environment 'chess'; there are problem, ")
    assert result.err.count("chess") == 1
    assert not Path("run").exists()


def test_resuming_where_there_is_no_run_makes_none(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tasks.jsonl").write_text(GOOD)
    result = cli("collect", "tasks.jsonl", "--run", "run", "--resume")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("rolltape: run: there is no run to resume; leave --resume out")
    assert not Path("run").exists()


def test_all_that_is_wrong_with_a_file_is_told_at_once(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [line for name, (line, _) in BAD.items() if name != "no judge"][:9]
    Path("tasks.jsonl").write_text("\n".join([GOOD, *lines]))
    result = cli("collect", "tasks.jsonl", "--run", "run")
    assert result.code == 2
    assert "tasks.jsonl: 9 entries cannot be used, and nothing was run" in result.err
    assert [f"line {number}" in result.err for number in range(2, 11)] == [True] * 9

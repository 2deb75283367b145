"""`--dry-run`, and what agents get: documented, versioned, and the same as in a real run."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from collecting import collected_at_once, task_file
from rolltape.cli import run as rolltape_command
from rolltape.collect.agents import Assignment
from rolltape.collect.agents.launchers import CommandInput
from rolltape.gateway.wire import base_urls, named_urls
from rolltape.records.rollout import Status

BASE_URLS = named_urls(base_urls("", "")).keys()
PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "collect" / "index.md").read_text()
KEEPS_INPUT = "import sys; open({path!r}, 'w').write(sys.stdin.read()); sys.exit('I only look')"


def described_below(heading: str) -> set[str]:
    """The fields that the table below this line of the page describes."""
    table = re.search(r"(?:^\|.*\n)+", PAGE[PAGE.index(heading) :], re.MULTILINE)
    assert table is not None
    cells = re.findall(r"^\| (`[^|]+) \|", table[0], re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def previews(*arguments: object, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert rolltape_command(["collect", *map(str, arguments), "--dry-run", "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_every_field_that_an_agent_gets_is_described() -> None:
    stdin = described_below("The object on stdin")
    assert stdin == {*CommandInput.__struct_fields__, *BASE_URLS}
    assert described_below("A function gets") == set(Assignment.__struct_fields__)


def test_the_preview_is_what_a_program_then_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, seen = task_file(tmp_path, [{"id": "a", "prompt": "2 + 2?", "answer": 4}]), tmp_path / "seen.json"
    script = tmp_path / "look.py"
    script.write_text(KEEPS_INPUT.format(path=str(seen)))
    agent = f"command:{sys.executable} {script}"
    how = ("--agent", agent, "--served-model-name", "m", "--run", tmp_path / "run")
    (preview,) = previews(source, *how, capsys=capsys)
    assert not (tmp_path / "run").exists()
    (result,) = collected_at_once(source, tmp_path / "run", agent=agent, model_name="m", sandbox="none", group_size=1)
    assert result.reason == (
        "the agent ended with exit code 1 before it had asked the model anything; its last output: I only look"
    )
    read, shown = json.loads(seen.read_text()), preview["given"]["stdin"]
    assert read.keys() == shown.keys()
    differ = {name for name in read if read[name] != shown[name]}
    assert differ == {"key", *BASE_URLS}
    assert (read["version"], read["prompt"], read["task"]) == (1, "2 + 2?", {"id": "a", "prompt": "2 + 2?"})


def test_the_agent_of_the_page_attempts_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    block = re.search(r'^```python\n(Path\("first_agent.py"\).*?)^```', PAGE, re.MULTILINE | re.DOTALL)
    assert block is not None
    exec(block[1], {"Path": Path})
    source = task_file(tmp_path, [{"id": "a", "prompt": "2 + 2?", "answer": 4}])
    agent = f"command:{sys.executable} first_agent.py"
    (result,) = collected_at_once(source, tmp_path / "run", agent=agent, sandbox="none", group_size=1)
    assert (result.status, result.reward) == (Status.FINISHED, 1.0)


def test_the_chat_agent_and_functions_are_shown_with_tools_and_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calculator = "python:rolltape.collect.environments.calculator:calculator"
    tasks = [{"id": n, "prompt": "?", "tools": [calculator], "files": {"a": "b"}, "answer": 1} for n in range(3)]
    how = (task_file(tmp_path, tasks), "--environment", "message")
    (first,) = previews(*how, capsys=capsys)
    assert first["given"]["agent"]["messages"] == [{"role": "user", "content": "?"}]
    assert first["given"]["agent"]["tools"][0]["function"]["name"] == "calculator"
    assert [one["task"] for one in previews(*how, "--limit", 2, capsys=capsys)] == ["0", "1"]
    (shown,) = previews(*how, "--agent", "python:json:dumps", capsys=capsys)
    assert shown["given"]["task"]["answer"] == 1
    assert shown["given"]["episode.opening"]["agent"]["files"] == {"a": "b"}


@pytest.mark.parametrize(
    ("begin", "reason"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero (broken_environment.py, line 4)"),
        ("None", "begin returned None, whose seats are None; return an episode with a tuple of `seats`"),
    ],
)
def test_an_environment_that_cannot_begin_is_told_with_the_task(
    begin: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_environment.py").write_text(
        "class Broken:\n"
        "    name = 'broken'\n"
        "    def check(self, task): ...\n"
        f"    def begin(self, task, seed): return {begin}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_environment", raising=False)
    source = task_file(tmp_path, [{"id": "a"}])
    how = ["--environment", "python:broken_environment:Broken"]
    assert rolltape_command(["collect", str(source), "--dry-run", *how]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"rolltape: {source}, line 1: environment broken could not begin: {reason}")


def test_what_is_wrong_is_told_as_by_a_collection(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = task_file(tmp_path, [{"id": "a", "prompt": "2 + 2?"}])
    assert rolltape_command(["collect", str(source), "--dry-run"]) == 2
    assert "it has neither an answer nor a check" in capsys.readouterr().err
    good = task_file(tmp_path, [{"id": "a", "prompt": "2 + 2?", "answer": 4}], "good.jsonl")
    assert rolltape_command(["collect", str(good), "--dry-run", "--agent", "command:no-such-agent"]) == 2
    assert "no-such-agent is not on PATH" in capsys.readouterr().err
    sandboxed = task_file(tmp_path, [{"prompt": "2 + 2?", "answer": 4, "sandbox": {"cpus": 0}}], "sandboxed.jsonl")
    contained = ["--sandbox", "podman", "--sandbox-image", "any", "--agent", "command:sh -c true"]
    assert rolltape_command(["collect", str(sandboxed), "--dry-run", *contained]) == 2
    assert "the container's cpus is 0.0; give more than 0" in capsys.readouterr().err

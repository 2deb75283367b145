"""Claude Code and Codex, unmodified, collected in a sandbox, and scored there on the file that they were to edit."""

from pathlib import Path
from typing import Any

import pytest

import rolltape
from agent_installs import claude_code, codex
from agent_runs import thinks
from bwrap import needs_bwrap
from collecting import rollouts, task_file
from commands import Cli, rows
from qwen3_tokenizer import qwen3_folder
from rolltape.collect.sandboxes import running
from rolltape.records.rollout import Status, StopReason
from rolltape.records.sample import Fate
from scripted_engine import ScriptedEngine, load_tokenizer

CHECKER = """
def adds(task, ended):
    scope = {}
    exec((ended.folder / "calc.py").read_text(), scope)
    return {"reward": float(scope["add"](2, 3) == 5), "files": sorted(path.name for path in ended.folder.iterdir())}
"""
TASK = {
    "id": "fix-add",
    "prompt": "add() in calc.py subtracts. Make it add.",
    "files": {"calc.py": "def add(a, b):\n    return a - b\n"},
    "check": "python:checks_of_edits:adds",
}
NOWHERE = {"HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}  # for what is said to anybody but loopback


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed_on = running.inherited_variables
    monkeypatch.setattr(running, "inherited_variables", lambda: {**passed_on(), **NOWHERE})
    (tmp_path / "checks_of_edits.py").write_text(CHECKER)
    monkeypatch.syspath_prepend(tmp_path)


def by_claude_code(sign: str) -> list[str]:
    """What the model says in one attempt: it reads the file, edits it, and is done."""
    edit = {"file_path": "calc.py", "old_string": "a - b", "new_string": f"a {sign} b"}
    return [
        thinks("I look first.", "", ("Read", {"file_path": "calc.py"})),
        thinks("I see it.", "", ("Edit", edit)),
        thinks("That is it.", f"It is {sign} now."),
    ]


def by_codex(sign: str) -> list[str]:
    return [
        thinks("I look first.", "", ("exec_command", {"cmd": "cat calc.py"})),
        thinks("I see it.", "", ("exec_command", {"cmd": f"sed -i 's/a - b/a {sign} b/' calc.py"})),
        thinks("That is it.", f"It is {sign} now."),
    ]


@pytest.mark.parametrize(
    ("name", "installed", "says"),
    [("claude-code", claude_code, by_claude_code), ("codex", codex, by_codex)],
    ids=["claude-code", "codex"],
)
def test_it_is_rewarded_for_the_file_that_it_left(
    name: str, installed: Any, says: Any, tmp_path: Path, cli: Cli
) -> None:
    needs_bwrap()
    folder, run = qwen3_folder(), tmp_path / "run"
    script = [*says("+"), *says("*")]
    with ScriptedEngine(load_tokenizer(folder), script, conversation=lambda asked: None).in_thread() as engine:
        how = ("--engine", f"sglang:{engine.url}", "--model", folder, "--max-concurrent", 1, "--timeout", 90)
        agent = f"{name}:{installed()}"
        source, also = task_file(tmp_path, [TASK]), ("--sandbox", "bwrap", "--json")
        result = cli("collect", source, "--run", run, "-g", 2, "--agent", agent, *how, *also)
    assert result.code == 0, result.err
    told = [event for event in rows(result) if event["event"] == "rollout"]
    assert sorted((event["attempt"], event["reward"]) for event in told) == [(0, 1.0), (1, 0.0)]
    for one in rollouts(run):
        assert (one.status, one.outcome.stop_reason, one.head.agent) == (Status.FINISHED, StopReason.COMPLETED, name)
        assert len(one.turns) == 3
        trace = rolltape.trace_of(one)
        assert trace.total_reward == one.reward
        assert trace.reward_data == {"files": ["calc.py"]}
        assert trace.extra == {"exit_code": 0, "text": f"It is {'+*'[one.head.attempt]} now.\n"}
        made = rolltape.linearize(one)
        assert made.forks == []
        assert made.ledger.totals() == {Fate.TRAINED: made.ledger.sampled}
    assert list((run / "scratch").iterdir()) == []
    assert cli("check", run).code == 0

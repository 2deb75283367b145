"""`rolltape doctor` with Claude Code and Codex, unmodified."""

from collections.abc import Callable
from pathlib import Path

import pytest

from agent_installs import claude_code, codex
from rolltape.doctor import Severity, Stack, diagnose

# What they say to anybody but loopback goes nowhere.
NOWHERE = {"HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}


@pytest.mark.parametrize(
    ("name", "installed", "tool"),
    [("claude-code", claude_code, "Bash"), ("codex", codex, "exec_command")],
    ids=["claude-code", "codex"],
)
async def test_it_sends_everything_back_as_it_came(
    name: str, installed: Callable[[], Path], tool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rolltape.collect.sandboxes import running

    passed_on = running.inherited_variables
    monkeypatch.setattr(running, "inherited_variables", lambda: {**passed_on(), **NOWHERE})
    stack = Stack(agent=f"{name}:{installed()}")
    results = {one.check: one async for one in diagnose(stack)}
    assert results["run"].figures == {"turns": 4, "tool": tool}
    assert results["history"].verdict is Severity.OK
    assert results["samples"].figures["exact"]["samples"] == 1

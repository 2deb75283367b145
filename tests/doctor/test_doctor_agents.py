"""Agents on a scripted model: what one does to its history is named, with the samples that a rollout of it becomes."""

import sys
from pathlib import Path

import pytest

from rolltape.doctor import CheckResult, Severity, Stack, diagnose
from rolltape.doctor.agent.scripted_model import harmless_call

AGENT = Path(__file__).with_name("toy_agent.py")
TOY = f"command:{sys.executable} {AGENT}"


async def diagnosed(agent: str, agent_timeout_s: float = 60.0) -> dict[str, CheckResult]:
    return {one.check: one async for one in diagnose(Stack(agent=agent, agent_timeout_s=agent_timeout_s))}


async def test_a_faithful_agent_is_one_sample_that_trains_whole() -> None:
    results = await diagnosed(f"{TOY} faithful")
    assert {one.verdict for one in results.values()} == {Severity.OK}
    assert results["run"].measured == "4 turns on a scripted model, calls of bash"
    assert results["history"].measured == "every prompt extends the one before"
    assert results["samples"].measured == "1 sample per rollout, 100 % of tokens trained under every policy"


async def test_an_agent_that_rewrites_replies_is_named_with_the_edit() -> None:
    results = await diagnosed(f"{TOY} shouts")
    history = results["history"]
    assert history.verdict is Severity.WARNING
    assert "the agent rewrites its history" in history.measured
    assert "became" in history.measured
    assert history.figures["forks"]["reply_rewritten"] >= 1
    assert "keep-head" in (history.advice or "")
    assert results["samples"].figures["exact"]["samples"] > 1


async def test_an_agent_that_edits_earlier_messages_is_named() -> None:
    results = await diagnosed(f"{TOY} summarizes")
    assert results["history"].verdict is Severity.WARNING
    assert "history_edited" in results["history"].figures["forks"]


async def test_thinking_that_the_template_drops_is_not_blamed_on_the_agent() -> None:
    results = await diagnosed("chat")
    assert results["history"].verdict is Severity.NOTE
    assert "--thinking-retention all" in (results["history"].advice or "")


@pytest.mark.parametrize(
    ("how", "verdict", "measured"),
    [
        ("silent", Severity.FAULT, "the agent sent the model no request"),
        ("fails", Severity.WARNING, 'exit code 3; it printed "out of luck"'),
        ("hangs", Severity.FAULT, "the agent sent the model no request"),
    ],
)
async def test_an_agent_that_does_not_run_is_named(how: str, verdict: Severity, measured: str) -> None:
    results = await diagnosed(f"{TOY} {how}", agent_timeout_s=3.0 if how == "hangs" else 60.0)
    assert results["run"].verdict is verdict
    assert measured in results["run"].measured


def test_only_tools_that_do_no_harm_are_called() -> None:
    def tool(name: str, *fields: str, required: tuple[str, ...] = ()) -> dict[str, object]:
        schema = {"type": "object", "properties": {field: {"type": "string"} for field in fields}}
        return {"type": "function", "function": {"name": name, "parameters": {**schema, "required": list(required)}}}

    delete, read = tool("delete_all", "path"), tool("read_file", "path", required=("path",))
    assert harmless_call([delete]) is None
    assert harmless_call([delete, read]) == ("read_file", None, {"path": "."})
    shell = tool("Bash", "command", "why", required=("command", "why"))
    assert harmless_call([delete, read, shell]) == ("Bash", "command", {"why": "."})

"""The scripts below examples/ do what they say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import rolltape
from collecting import ROOT, rollouts
from rolltape.records.fork import ForkCause
from rolltape.records.rollout import Status
from rolltape.tokens import read_tokens


def script(name: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", f"examples.{name}", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_demo_collects_three_environments_and_shows_what_became_of_them(tmp_path: Path) -> None:
    run = tmp_path / "demo"
    shown = script("demo", run)
    assert shown.returncode == 0, shown.stderr
    held = rollouts(run)
    assert 36 <= len(held) <= 100
    assert {one.head.source for one in held} == {"problem.jsonl", "message.jsonl", "game.jsonl"}
    assert {one.status for one in held} == {Status.FINISHED}
    commands = re.findall(r"^\$ rolltape (\w+)", shown.stdout, re.MULTILINE)
    assert commands == [*["collect"] * 3, "trace", "tree", "samples", "ledger", "ledger", "check", "tokens"]
    assert re.search(rf"^● 1 .*\[{ForkCause.THINKING_STRIPPED.value}\]$", shown.stdout, re.MULTILINE)
    assert "masked:rewritten_after" in shown.stdout
    assert "under exact, keep-head, slime: no breaches" in shown.stdout
    assert {record.rollout for record in read_tokens(run)} == {one.id for one in held}
    assert re.search(r"^http://127.0.0.1:\d+/demo\nIt answers\.", shown.stdout, re.MULTILINE)
    again = script("demo", run)
    assert again.returncode == 1
    assert "is there already; give another place" in again.stderr
    assert len(rollouts(run)) == len(held)


@pytest.mark.slow
def test_unmodified_clients_are_recorded_through_the_gateway(tmp_path: Path) -> None:
    shown = script("gateway_clients", tmp_path / "run")
    assert shown.returncode == 0, shown.stderr
    held = rollouts(tmp_path / "run")
    assert {one.head.agent for one in held} == {"openai-sdk", "anthropic-sdk", "tool-loop"}
    assert {one.status for one in held} == {Status.FINISHED}
    assert all(one.reward is not None for one in held)
    assert not any(rolltape.linearize(one).forks for one in held)

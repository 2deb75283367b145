"""The scripts below examples/ do what they say."""

import subprocess
import sys
from pathlib import Path

import pytest

import rolltape
from collecting import ROOT, rollouts
from rolltape.records.rollout import Status


def script(name: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", f"examples.{name}", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_unmodified_clients_are_recorded_through_the_gateway(tmp_path: Path) -> None:
    shown = script("gateway_clients", tmp_path / "run")
    assert shown.returncode == 0, shown.stderr
    held = rollouts(tmp_path / "run")
    assert {one.head.agent for one in held} == {"openai-sdk", "anthropic-sdk", "tool-loop"}
    assert {one.status for one in held} == {Status.FINISHED}
    assert all(one.reward is not None for one in held)
    assert not any(rolltape.linearize(one).forks for one in held)

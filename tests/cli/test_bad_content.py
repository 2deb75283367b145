"""One rollout whose content nobody can work with: it is named, and it does not stop the check of the others."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rolltape
from commands import Cli, rows
from rolltape.records.rollout import Rollout
from rolltape.tape.index.index import Index

EVERY = [
    ["tree"],
    ["samples"],
    ["samples", "--compare", "slime"],
    ["ledger"],
    ["show"],
    ["export"],
    ["export", "--what", "turns"],
    ["query", "SELECT * FROM samples"],
    ["query", "SELECT * FROM turns"],
]


class Unworkable:
    """A rollout that loads, but whoever asks for its sessions fails."""

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout

    def __getattr__(self, name: str) -> Any:
        if name == "sessions":
            raise RecursionError("maximum recursion depth exceeded")
        return getattr(self._rollout, name)


def patched(monkeypatch: pytest.MonkeyPatch, rollout_id: str, change: Callable[[Rollout], Any]) -> None:
    """Change what is read of one rollout."""
    load = Index.load

    def changed(index: Index, *key_and_place: Any) -> Any:
        rollout = load(index, *key_and_place)
        return change(rollout) if rollout.id == rollout_id else rollout

    monkeypatch.setattr(Index, "load", changed)


@pytest.fixture
def unloadable(rollout_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_rollout: Rollout) -> None:
        raise ValueError("no such thing")

    patched(monkeypatch, rollout_id, refuse)


@pytest.fixture
def unworkable(rollout_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patched(monkeypatch, rollout_id, Unworkable)


def _arguments(command: list[str], run: Path, rollout_id: str) -> list[object]:
    named = [rollout_id] if command[0] in ("tree", "show") else []
    return [command[0], run, *named, *command[1:]]


@pytest.mark.usefixtures("unloadable")
@pytest.mark.parametrize("command", EVERY, ids=" ".join)
def test_a_rollout_that_cannot_be_loaded_is_named(cli: Cli, run: Path, rollout_id: str, command: list[str]) -> None:
    result = cli(*_arguments(command, run, rollout_id))
    assert result.code == 3
    assert result.err.startswith(f"rolltape: rollout {rollout_id}: ValueError: no such thing")
    assert result.err.count("\n") == 1


@pytest.mark.usefixtures("unloadable")
@pytest.mark.parametrize("command", [["samples"], ["ledger"], ["export", "--what", "turns"]], ids=" ".join)
def test_only_rollouts_that_the_filters_select_are_loaded(
    cli: Cli, run: Path, rollout_id: str, command: list[str]
) -> None:
    with rolltape.open(run) as tape, tape.rollout(task_id="t", step=1, attempt=2) as third:
        third.finish(reward=0.0)
    for row in rows(cli("ls", run, "--json")):
        if row["rollout"] != rollout_id:
            assert cli("tag", run, row["rollout"], "chosen").code == 0
    result = cli(command[0], run, *command[1:], "--tag", "chosen")
    assert (result.code, result.err) == (0, "")


@pytest.mark.usefixtures("unworkable")
@pytest.mark.parametrize("command", EVERY, ids=" ".join)
def test_a_rollout_that_cannot_be_worked_with_is_named(
    cli: Cli, run: Path, rollout_id: str, command: list[str]
) -> None:
    result = cli(*_arguments(command, run, rollout_id))
    assert result.code == 3
    assert result.err.startswith(f"rolltape: rollout {rollout_id}: RecursionError: maximum")
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(("failing", "turns"), [("unloadable", 1), ("unworkable", 3)])
def test_check_goes_on_after_a_rollout_that_fails(
    cli: Cli, run: Path, rollout_id: str, failing: str, turns: int, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(failing)
    result = cli("check", run, "--json")
    *breaches, summary = rows(result)
    assert (result.code, result.err) == (1, "")
    assert rollout_id in {breach["where"] for breach in breaches}
    assert (summary["rollouts"], summary["turns"]) == (2, turns)
    assert summary["breaches"] == len(breaches)

"""W&B offline: the caller's rows stay as the caller numbers them, and a run of our own stays beside it."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb

from commands import Cli
from rolltape.errors import SinkError
from rolltape.tracking import ShownStep, StepSummary, wandb_sink
from rolltape.tracking.wandb import WandbRunTracker
from tracked import record_steps
from tracker_places import Wandb, patient

pytestmark = pytest.mark.slow


@pytest.fixture
def own_run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A run that the caller has opened."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = wandb.init(project=request.node.name[:40], settings=wandb.Settings(silent=True, console="off"))
    yield run
    run.finish()


def rows(run: Any) -> list[dict[str, Any]]:
    """The rows of a run, as W&B's own command prints them, without what W&B adds."""
    run.finish()
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(run.settings.sync_file)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    records = [json.loads(line) for line in printed.splitlines()]
    items = [record["history"]["item"] for record in records if record["type"] == "history"]
    wanted = ("_step", "loss", "rolltape/step", "train/rollouts/count", "test/rollouts/count")
    return [{name: item[name] for name in wanted if name in item} for item in items]


def step(number: int, rollouts: int = 1, split: str = "train") -> ShownStep:
    return ShownStep(split=split, step=number, summary=StepSummary(rollouts=rollouts))


def with_numbers(run: Any, number: int) -> None:
    run.log({"loss": float(number)}, step=number)


def without_numbers(run: Any, number: int) -> None:
    run.log({"loss": float(number)})


@pytest.mark.parametrize("log", [with_numbers, without_numbers])
def test_steps_join_the_rows_of_the_caller_whose_numbers_they_leave_alone(
    own_run: Any, log: Callable[[Any, int], None]
) -> None:
    tracker = WandbRunTracker(own_run)  # called here as the outbox would on its thread, in an order that is fixed
    log(own_run, 0)
    tracker.put(step(0, 2))
    tracker.put(step(0, 3, "test"))
    tracker.put(step(1, 4))  # would hide step 0 in this row
    log(own_run, 1)
    tracker.put(step(2, 5))
    log(own_run, 2)
    tracker.close()
    found = rows(own_run)
    assert [row["loss"] for row in found if "loss" in row] == [0.0, 1.0, 2.0]
    if log is with_numbers:
        assert [row["_step"] for row in found if "loss" in row] == [0, 1, 2]
    counts = {
        (name, row["rolltape/step"]): row[name]
        for row in found
        for name in ("train/rollouts/count", "test/rollouts/count")
        if name in row
    }
    assert counts == {
        ("train/rollouts/count", 0): 2,
        ("test/rollouts/count", 0): 3,
        ("train/rollouts/count", 1): 4,
        ("train/rollouts/count", 2): 5,
    }


def test_run_of_its_own_stays_beside_the_current_one_and_the_current_one_is_taken_without_a_project(
    own_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Wandb("beside", monkeypatch)
    with patient(place.sink()) as beside:
        beside.put(step(0, 7))
    with patient(wandb_sink()) as sink:
        sink.put(step(0, 8))
    assert beside.delivery.complete
    assert sink.delivery.complete
    assert wandb.run is own_run
    with_numbers(own_run, 0)
    assert [row.get("train/rollouts/count") for row in rows(own_run)] == [8]
    assert place.figures()["train/rollouts/count", 0] == 7


def test_rows_of_a_run_that_is_continued_offline_have_numbers_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = Wandb("continued", monkeypatch)
    for number in (0, 1):
        with patient(place.sink()) as sink:
            sink.put(step(number))
    assert [(row["_step"], row["rolltape/step"]) for row in place.rows()] == [(0, 0), (1, 1)]


def test_push_that_adds_nothing_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cli: Cli
) -> None:
    place = Wandb("nothing", monkeypatch)
    run = record_steps(tmp_path / "exp", steps=1)
    cli("push", run, "--to", place.to)
    before = place.folders()
    assert "2 steps already there" in cli("push", run, "--to", place.to).out
    assert place.folders() == before


def test_what_an_offline_file_does_not_hold_is_said_at_close(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Wandb("lost", monkeypatch)
    sink = place.sink()
    sink.put(step(0))
    monkeypatch.setattr("rolltape.tracking.wandb._read_rows", lambda file: iter(()))
    delivery = sink.close(timeout_s=600)
    assert not delivery.complete
    assert "1 of 1 steps that were logged are not in the file" in delivery.errors[0]


def test_disabled_wandb_keeps_nothing_and_is_refused(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    wandb.teardown()
    refused = cli("push", record_steps(tmp_path / "exp", steps=1), "--to", "wandb:sums")
    monkeypatch.undo()
    wandb.teardown()
    assert refused.code == 4
    assert "rolltape: wandb: it is disabled here" in refused.err


def test_no_run_to_log_into_is_an_error_at_the_start() -> None:
    with pytest.raises(SinkError, match=r"wandb has no current run here; call wandb\.init first"):
        wandb_sink()

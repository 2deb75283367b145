"""A run on each of the five trackers: the same figures and rollouts, each once, read back by the tracker's own API."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

import rolltape
from commands import Cli
from rolltape.tracking import ShownStep, StepSummary, load_step, show_step, step_metrics
from rolltape.tracking.push import StepKey
from tracked import record_conversation, record_steps
from tracker_places import TRACKERS, Mlflow, Otel, Place, open_place, patient, same

VIEWER = "http://127.0.0.1:8500/?key=secret"


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Mlflow.empty_database(tmp_path_factory)


@pytest.fixture(params=TRACKERS)
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with open_place(request, tmp_path, monkeypatch) as opened:
        yield opened


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return record_steps(tmp_path / "exp")


def figures_on_tape(run: Path, *keys: StepKey) -> dict[tuple[str, int], float]:
    tape = rolltape.read(run)
    steps = [load_step(tape, key, lambda *_: []) for key in keys]
    return {(name, step.step): value for step in steps for name, value in step_metrics(step).items()}


ALL = [StepKey(step, split) for step in (0, 1) for split in ("train", "test")]


def test_pushed_run_is_there_with_its_figures_rollouts_and_links_and_once_however_often_it_is_pushed(
    place: Place, run: Path, cli: Cli
) -> None:
    first = cli("push", run, "--to", place.to, "--step", 0, "--view-url", VIEWER)
    assert (first.code, first.out.splitlines()[-1]) == (0, f"2 steps and 3 traces pushed to {place.to}")
    second = cli("push", run, "--to", place.to, "--view-url", VIEWER)
    assert second.out.splitlines()[-1] == f"2 steps and 3 traces pushed to {place.to}; 2 steps already there"
    third = cli("push", run, "--to", place.to)
    assert third.out.splitlines()[-1] == f"0 steps and 0 traces pushed to {place.to}; 4 steps already there"

    assert same(place.figures(), figures_on_tape(run, *ALL))
    held = place.rollouts()
    recorded = {row.id: row.outcome.reward for row in rolltape.read(run).index()}
    assert sorted(one.rollout for one in held) == sorted(recorded)
    for one in held:
        assert one.reward == recorded[one.rollout]
        assert one.page == f"http://127.0.0.1:8500/exp/rollout/{one.rollout}?try=0"


def test_steps_of_a_training_loop_are_there_and_neither_it_nor_a_push_adds_one_twice_later(
    place: Place, run: Path, cli: Cli
) -> None:
    tape = rolltape.read(run)
    with patient(place.sink()) as sink:
        assert show_step(sink, tape, step=1)  # the later one first
        assert show_step(sink, tape, step=0)
    assert sink.delivery.complete
    if isinstance(place, Otel):  # a collector cannot be asked, and a sink has no run to remember it in
        assert same(place.figures(), figures_on_tape(run, StepKey(0, "train"), StepKey(1, "train")))
        return
    with patient(place.sink()) as again:
        show_step(again, tape, step=1)
        show_step(again, tape, step=1, split="test")
    assert (again.delivery.held, again.delivery.delivered) == (1, 1)
    assert "3 steps already there" in cli("push", run, "--to", place.to).out
    assert same(place.figures(), figures_on_tape(run, *ALL))


def test_nan_stays_a_number_and_odd_rollouts_cost_nothing(place: Place, tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "odd", name="exp") as tape:
        record_conversation(tape, task="half a \ud83d", reward=math.nan)
        record_conversation(tape, task="*", attempt=1, reward=math.inf)
        tape.rollout(task_id="broken", attempt=2).fail("the sandbox did not start")
        summary = StepSummary(rollouts=1, reward_terms={"right": math.nan, "speed *": 2.5})
        with patient(place.sink()) as sink:
            sink.put(ShownStep(split="train", step=3, summary=summary))
            show_step(sink, tape.run(), step=0)
    assert sink.delivery.complete
    figures = place.figures()
    assert math.isnan(figures["train/reward_terms/right", 3])
    assert 2.5 in [value for (name, _), value in figures.items() if name.startswith("train/reward_terms/speed")]
    assert (figures["train/reward/not_finite", 0], figures["train/rollouts/failed", 0]) == (2, 1)

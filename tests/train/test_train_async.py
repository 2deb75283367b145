"""A trainer learns while another process collects ahead of it: which weights sampled each token, and which train.

The example in small, with the trainer held back until the collector has run as far ahead as it may. The long form, in
which the reward rises, is `make demo-train`.
"""

import copy
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import torch
from examples.train_async.__main__ import main
from examples.train_async.collector import Collecting
from examples.train_async.train import AsyncTraining, StepReport, training
from examples.train_tiny.loss import logprobs_of
from examples.train_tiny.trainer import Recipe
from examples.train_tiny.weights import hand_over

import rolltape
from rolltape.cli import run as rolltape_command
from rolltape.errors import EngineError
from rolltape.gateway.admin_key import find_gateway, read_admin_key
from rolltape.integrations.torch import pad
from rolltape.records.sample import Fate
from rolltape.records.turn import Turn
from rolltape.tokens import read_tokens

RECIPE = Recipe(tasks=2, group_size=2)
AHEAD = Collecting(seed=1, steps=100, tasks=2, group_size=2, max_ahead=6)  # three steps, and there is always another
MAX_STALENESS = 1


class Trained(NamedTuple):
    """Three steps of a training, and a reply that went on under newer weights than it began with."""

    run: Path
    begun: dict[int, int]  # rollouts of each step, when the trainer took the first
    reports: list[StepReport]
    later: list[rolltape.Group]
    weights: dict[str, dict[str, torch.Tensor]]  # by version
    model: Any


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    run = tmp_path_factory.mktemp("train") / "run"
    torch.set_num_threads(1)
    with training(run, RECIPE, AHEAD, MAX_STALENESS) as it:
        weights = {"0": _weights(it)}
        _wait_until(lambda: _ended_groups(run) == AHEAD.max_ahead)
        begun = {step: sum(row.step == step for row in rolltape.read(run).index()) for step in range(4)}
        reports = []
        for step in range(3):
            reports.append(it.step(step))
            weights[str(step + 1)] = _weights(it)
        with pytest.raises(EngineError, match="the gateway is paused"):
            it.live.update_weights(run / "nowhere", "4")
        yield Trained(run, begun, reports, _until_one_went_on(it, run, weights), weights, it.trainer.model)


def _until_one_went_on(
    it: AsyncTraining, run: Path, weights: dict[str, dict[str, torch.Tensor]]
) -> list[rolltape.Group]:
    """Change the weights while replies are in flight, until the groups that are taken have one that went on."""
    later: list[rolltape.Group] = []
    while not any(_went_on(turn) for turn in _turns(later)):
        with torch.no_grad():
            it.trainer.model.model.norm.weight.mul_(0.99)
        version = str(len(weights))
        hand_over(it.trainer.model, it.live, run / "weights", version)
        weights[version] = _weights(it)
        for group in it.live.request(limit=RECIPE.tasks):
            group.done()
            later.append(group)
        _wait_until(lambda: _in_flight(run) > 0)
    return later


def test_collection_runs_ahead_as_far_as_it_may_and_no_farther(trained: Trained) -> None:
    assert trained.begun == {0: 4, 1: 4, 2: 4, 3: 0}


def test_groups_of_a_collector_ahead_are_as_stale_as_it_is_ahead(trained: Trained) -> None:
    assert [list(report.tokens.by_staleness) for report in trained.reports] == [[0], [1], [2]]
    assert [{group.step for group in report.groups} for report in trained.reports] == [{0}, {1}, {2}]


def test_tokens_beyond_the_limit_do_not_train_and_all_others_do(trained: Trained) -> None:
    within, at_limit, beyond = trained.reports
    for report in (within, at_limit):
        assert report.masked == 0
        assert _trained_tokens(report) == report.tokens.total > 50
    assert beyond.masked == beyond.tokens.total > 50
    assert _trained_tokens(beyond) == 0
    stale = rolltape.cut_policy("exact", max_staleness=MAX_STALENESS)
    rollouts = [rollout for group in beyond.groups for rollout in group.rollouts]
    made = [rolltape.linearize(rollout, stale, versions=("0", "1", "2")) for rollout in rollouts]
    assert sum(one.ledger.totals()[Fate.MASKED_STALE] for one in made) == beyond.masked


def test_a_step_whose_tokens_are_all_stale_changes_no_weight(trained: Trained) -> None:
    changed = [
        any(not torch.equal(trained.weights[old][name], weight) for name, weight in trained.weights[new].items())
        for old, new in (("0", "1"), ("2", "3"))
    ]
    assert changed == [True, False]


def test_replies_in_flight_go_on_under_the_new_weights(trained: Trained) -> None:
    continued = [turn for turn in _turns(trained.later) if _went_on(turn)]
    assert continued
    for turn in continued:
        for one, next_one in pairwise(turn.facts.segments):
            assert one.stop == next_one.start
            assert int(one.first_version or -1) < int(next_one.first_version or -1)
    assert rolltape.read(trained.run).versions() == tuple(trained.weights)


def test_each_token_has_the_probability_that_the_weights_of_its_version_give_it(trained: Trained) -> None:
    """Also in replies that went on, whose parts are of different weights."""
    groups = [group for report in trained.reports for group in report.groups] + trained.later
    samples = [sample for group in groups for sample in group.samples]
    assert any(len(sample.versions) > 1 for sample in samples)
    model = copy.deepcopy(trained.model)
    seen = set()
    for version, weights in trained.weights.items():
        model.load_state_dict(weights)
        for sample in samples:
            names = np.array([first for first, _ in sample.versions] + [""])  # -1, no version, is the last one
            own = (names[sample.version_index] == version) & sample.trained_mask
            if own.any():
                with torch.no_grad():
                    logprobs_bl, _ = logprobs_of(model, pad([sample]), RECIPE.temperature)
                np.testing.assert_allclose(logprobs_bl[0].numpy()[own], sample.logprobs[own], atol=1e-3)
                seen.add(version)
    assert len(seen) > 1


def test_what_the_trainer_saw_agrees_with_the_tape(trained: Trained) -> None:
    _wait_until(lambda: any(read_tokens(trained.run, step=0, stable_only=True)))  # written in the background
    assert rolltape_command(["tokens", str(trained.run), "check", "--advantage", "normalized"]) == 0


def test_a_limit_that_the_trainer_could_never_free_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--run", str(tmp_path), "--tasks", "8", "--max-ahead", "7"])
    assert "the trainer holds 8 groups at a time" in capsys.readouterr().err


def _wait_until(holds: Callable[[], bool]) -> None:
    """Wait as long as a busy machine takes, and not for a collector that is gone."""
    deadline_s = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def _weights(it: AsyncTraining) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in it.trainer.model.state_dict().items()}


def _ended_groups(run: Path) -> int:
    rows = rolltape.read(run).index()
    ended = [row.group for row in rows if row.outcome.reward is not None]
    return sum(ended.count(group) == AHEAD.group_size for group in set(ended))


def _in_flight(run: Path) -> int:
    gateway = find_gateway(str(run))
    assert gateway is not None
    headers = {"Authorization": f"Bearer {read_admin_key(run)}"}
    in_flight: int = httpx.get(f"{gateway.url}/status", headers=headers, timeout=60).json()["in_flight"]
    return in_flight


def _turns(groups: list[rolltape.Group]) -> Iterator[Turn]:
    return (turn for group in groups for rollout in group.rollouts for turn in rollout.turns)


def _went_on(turn: Turn) -> bool:
    return len({segment.first_version for segment in turn.facts.segments}) > 1


def _trained_tokens(report: StepReport) -> int:
    return sum(sample.trained_tokens for group in report.groups for sample in group.samples)

"""A recorder may give any number as a time, and any JSON as `extra`: what cannot be read counts as not known."""

import math
from pathlib import Path
from typing import Any

import pytest

import rolltape
from rolltape.records.rollout import Rollout
from rolltape.samples.facts import fact_lines
from rolltape.samples.spelling import Spellings
from rolltape.view.rollout.detail import build_detail

TIMES = [math.nan, math.inf, -math.inf, 1e300]
EXTRAS = [
    {"ignored_params": ["top_k: not applied", 1, {"a": 2}], "prefix_miss": 5},
    {"unhonoured": ["top_k: not applied"], "prompt_why": ["x"]},
]


def a_rollout(folder: Path, **fields: Any) -> Rollout:
    with rolltape.open(folder) as tape, tape.rollout(task_id="t") as rollout:
        rollout.session().record_turn(
            prompt_messages=[{"role": "user", "content": "go"}],
            prompt_ids=[1],
            sampled_ids=[2],
            logprobs=[-0.5],
            finish="stop",
            **fields,
        )
        rollout.finish(reward=1.0)
    return rolltape.read(folder).rollout(rollout.id)


@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("name", ["started_at", "ended_at"])
def test_a_time_that_is_none_is_not_known(tmp_path: Path, name: str, time: float) -> None:
    rollout = a_rollout(tmp_path / "run", **{"started_at": 5.0, "ended_at": 7.0, name: time})
    made = rolltape.linearize(rollout)
    assert next(fact_lines(made)).startswith("1 turn, 0 forks, ")
    build_detail(made, None, Spellings())


@pytest.mark.parametrize("extra", EXTRAS)
def test_notes_of_another_form_are_left_out(tmp_path: Path, extra: dict[str, Any]) -> None:
    rollout = a_rollout(tmp_path / "run", extra=extra)
    (turn,) = rollout.turns
    assert (turn.ignored_params, turn.prefix_miss) == (["top_k: not applied"], None)
    assert "not applied: top_k: not applied" in list(fact_lines(rolltape.linearize(rollout)))

"""A glance at each skill on held-out problems, greedily; docs/reference/model.md has the measured figures."""

from functools import partial
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

import pytest
import torch
from training.evaluate import MakeAttempt, run
from training.sampling import Sampler
from training.skills import arithmetic, calculator, formats, guessing, toolcalls
from training.split import Split

FOLDER = Path(__file__).parents[2] / "src/rolltape/tiny/models/tiny"


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    torch.set_num_threads(1)  # threads that wait for each other on a busy machine cost minutes
    return Sampler(FOLDER, "cpu")


def two_digits(rng: Random) -> arithmetic.Sum:
    return arithmetic.Sum(rng.randint(10, 99), "+", rng.randint(10, 99))


SKILLS: dict[str, MakeAttempt] = {
    "two-digit sums": partial(arithmetic.attempt, make=two_digits),
    "calculator": calculator.attempt,
    "demanded format": formats.attempt,
    "guess the number": guessing.attempt,
    "one of two tools": partial(toolcalls.attempt, tools=2),
}


@pytest.mark.parametrize("thinking_on", [False, True], ids=["not thinking", "thinking"])
@pytest.mark.parametrize("attempt", SKILLS.values(), ids=SKILLS.keys())
def test_skill_is_there_on_held_out_problems(sampler: Sampler, attempt: MakeAttempt, thinking_on: bool) -> None:
    problems = [attempt(Random(seed), Split.HELD_OUT, thinking_on=thinking_on) for seed in range(4)]
    played = run(sampler, problems, temperature=0.0, seed=0)
    replies = [reply for one in played for reply in one.replies]
    assert mean(one.reward or 0.0 for one in played) >= 0.5
    assert all(reply.ended for reply in replies)
    assert all(bool(reply.thinking) is thinking_on for reply in replies)


def test_attempts_at_one_problem_differ_at_temperature_one(sampler: Sampler) -> None:
    attempts: list[Any] = [
        arithmetic.attempt(Random(seed), Split.HELD_OUT, thinking_on=False) for seed in range(6) for _ in range(8)
    ]
    rewards = [one.reward for one in run(sampler, attempts, temperature=1.0, seed=0)]
    groups = [rewards[start : start + 8] for start in range(0, 48, 8)]
    assert sum(len(set(group)) > 1 for group in groups) >= 2

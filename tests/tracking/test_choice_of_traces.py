"""Which rollouts are shown: a few of many, the same ones whatever order they came in."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltape.records.rollout import Status
from rolltape.records.trace import Trace
from rolltape.tracking.choice import Allowance, Candidate, Choice, chosen
from rolltape.tracking.summary import ShownStep

REWARDS = st.one_of(st.none(), st.floats())


def candidates(rewards: list[float | None]) -> list[Candidate]:
    return [Candidate(f"r{place}", reward) for place, reward in enumerate(rewards)]


def trace(name: str, reward: float | None = None) -> Trace:
    return Trace(
        run="exp",
        rollout=name,
        try_index=0,
        group="g",
        step=0,
        attempt=0,
        status=Status.FINISHED,
        total_reward=reward,
    )


@given(rewards=st.lists(REWARDS, max_size=12), limit=st.integers(-2, 14), choice=st.sampled_from(Choice))
def test_as_many_as_there_may_be_each_once(rewards: list[float | None], limit: int, choice: Choice) -> None:
    positions = chosen(candidates(rewards), limit, choice)
    assert positions == sorted(set(positions))
    assert len(positions) == max(0, min(limit, len(rewards)))
    assert all(0 <= position < len(rewards) for position in positions)


@given(
    rewards=st.lists(REWARDS, max_size=12),
    limit=st.integers(0, 14),
    choice=st.sampled_from([Choice.UNIFORM, Choice.REWARDS]),
    seed=st.integers(0, 1000),
)
def test_order_of_arrival_does_not_matter(rewards: list[float | None], limit: int, choice: Choice, seed: int) -> None:
    here = candidates([reward if reward is None or not math.isnan(reward) else 0.0 for reward in rewards])
    here = [one for one in here if one.reward is not None]
    shuffled = random.Random(seed).sample(here, len(here))
    picked = {here[position].id for position in chosen(here, limit, choice)}
    assert {shuffled[position].id for position in chosen(shuffled, limit, choice)} == picked


def test_over_rewards_both_ends_and_evenly_between() -> None:
    rewards: list[float | None] = [5.0, 1.0, 3.0, None, 2.0, 4.0, math.nan]
    picked = chosen(candidates(rewards), 3, Choice.REWARDS)
    assert [rewards[position] for position in picked] == [5.0, 1.0, 3.0]
    assert [rewards[position] for position in chosen(candidates(rewards), 1, Choice.REWARDS)] == [3.0]


def test_over_rewards_those_without_one_fill_what_is_left() -> None:
    assert chosen(candidates([None, 1.0, math.nan, 0.0]), 3, Choice.REWARDS) == [0, 1, 3]


def test_uniform_is_not_simply_the_first() -> None:
    many = candidates([0.0] * 100)
    picked = chosen(many, 10, Choice.UNIFORM)
    assert picked != list(range(10))
    assert chosen(many[::-1], 10, Choice.UNIFORM) == sorted(99 - position for position in picked)


@pytest.mark.parametrize("limit", [0, -1])
def test_no_traces_are_shown_under_a_limit_of_none(limit: int) -> None:
    step = ShownStep(split="train", step=0, traces=(trace("a"), trace("b")))
    assert Allowance(limit).limited(step).traces == ()


def test_limit_holds_over_several_calls_of_one_step_and_apart_for_splits() -> None:
    allowance = Allowance(3)
    two = (trace("a"), trace("b"))

    def shown(split: str, step: int) -> list[str]:
        kept = allowance.limited(ShownStep(split=split, step=step, traces=two))
        return [one.rollout for one in kept]

    assert shown("train", 0) == ["a", "b"]
    assert shown("train", 0) == ["a"]
    assert shown("train", 0) == []
    assert shown("eval", 0) == ["a", "b"]
    assert shown("train", 1) == ["a", "b"]

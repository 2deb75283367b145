"""Rewards, advantages and weights count rollouts, never samples."""

import math

import pytest

from rolltape.records.policy import Advantage, Credit, LossWeight, RewardShare
from rolltape.records.rollout import EventKind, Rollout, RolloutHead, Status
from rolltape.samples import group_advantages, linearize, samples_of_group
from sessions import Recording, event, rollout_of, user


def forked() -> Recording:
    recording = Recording()
    first = recording.ask([user("u")], "a b c")
    recording.go_on(first, [user("v")], "d")
    recording.go_on(first, [user("w")], "e")
    return recording


def test_the_full_reward_goes_to_every_sample() -> None:
    samples = list(linearize(rollout_of(forked().session(), reward=0.5)).samples(advantage=0.25))
    assert [sample.reward for sample in samples] == [0.5, 0.5]
    assert [sample.advantage for sample in samples] == [0.25, 0.25]
    assert [(sample.index, sample.siblings) for sample in samples] == [(0, 2), (1, 2)]


@pytest.mark.parametrize("reward", [1.0, 0.1, -1 / 3, 0.0])
def test_split_rewards_sum_to_the_reward(reward: float) -> None:
    recording = forked()
    recording.go_on(recording.turns[0], [user("x")], "f")
    linearized = linearize(
        rollout_of(recording.session(), reward=reward), credit=Credit(reward_share=RewardShare.SPLIT)
    )
    shares = [sample.reward for sample in linearized.samples()]
    assert len(shares) == 3
    assert sum(share for share in shares if share is not None) == pytest.approx(reward, abs=1e-15)
    assert all(sample.rollout_reward == reward for sample in linearized.samples())


def test_a_reward_that_is_not_finite_is_not_split() -> None:
    linearized = linearize(
        rollout_of(forked().session(), reward=math.inf), credit=Credit(reward_share=RewardShare.SPLIT)
    )
    assert [sample.reward for sample in linearized.samples()] == [math.inf, math.inf]


def test_loss_weights_make_a_forked_rollout_count_once() -> None:
    rollout = rollout_of(forked().session())
    weights = [(sample.trained_tokens, sample.loss_weight) for sample in linearize(rollout).samples()]
    assert weights == [(6, 0.75), (2, 0.25)]
    even = linearize(rollout, credit=Credit(loss_weight=LossWeight.EVEN)).samples()
    assert [sample.loss_weight for sample in even] == [0.5, 0.5]


def test_a_rollout_without_a_reward_gives_samples_without_one() -> None:
    samples = list(linearize(rollout_of(forked().session(), reward=None)).samples())
    assert [(sample.reward, sample.rollout_reward) for sample in samples] == [(None, None)] * 2


def test_late_rewards_replace_earlier_ones_and_filters_can_be_taken_back() -> None:
    session = forked().session()
    late = event(9, EventKind.SCORE, {"reward": 0.0})
    assert rollout_of(session, events=[late]).reward == 0.0
    filtered = event(9, EventKind.FILTER, {"reason": "too easy"})
    back = event(10, EventKind.FILTER, {"reason": None})
    assert len(linearize(rollout_of(session, events=[filtered]))) == 0
    assert len(linearize(rollout_of(session, events=[filtered, back]))) == 2


def test_advantages_are_centered_on_the_mean_of_the_group() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 1.0], Advantage.CENTRED) == [0.5, -0.5, -0.5, 0.5]
    assert group_advantages([1.0, 0.0, 0.0, 0.0], Advantage.NORMALIZED) == pytest.approx(
        [math.sqrt(3), *[-1 / math.sqrt(3)] * 3]
    )


def test_equal_rewards_have_no_advantage() -> None:
    assert group_advantages([0.3, 0.3, 0.3], "normalized") == [0.0, 0.0, 0.0]
    assert group_advantages([0.1], "centered") == [0.0]


@pytest.mark.parametrize("kind", ["centered", "normalized"])
@pytest.mark.parametrize("count", [2, 3, 6, 12, 15])
def test_equal_rewards_have_no_advantage_whatever_rounding_does(kind: str, count: int) -> None:
    for hundredths in range(-100, 101):
        assert group_advantages([hundredths / 100] * count, kind) == [0.0] * count


def test_huge_rewards_do_not_overflow() -> None:
    assert group_advantages([1e200, 0.0], "centered") == [5e199, -5e199]
    assert group_advantages([1e308, 1e308, 0.0, 0.0], "normalized") == [1.0, 1.0, -1.0, -1.0]


def test_rollouts_without_a_finite_reward_are_left_out_of_the_mean() -> None:
    assert group_advantages([1.0, None, math.nan, 0.0, math.inf], "centered") == [0.5, None, None, -0.5, None]
    assert group_advantages([None], "centered") == [None]
    assert group_advantages([1.0, 0.0], "none") == [None, None]


def attempt(number: int, reward: float | None, status: Status = Status.FINISHED, try_index: int = 0) -> Rollout:
    recording = Recording(rollout=f"r{number}")
    recording.ask([user("u")], "a")
    made = rollout_of(recording.session(), reward=reward, status=status, rollout=f"r{number}")
    head = RolloutHead(
        id=f"r{number}", try_index=try_index, group="g", run="run", step=0, attempt=number, task_id="t", started_at_ns=0
    )
    return Rollout(head, made.sessions, made.events, writer_alive=False)


def test_advantages_of_a_group_leave_out_what_the_infrastructure_broke() -> None:
    broken = attempt(2, 5.0, Status.FAILED)
    samples = list(samples_of_group([attempt(0, 1.0), attempt(1, 0.0), broken]))
    assert [(sample.rollout, sample.advantage) for sample in samples] == [("r0", 0.5), ("r1", -0.5)]


def test_a_rollout_with_nothing_to_train_counts_in_the_mean() -> None:
    silent = rollout_of(reward=0.0, rollout="r9")
    samples = list(samples_of_group([attempt(0, 1.0), silent]))
    assert [(sample.rollout, sample.advantage) for sample in samples] == [("r0", 0.5)]


def test_of_several_tries_the_latest_finished_one_counts() -> None:
    tries = [attempt(0, 0.0, Status.FAILED), attempt(0, 1.0, try_index=1), attempt(0, None, Status.FAILED, try_index=2)]
    samples = list(samples_of_group([*tries, attempt(1, 0.0)]))
    assert [(sample.rollout, sample.try_index, sample.advantage) for sample in samples] == [
        ("r0", 1, 0.5),
        ("r1", 0, -0.5),
    ]

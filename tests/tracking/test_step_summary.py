"""What a step comes to: the ledger, forks and staleness of its rollouts, and what is left out of its averages."""

from importlib import import_module
from pathlib import Path

import pytest

import rolltape
import rolltape.tracking
from rolltape.records.fork import ForkCause
from rolltape.records.rollout import Status
from rolltape.records.sample import Fate
from rolltape.tracking import StepKey, load_step, split_of
from rolltape.tracking.choice import chosen
from rolltape.tracking.summary import StepSummary, compute_spread, step_metrics
from taped import assistant, first_turn, next_turn, user

KEY = StepKey(step=0, split="train")


def summary(path: Path, policy: str = "exact") -> StepSummary:
    shown = load_step(rolltape.read(path), KEY, lambda split, step, candidates: chosen(candidates, 2), policy)
    assert shown.summary is not None
    return shown.summary


def test_ledger_and_forks_are_counted_under_the_policy(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "exp") as tape, tape.rollout(task_id="t", step=0) as rollout:
        session = rollout.session()
        first_turn(session, sampled_ids=[4, 5, 6], logprobs=[-0.5, None, -0.25], reply=assistant("done  so"))
        first_turn(
            session,
            prompt_messages=[user("hello"), assistant("done so"), user("and?")],
            prompt_ids=[1, 2, 3, 4, 6, 8],
            sampled_ids=[9],
            logprobs=[-1.0],
        )
        rollout.finish(reward=1.0)
    exact, slime = summary(tmp_path / "exp"), summary(tmp_path / "exp", "slime")
    assert exact.forks == {ForkCause.REPLY_WHITESPACE: 1}
    assert exact.fates == {Fate.TRAINED: 3, Fate.MASKED_NO_LOGPROB: 1}
    assert slime.fates == {Fate.TRAINED: 1, Fate.MASKED_REWRITTEN: 3}
    shown = load_step(rolltape.read(tmp_path / "exp"), KEY, lambda split, step, candidates: [])
    figures = step_metrics(shown)
    assert (figures["train/ledger/trained"], figures["train/ledger/masked/no_logprob"]) == (0.75, 0.25)
    assert figures["train/forks/reply_whitespace"] == 1


def test_staleness_is_counted_from_the_newest_version_that_trained(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "exp") as tape:
        for version in ("5", "7", "8", "9"):
            tape.announce_version(version)
        with tape.rollout(task_id="t", step=0) as rollout:
            session = rollout.session()
            turn = first_turn(session, weight_version="5")
            next_turn(session, turn, logprobs=[-0.1, -0.2, -0.3], weight_version="8")
            rollout.finish(reward=1.0)
    assert summary(tmp_path / "exp").staleness == {0: 3, 2: 2}


def test_rollouts_that_failed_count_and_have_no_part_in_rewards(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "exp") as tape:
        for attempt, reward in enumerate([1.0, float("inf")]):
            with tape.rollout(task_id="t", step=0, attempt=attempt) as rollout:
                first_turn(rollout.session())
                rollout.finish(reward=reward)
        tape.rollout(task_id="t", step=0, attempt=2).fail("no sandbox")
    found = summary(tmp_path / "exp")
    assert found.statuses == {Status.FINISHED: 2, Status.FAILED: 1}
    assert found.rewards == compute_spread([1.0])
    assert found.rewards_not_finite == 1


def test_of_several_tries_the_one_that_counts_is_shown(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "exp") as tape:
        tape.rollout(task_id="t", step=0).fail("no sandbox")
        with tape.rollout(task_id="t", step=0, new_try=True) as rollout:
            first_turn(rollout.session())
            rollout.finish(reward=1.0)
    shown = load_step(rolltape.read(tmp_path / "exp"), KEY, lambda split, step, candidates: chosen(candidates, 9))
    assert [(trace.try_index, trace.status) for trace in shown] == [(1, Status.FINISHED)]


def test_spread_of_huge_numbers_does_not_overflow() -> None:
    spread = compute_spread([1e308, 1e308, float("nan")])
    assert spread is not None
    assert (spread.count, spread.mean, spread.std, spread.median) == (2, 1e308, 0.0, 1e308)
    assert compute_spread([float("nan")]) is None


def test_split_is_what_a_source_names_last() -> None:
    assert split_of("sums.jsonl#test") == "test"
    assert split_of("a%23b#train") == "train"
    assert split_of("python:tasks:make") == "train"
    assert split_of(None, "eval") == "eval"


@pytest.mark.parametrize(
    ("home", "old", "new"),
    [
        ("rolltape.tracking", "Delivery", "DeliveryReport"),
        ("rolltape.tracking", "step_of_tape", "load_step"),
        ("rolltape.traces", "traces_from_batch", "traces_from_batch"),
        ("rolltape.traces", "traces_from_batch_async", "traces_from_batch_async"),
    ],
)
def test_names_of_0_1_0_warn_and_work(home: str, old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{home}.{old} is deprecated; use"):
        found = getattr(import_module(home), old)
    assert found is getattr(rolltape.tracking, new)

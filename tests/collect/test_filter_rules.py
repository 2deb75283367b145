"""Rules that judge rollouts after the fact, and what becomes of their filters when they judge again."""

from collections.abc import Iterable
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rolltape
from grouped_runs import filtered, record_group, said
from rolltape.collect import filters
from rolltape.collect.filters import Verdict
from rolltape.errors import FilterError
from rolltape.records.rollout import Event, EventKind, Rollout
from rolltape.records.sample import Fate
from rolltape.samples import linearize, samples_of_group
from rolltape.tape.journal.entries import NewEvent
from rolltape.tape.run import RolloutRow, Run
from taped import first_turn, next_turn

NAN = float("nan")


def reasons(verdicts: Iterable[Verdict]) -> dict[str, str | None]:
    return {verdict.rollout: verdict.unjudged or verdict.reason for verdict in verdicts}


def judge_spread(path: Path) -> None:
    run = rolltape.read(path)
    say(path, filters.changes(run, filters.no_spread(run.index()), by=filters.NO_SPREAD))


def say(path: Path, statements: list[NewEvent]) -> None:
    with rolltape.open(path) as tape:
        tape.append_events(statements)


def test_groups_whose_rewards_are_all_the_same_have_no_spread(tmp_path: Path) -> None:
    equal = record_group(tmp_path, "equal", [1, 1, 1])
    spread = record_group(tmp_path, "spread", [1, 0, 1])
    single = record_group(tmp_path, "single", [0.5])
    unrewarded = record_group(tmp_path, "unrewarded", [None, None])
    verdicts = reasons(filters.no_spread(rolltape.read(tmp_path).index()))
    assert [verdicts[one] for one in equal] == ["all 3 rewards of its group are 1"] * 3
    assert [verdicts[one] for one in single] == ["its group has one reward"]
    assert [verdicts[one] for one in spread + unrewarded] == [None] * 5


def test_a_group_without_spread_is_one_in_which_every_advantage_is_0(tmp_path: Path) -> None:
    rounding = record_group(tmp_path, "rounding", [0.1 + 0.2, 0.3])
    beside_nan = record_group(tmp_path, "beside nan", [2, NAN, 2, None])
    tiny = record_group(tmp_path, "tiny", [1e-9, 2e-9])
    run = rolltape.read(tmp_path)
    verdicts = reasons(filters.no_spread(run.index()))
    for ids in (rounding, beside_nan, tiny):
        group = [run.rollout(one) for one in ids]
        same = {sample.advantage for sample in samples_of_group(group)} <= {0.0, None}
        assert {verdicts[one] is not None for one in ids} == {same}
    assert verdicts[beside_nan[1]] == "all 2 rewards of its group are 2"


def test_a_group_of_which_a_rollout_runs_is_not_judged(tmp_path: Path) -> None:
    ids = record_group(tmp_path, "a", [1, 1])
    with rolltape.open(tmp_path) as tape, tape.rollout(task_id="a", attempt=2) as rollout:
        verdicts = list(filters.no_spread(tape.run().index()))
        assert {verdict.unjudged for verdict in verdicts} == {"its group has rollouts that still run"}
        assert filters.changes(tape.run(), verdicts, by=filters.NO_SPREAD) == []
        rollout.finish(reward=1)
    assert sum(verdict.reason is not None for verdict in filters.no_spread(rolltape.read(tmp_path).index())) == 3
    assert len(ids) == 2


def test_a_failed_rollout_says_nothing_of_its_groups_spread_and_is_not_filtered(tmp_path: Path) -> None:
    ids = record_group(tmp_path, "a", [1, 1])
    with rolltape.open(tmp_path) as tape:
        tape.rollout(task_id="a", attempt=2).fail("the sandbox is gone")
    assert reasons(filters.no_spread(rolltape.read(tmp_path).index())).keys() == set(ids)


def test_of_several_tries_the_one_that_counts_is_judged(tmp_path: Path) -> None:
    (one, other) = record_group(tmp_path, "a", [1, 0])
    with rolltape.open(tmp_path) as tape, tape.rollout(task_id="a", attempt=1, new_try=True) as again:
        again.finish(reward=1)
    verdicts = list(filters.no_spread(rolltape.read(tmp_path).index()))
    assert {verdict.key for verdict in verdicts if verdict.reason is not None} == {(one, 0), (other, 1)}
    judge_spread(tmp_path)
    assert [row.outcome.filtered is not None for row in rolltape.read(tmp_path).index()] == [True, False, True]


def test_a_rollout_is_as_old_as_the_oldest_weights_that_its_replies_name(tmp_path: Path) -> None:
    with rolltape.open(tmp_path, name="exp") as tape:
        for version in ("a", "b", "c"):
            tape.announce_version(version)
        with tape.rollout(task_id="mixed") as mixed:
            session = mixed.session()
            turn = first_turn(session, weight_version="c")
            next_turn(session, turn, weight_version=("a", "b"))
            mixed.finish()
    fresh, stale, unknown = record_group(tmp_path, "t", [0, 1, 2], versions=["c", "b", None])
    run = rolltape.read(tmp_path)
    assert reasons(filters.stale(run.index(), run.versions(), 0)) == {
        mixed.id: "sampled by weights a, more than 0 versions behind the newest",
        fresh: None,
        stale: "sampled by weights b, more than 0 versions behind the newest",
        unknown: "its replies name no weight version",
    }
    within_one = reasons(filters.stale(run.index(), run.versions(), 1))
    assert within_one[mixed.id] == "sampled by weights a, more than 1 version behind the newest"
    assert within_one[stale] is None
    assert reasons(filters.stale(run.index(), run.versions(), 2))[mixed.id] is None


def test_rules_that_need_outcomes_alone_read_no_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_group(tmp_path, "a", [1, 1], versions=["1", "2"])
    for name in ("rollout", "rollouts", "latest"):
        monkeypatch.setattr(Run, name, lambda *_: pytest.fail("a rollout was loaded"))
    run = rolltape.read(tmp_path)
    judge_spread(tmp_path)
    assert any(verdict.reason for verdict in filters.stale(run.index(), run.versions(), 0))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("too short", "too short"),
        (True, "rejected by python:rules:f"),
        (np.True_, "rejected by python:rules:f"),
        (False, None),
        (np.False_, None),
        (None, None),
    ],
)
def test_a_function_rejects_with_a_reason_or_true(tmp_path: Path, given: object, reason: str | None) -> None:
    (one,) = record_group(tmp_path, "a", [1])
    run = rolltape.read(tmp_path)
    assert reasons(filters.rejected(run, run.index(), lambda _: given, "python:rules:f")) == {one: reason}


@pytest.mark.parametrize("given", [1, 0, "", "  ", [], {"reason": "x"}])
def test_what_is_no_verdict_is_refused(tmp_path: Path, given: object) -> None:
    record_group(tmp_path, "a", [1])
    run = rolltape.read(tmp_path)
    with pytest.raises(FilterError, match=r"rules:f: it gave .* nothing was filtered"):
        list(filters.rejected(run, run.index(), lambda _: given, "rules:f"))


def test_a_function_sees_messages_outcome_and_trace(tmp_path: Path) -> None:
    ids = record_group(tmp_path, "a", [1, 0], texts=["yes", "I cannot do that"])

    def refusal(rollout: Rollout) -> str | None:
        trace = rolltape.trace_of(rollout)
        response = trace.steps[-1].policy_response
        assert response is not None
        assert trace.total_reward == rollout.outcome.reward
        assert rollout.turns[0].prompt_messages == [{"role": "user", "content": "hello"}]
        return "it refuses" if "cannot" in response["content"] else None

    run = rolltape.read(tmp_path)
    assert reasons(filters.rejected(run, run.index(), refusal, "refusal")) == {ids[0]: None, ids[1]: "it refuses"}


def test_a_rollout_whose_turns_were_pruned_is_not_given_to_a_function(tmp_path: Path) -> None:
    (old,) = record_group(tmp_path, "a", [1], step=0)
    (new,) = record_group(tmp_path, "a", [1], step=1)
    rolltape.prune(tmp_path, before_step=1)
    run = rolltape.read(tmp_path)
    verdicts = reasons(filters.rejected(run, run.index(), lambda _: True, "f"))
    assert verdicts == {old: "its turns were pruned", new: "rejected by f"}


def test_a_function_that_raises_filters_nothing(tmp_path: Path) -> None:
    ids = record_group(tmp_path, "a", [1, 1, 1])

    def fails_at_the_last(rollout: Rollout) -> bool:
        if rollout.id == ids[-1]:
            raise KeyError("score")
        return True

    run = rolltape.read(tmp_path)
    verdicts = filters.rejected(run, run.index(), fails_at_the_last, "f")
    with pytest.raises(FilterError, match=rf"f: it raised KeyError: 'score' \({Path(__file__).name}, line \d+\)"):
        filters.changes(run, verdicts, by="f")


def test_judging_again_says_nothing_twice(tmp_path: Path) -> None:
    ids = record_group(tmp_path, "a", [1, 1])
    judge_spread(tmp_path)
    assert filtered(tmp_path) == dict.fromkeys(ids, "all 2 rewards of its group are 1")
    judge_spread(tmp_path)
    assert [event.by for event in said(tmp_path, EventKind.FILTER)] == ["no-spread"] * 2


def test_judging_again_takes_back_what_no_longer_holds(tmp_path: Path) -> None:
    ids = record_group(tmp_path, "a", [1, 1])
    judge_spread(tmp_path)
    with rolltape.open(tmp_path) as tape:
        tape.score(ids[0], reward=0)
    judge_spread(tmp_path)
    assert filtered(tmp_path) == {}
    assert len(said(tmp_path, EventKind.FILTER)) == 4


def test_a_filter_of_another_rule_stands_when_one_is_taken_back(tmp_path: Path) -> None:
    ids = record_group(tmp_path, "a", [1, 1], versions=["1", "2"])
    run = rolltape.read(tmp_path)
    say(tmp_path, filters.changes(run, filters.stale(run.index(), run.versions(), 0), by=filters.STALE))
    judge_spread(tmp_path)
    with rolltape.open(tmp_path) as tape:
        tape.score(ids[0], reward=0)
    judge_spread(tmp_path)
    assert filtered(tmp_path) == {ids[0]: "sampled by weights 1, more than 0 versions behind the newest"}
    say(tmp_path, filters.undone(run, run.index(), by=filters.STALE))
    assert filtered(tmp_path) == {}


def test_filters_are_undone_by_rule_or_all(tmp_path: Path) -> None:
    ids = record_group(tmp_path, "a", [1, 1])
    judge_spread(tmp_path)
    with rolltape.open(tmp_path) as tape:
        tape.filter(ids[0], "by hand", by="me")
    run = rolltape.read(tmp_path)
    assert filters.undone(run, run.index(), by="nobody") == []
    say(tmp_path, filters.undone(run, run.index(), by="no-spread"))
    assert filtered(tmp_path) == {ids[0]: "by hand"}
    say(tmp_path, filters.undone(run, run.index()))
    assert filtered(tmp_path) == {}
    assert filters.undone(run, run.index()) == []


def test_what_is_filtered_does_not_train_and_still_counts_in_its_groups_mean(tmp_path: Path) -> None:
    ids = record_group(tmp_path, "a", [1, 0, 0])
    with rolltape.open(tmp_path) as tape:
        tape.filter(ids[0], "it cheats", by="python:rules:cheats")
    group = list(rolltape.read(tmp_path).rollouts())
    assert linearize(group[0]).ledger.totals() == {Fate.DROPPED_FILTERED: 2}
    advantages = {sample.rollout: sample.advantage for sample in samples_of_group(group)}
    assert advantages == {ids[1]: pytest.approx(-1 / 3), ids[2]: pytest.approx(-1 / 3)}


def test_a_reward_of_nan_takes_a_rollout_out_of_its_groups_mean(tmp_path: Path) -> None:
    ids = record_group(tmp_path, "a", [1, 0, 1])
    with rolltape.open(tmp_path) as tape:
        tape.score(ids[0], reward=NAN)
    advantages = {sample.rollout: sample.advantage for sample in samples_of_group(list(tape.run().rollouts()))}
    assert advantages == {ids[0]: None, ids[1]: -0.5, ids[2]: 0.5}


class SaidSoFar:
    """A run of one rollout, as far as filters go."""

    id, key = "one", ("one", 0)

    def __init__(self) -> None:
        self.events: list[Event] = []

    def remarks(self, kind: EventKind) -> list[Event]:
        return [event for event in self.events if event.kind == kind]

    def say(self, statements: Iterable[NewEvent]) -> None:
        for kind, rollout, data, by, try_index, turn in statements:
            self.events.append(Event("w", len(self.events), 0, kind, rollout, try_index, turn, by, data))


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["judge", "undo"]), st.sampled_from([None, "x", "y"])))
)
def test_a_rollout_is_filtered_as_long_as_any_rule_says_so(steps: list[tuple[str, str, str | None]]) -> None:
    so_far = SaidSoFar()
    run, rows = cast("Run", so_far), [cast("RolloutRow", so_far)]
    expected: dict[str, str] = {}
    for rule, what, reason in steps:
        before = len(so_far.events)
        if what == "judge" and reason is not None:
            is_news = expected.get(rule) != reason
            expected[rule] = reason
        else:
            is_news = expected.pop(rule, None) is not None
        so_far.say(
            filters.undone(run, rows, by=rule)
            if what == "undo"
            else filters.changes(run, [Verdict("one", 0, reason)], by=rule)
        )
        assert filters.active_filters(run).get(so_far.key, {}) == expected
        assert (len(so_far.events) > before) == is_news
        latest = so_far.events[-1].data["reason"] if so_far.events else None
        assert (latest is None) == (not expected)

"""Rewards that come late or again, by rollout id: all of them are recorded, or none."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rolltape
from grouped_runs import index, record_group, said
from rolltape.collect.rewards import LateReward, RewardPaths, late_rewards, record_rewards
from rolltape.collect.sources.entries import SourceEntry
from rolltape.errors import NoSuchRollout, RecordError
from rolltape.records.rollout import EventKind


def given(path: Path, *values: Any, by: str | None = None) -> list[LateReward]:
    entries = [SourceEntry(f"line {number}", value) for number, value in enumerate(values, 1)]
    return late_rewards(rolltape.read(path), entries, label="rewards.jsonl", by=by)


def recorded(path: Path, *values: Any, by: str | None = None) -> list[LateReward]:
    rewards = given(path, *values, by=by)
    with rolltape.open(path) as tape:
        record_rewards(tape, rewards)
    return rewards


def test_rewards_land_on_the_rollouts_they_name_in_any_order(tmp_path: Path) -> None:
    ids = record_group(tmp_path, "a", [1, 1, None])
    recorded(
        tmp_path,
        {"rollout": ids[2], "reward": 3, "terms": {"style": 0.5}, "by": "judge"},
        {"rollout": ids[0][:9], "reward": -0.25},
        by="file",
    )
    rows = index(tmp_path)
    assert [rows[one].outcome.reward for one in ids] == [-0.25, 1, 3]
    assert [rows[one].outcome.rewarded_by for one in ids] == ["file", None, "judge"]
    assert rows[ids[2]].outcome.reward_terms == {"style": 0.5}


def test_rewards_may_be_plain_objects_with_numbers_of_numpy(tmp_path: Path) -> None:
    (one,) = record_group(tmp_path, "a", [1])
    run = rolltape.read(tmp_path)
    with rolltape.open(tmp_path) as tape:
        record_rewards(tape, late_rewards(run, [{"rollout": one, "reward": np.float32(0.5), "turn": None, "by": None}]))
    assert run.rollout(one).reward == 0.5
    with pytest.raises(RecordError, match=r"^reward 0: run exp holds no rollout 'zz'"):
        late_rewards(run, [{"rollout": "zz", "reward": 1}])


def test_what_the_tape_says_already_is_not_said_again(tmp_path: Path) -> None:
    (one,) = record_group(tmp_path, "a", [1])
    reward = {"rollout": one, "reward": math.nan, "terms": {"a": math.nan}, "by": "judge"}
    assert [late.is_new for late in recorded(tmp_path, reward)] == [True]
    (again,) = recorded(tmp_path, reward)
    assert not again.is_new
    assert again.before is not None
    assert math.isnan(again.before)
    for other in ({**reward, "by": "other"}, {**reward, "terms": {}}, {**reward, "reward": 0}):
        assert [late.is_new for late in given(tmp_path, other)] == [True]
    assert len(said(tmp_path, EventKind.SCORE)) == 2


@pytest.mark.parametrize("spelling", [math.nan, {"$float": "nan"}])
def test_numbers_that_json_lacks_stay_numbers(tmp_path: Path, spelling: object) -> None:
    (one,) = record_group(tmp_path, "a", [1])
    recorded(tmp_path, {"rollout": one, "reward": spelling, "terms": {"a": {"$float": "-inf"}}})
    outcome = index(tmp_path)[one].outcome
    assert outcome.reward is not None
    assert math.isnan(outcome.reward)
    assert outcome.reward_terms == {"a": -math.inf}


def test_a_turn_is_named_by_its_id_or_by_session_and_number(tmp_path: Path) -> None:
    one, other = record_group(tmp_path, "a", [1, 1])
    recorded(tmp_path, {"rollout": one, "reward": 2, "turn": "0.0"}, {"rollout": one, "reward": 0.5})
    recorded(tmp_path, {"rollout": other, "reward": 3, "turn": f"{other}.0.0.0"})
    run = rolltape.read(tmp_path)
    assert [run.rollout(name).turns[0].facts.reward for name in (one, other)] == [2, 3]
    assert [run.rollout(name).reward for name in (one, other)] == [0.5, 1]


def test_without_a_try_it_is_the_one_that_counts(tmp_path: Path) -> None:
    (one,) = record_group(tmp_path, "a", [1])
    with rolltape.open(tmp_path) as tape:
        tape.rollout(task_id="a", attempt=0, new_try=True).fail("gone")
    recorded(tmp_path, {"rollout": one, "reward": 0.5})
    assert rolltape.read(tmp_path).rollout(one, 0).reward == 0.5
    recorded(tmp_path, {"rollout": one, "reward": 0.25, "try": 1})
    assert [event.try_index for event in said(tmp_path, EventKind.SCORE)] == [0, 0, 1]


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ({"rollout": "ID", "reward": "high"}, "reward is 'high', a str; give a number"),
        ({"rollout": "ID", "reward": "nan"}, "reward is 'nan', a str; give a number"),
        ({"rollout": "ID", "reward": None}, "its reward is null"),
        ({"rollout": "ID", "reward": {"$float": "much"}}, "reward is {'$float': 'much'}"),
        ({"rollout": "ID", "reward": {"value": 1}}, "reward is {'value': 1}, a dict; give a number"),
        ({"rollout": "ID", "reward": 10**400}, "more than a float holds"),
        ({"rollout": "ID"}, "it has no reward"),
        ({"reward": 1}, "it has no rollout"),
        ({"rollout": 7, "reward": 1}, "its rollout is 7; give the id, a text"),
        ({"rollout": "", "reward": 1}, "run exp holds no rollout ''"),
        ({"rollout": "zz", "reward": 1}, "run exp holds no rollout 'zz'"),
        ({"rollout": "ID", "reward": 1, "try": 5}, "has no try 5; it has 0"),
        ({"rollout": "ID", "reward": 1, "try": 0.5}, "try is 0.5; give a whole number"),
        (
            {"rollout": "ID", "reward": 1, "term": {"a": 1}},
            "it has a field 'term'; a reward has rollout, reward",
        ),
        ({"rollout": "ID", "reward": 1, "terms": {"a": "b"}}, "reward term 'a' is 'b'"),
        ({"rollout": "ID", "reward": 1, "terms": 3}, "reward terms are a int"),
        ({"rollout": "ID", "reward": 1, "by": 3}, "by is 3, a int; give a text"),
        ({"rollout": "ID", "reward": 1, "turn": "last"}, "not a turn's id"),
        ({"rollout": "ID", "reward": 1, "turn": "other.0.0.0"}, "that turn belongs to try 0 of rollout other"),
        ([1], "this is [1]; a reward is an object"),
    ],
)
def test_a_bad_reward_is_named_with_its_place_and_none_is_recorded(tmp_path: Path, value: Any, what: str) -> None:
    one, other = record_group(tmp_path, "a", [1, 1])
    if isinstance(value, dict) and value.get("rollout") == "ID":
        value = {**value, "rollout": one}
    with pytest.raises(RecordError) as refused:
        recorded(tmp_path, {"rollout": other, "reward": 5}, value)
    assert str(refused.value).startswith("rewards.jsonl, line 2: ")
    assert what in str(refused.value)
    assert len(said(tmp_path, EventKind.SCORE)) == 2


def test_all_bad_rewards_are_told_at_once(tmp_path: Path) -> None:
    record_group(tmp_path, "a", [1])
    with pytest.raises(RecordError) as refused:
        given(tmp_path, *({"rollout": "zz", "reward": 1} for _ in range(12)))
    first, *lines = str(refused.value).split("\n  ")
    assert first == "rewards.jsonl: 12 entries cannot be used, and no reward was recorded"
    assert lines[0] == "line 1: run exp holds no rollout 'zz'; `rolltape ls` lists those that it has"
    assert (len(lines), lines[-1]) == (11, "and 2 more")


def test_a_rollout_that_is_rewarded_twice_is_refused(tmp_path: Path) -> None:
    (one,) = record_group(tmp_path, "a", [1])
    with pytest.raises(RecordError, match="line 2: its reward is given in line 1 already"):
        given(tmp_path, {"rollout": one, "reward": 1}, {"rollout": one[:6], "reward": 2})


def test_a_beginning_of_several_ids_is_refused(tmp_path: Path) -> None:
    ids = record_group(tmp_path, "a", [0.0] * 17)
    shared = next(one[0] for one in ids if sum(other[0] == one[0] for other in ids) > 1)
    with pytest.raises(RecordError, match=f"'{shared}' begins the ids of"):
        given(tmp_path, {"rollout": shared, "reward": 1})


def foreign_group(path: Path, *names: str) -> list[str]:
    with rolltape.open(path, name="exp") as tape:
        ids = []
        for attempt, name in enumerate(names):
            rollout = tape.rollout(task_id="t", attempt=attempt, foreign_ids=[name])
            rollout.finish()
            ids.append(rollout.id)
    return ids


def test_a_reward_finds_its_rollout_by_a_foreign_id(tmp_path: Path) -> None:
    ids = foreign_group(tmp_path, "trace-a", "trace-b")
    recorded(tmp_path, {"rollout": "trace-b", "reward": 1}, {"rollout": "trace-a", "reward": 0})
    assert [index(tmp_path)[one].outcome.reward for one in ids] == [0, 1]
    with pytest.raises(RecordError, match="line 2: its reward is given in line 1 already"):
        given(tmp_path, {"rollout": ids[0], "reward": 1}, {"rollout": "trace-a", "reward": 2})


def test_a_reward_for_a_foreign_id_goes_to_the_try_that_has_it(tmp_path: Path) -> None:
    with rolltape.open(tmp_path, name="exp") as tape:
        for name in ("first", "second"):
            tape.rollout(task_id="t", foreign_ids=[name], new_try=True).finish()
    recorded(tmp_path, {"rollout": "first", "reward": 0.25}, {"rollout": "second", "reward": 0.75})
    assert [row.reward for row in rolltape.read(tmp_path).index()] == [0.25, 0.75]


def test_files_of_other_programs_are_read_by_the_names_of_their_fields(tmp_path: Path) -> None:
    ids = foreign_group(tmp_path, "a", "17")
    fields = RewardPaths("info.0.id", "scores.total", ("scores.style", "metrics"))
    objects: list[dict[str, Any]] = [
        {"info": [{"id": "a"}], "scores": {"total": 0.5, "style": 1}, "metrics": {"turns": 3, "why": "x"}, "more": []},
        {"info": [{"id": 17}], "scores.total": 2, "scores": {"style": {"$float": "nan"}}, "metrics": {}},
    ]
    rewards = late_rewards(rolltape.read(tmp_path), objects, fields=fields, by="them")
    with rolltape.open(tmp_path) as tape:
        record_rewards(tape, rewards)
    first, second = (index(tmp_path)[one].outcome for one in ids)
    assert (first.reward, first.reward_terms, first.rewarded_by) == (0.5, {"style": 1, "turns": 3}, "them")
    assert second.reward == 2
    assert math.isnan(second.reward_terms["style"])


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ({"id": "a"}, "it has no field 'scores.total'; its fields are id"),
        ({"id": "a", "scores": 3}, "it has no field 'scores.total'; its fields are id, scores"),
        ({"scores": {"total": 1}}, "it has no field 'id'; its fields are scores"),
        ({"id": "a", "scores": {"total": 1, "style": 1}, "style": 2}, "style: there is a term 'style' already"),
        ({"id": "a", "scores": {"total": None}}, "its reward is null"),
        ([1], "a reward is an object"),
    ],
)
def test_a_file_of_another_program_without_such_fields_is_refused(tmp_path: Path, value: Any, what: str) -> None:
    foreign_group(tmp_path, "a")
    terms = ("scores.style", "style") if "style" in what else ()
    with pytest.raises(RecordError, match=re.escape(what)):
        late_rewards(rolltape.read(tmp_path), [value], fields=RewardPaths("id", "scores.total", terms))


def test_unknown_rollouts_are_skipped_if_asked_for_and_ambiguous_ones_never(tmp_path: Path) -> None:
    foreign_group(tmp_path, "a", "same", "same")
    unknown: list[str] = []
    run = rolltape.read(tmp_path)
    objects: list[Any] = [{"rollout": "zz", "reward": 1}, {"rollout": "a", "reward": 2}]
    (found,) = late_rewards(run, objects, on_unknown=unknown.append)
    assert (found.reward, unknown) == (2, ["reward 0"])
    with pytest.raises(RecordError, match="'same' is a foreign id of 2 rollouts"):
        late_rewards(run, [*objects, {"rollout": "same", "reward": 1}], on_unknown=unknown.append)


def test_a_turn_that_is_not_there_keeps_the_others_from_being_recorded(tmp_path: Path) -> None:
    one, other = record_group(tmp_path, "a", [1, 1])
    with pytest.raises(NoSuchRollout, match=r"rewards.jsonl, line 2: turn .*\.0\.0\.5: its session has 1 turns"):
        recorded(tmp_path, {"rollout": one, "reward": 5}, {"rollout": other, "reward": 5, "turn": "0.5"})
    assert len(said(tmp_path, EventKind.SCORE)) == 2

"""The table of tasks says of each task what its attempts say, counted one by one."""

import itertools
import math
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rolltape
from rolltape.errors import NoAnswer
from strategies import searching
from viewing import answers_for


class Attempted(NamedTuple):
    """An attempt at a task; no reward: it failed."""

    task: int
    step: int
    reward: float | None


attempts = st.lists(
    st.builds(
        Attempted, st.integers(0, 4), st.integers(0, 2), st.sampled_from([None, 0.0, 0.25, 1.0, 1.0, math.nan, 2.0])
    ),
    min_size=1,
    max_size=24,
)


def _record(path: Path, made: Sequence[Attempted]) -> None:
    with rolltape.open(path, name="run") as tape:
        for number, one in enumerate(made):
            with tape.rollout(task_id=f"task-{one.task}", step=one.step, attempt=number) as rollout:
                if one.reward is None:
                    rollout.fail("it broke")
                else:
                    rollout.finish(reward=one.reward)


def _pass_at(k: int, groups: Sequence[Sequence[bool]]) -> float | None:
    """By drawing every k of the attempts."""
    chances = [
        sum(any(drawn) for drawn in itertools.combinations(group, k)) / math.comb(len(group), k)
        for group in groups
        if len(group) >= k
    ]
    return sum(chances) / len(chances) if chances else None


@settings(searching, max_examples=searching.max_examples // 5)
@given(attempts, st.sampled_from([None, 0.25, 2.0]))
def test_tasks_are_what_their_attempts_say(made: list[Attempted], solved_at: float | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _record(Path(folder) / "run", made)
        with answers_for(Path(folder) / "run") as answers:
            query = {} if solved_at is None else {"solved_at": str(solved_at)}
            _check(made, answers.tasks(query))
            for which in ("none", "some", "all", "unrewarded"):
                chosen = answers.tasks({**query, "solved_by": which})
                assert chosen["matched"] == len(chosen["rows"]) == answers.tasks(query)[which]
            for step in {one.step for one in made}:
                _check([one for one in made if one.step == step], answers.tasks({**query, "step": str(step)}))


def _check(made: Sequence[Attempted], told: dict[str, Any]) -> None:
    rewards: dict[str, list[float]] = defaultdict(list)
    groups: dict[tuple[str, int], list[bool]] = defaultdict(list)
    for one in made:
        name = f"task-{one.task}"
        rewards[name] += [one.reward] if one.reward is not None and math.isfinite(one.reward) else []
        if one.reward is not None and math.isfinite(one.reward):
            groups[name, one.step].append(one.reward >= told["solved_at"])
    assert {row["task"] for row in told["rows"]} == set(rewards)
    for row in told["rows"]:
        own = rewards[row["task"]]
        assert row["rollouts"] == sum(f"task-{one.task}" == row["task"] for one in made)
        assert (row["attempts"], row["solved"]) == (len(own), sum(one >= told["solved_at"] for one in own))
        assert row["mean"] == (pytest.approx(sum(own) / len(own)) if own else None)
        assert row["best"] == max(own, default=None)
        assert [step for step, _ in row["by_step"]] == sorted({s for name, s in groups if name == row["task"]})
    solved = [[one >= told["solved_at"] for one in own] for own in rewards.values()]
    assert told["none"] == sum(bool(own) and not any(own) for own in solved)
    assert told["all"] == sum(bool(own) and all(own) for own in solved)
    assert told["unrewarded"] == sum(not own for own in solved)
    assert told["none"] + told["some"] + told["all"] + told["unrewarded"] == told["tasks"] == len(rewards)
    for k, name in ((1, "pass_1"), (told["k"], "pass_k")):
        wanted = _pass_at(k, list(groups.values()))
        assert told[name] == (None if wanted is None else pytest.approx(wanted))
    means = [row["mean"] for row in told["rows"] if row["mean"] is not None]
    assert means == sorted(means)  # the hardest first


def test_a_task_without_an_id_is_known_by_its_content_and_one_name_in_two_sources_is_two_tasks(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run", name="run") as tape:
        for attempt in range(2):
            for given in (
                {"task": {"prompt": "Hi"}},
                {"task_id": "1", "split": "train"},
                {"task_id": "1", "split": "test"},
            ):
                with tape.rollout(attempt=attempt, source="sums", **given) as rollout:
                    rollout.finish(reward=float(attempt))
    with answers_for(tmp_path / "run") as answers:
        rows = answers.tasks({})["rows"]
        assert [(row["attempts"], row["solved"]) for row in rows] == [(2, 1)] * 3
        assert {(row["source"], row["task"]) for row in rows} >= {("sums#train", "1"), ("sums#test", "1")}
        assert answers.table({"source": "sums#test", "task": "1"}, None)["matched"] == 2


def test_a_name_is_found_by_a_part_of_it_and_sorted_by_what_changed(tmp_path: Path) -> None:
    _record(tmp_path / "run", [Attempted(0, 0, 0.0), Attempted(0, 1, 1.0), Attempted(1, 0, 1.0), Attempted(1, 1, 0.5)])
    with answers_for(tmp_path / "run") as answers:
        assert [row["task"] for row in answers.tasks({"name": "SK-1"})["rows"]] == ["task-1"]
        assert [row["task"] for row in answers.tasks({"sort": "-change"})["rows"]] == ["task-0", "task-1"]
        assert [row["task"] for row in answers.tasks({"sort": "change"})["rows"]] == ["task-1", "task-0"]


def test_tasks_are_sorted_by_the_spread_that_is_shown_also_if_rewards_are_large(tmp_path: Path) -> None:
    spreads = {0: 1.0, 1: 3.0, 2: 2.0}
    _record(tmp_path / "run", [Attempted(task, 0, 1e9 + at) for task, one in spreads.items() for at in (0.0, 2 * one)])
    with answers_for(tmp_path / "run") as answers:
        rows = answers.tasks({"sort": "-spread"})["rows"]
    assert [(row["task"], row["spread"]) for row in rows] == [("task-1", 3.0), ("task-2", 2.0), ("task-0", 1.0)]


@pytest.mark.parametrize("query", [{"sort": "color"}, {"solved_by": "few"}, {"solved_at": "much"}, {"step": "1.5"}])
def test_a_query_that_cannot_be_answered_says_what_can(tmp_path: Path, query: dict[str, str]) -> None:
    _record(tmp_path / "run", [Attempted(0, 0, 1.0)])
    with answers_for(tmp_path / "run") as answers, pytest.raises(NoAnswer, match="give"):
        answers.tasks(query)


def test_a_run_without_rollouts_has_no_tasks(tmp_path: Path) -> None:
    _record(tmp_path / "run", [])
    with answers_for(tmp_path / "run") as answers:
        told = answers.tasks({"sort": "-change"})
    assert (told["tasks"], told["rows"], told["pass_1"], told["by_step"]) == (0, [], None, [])

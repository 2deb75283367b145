"""Why reward changed from one step to another: parts that add up, found where they are, and stated with their error."""

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rolltape
from rolltape.errors import NoAnswer
from rolltape.view.run.overview import build_histogram
from rolltape.view.run.run_answers import RunAnswers
from stepped_runs import EDITED, LONE, SHORT, TRUNCATED, record_stepped
from viewing import answers_for


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunAnswers]:
    with answers_for(record_stepped(tmp_path_factory.mktemp("steps") / "exp")) as answers:
        yield answers


def _by(change: dict[str, Any], name: str) -> dict[Any, dict[str, Any]]:
    (found,) = [one for one in change["by"] if one["name"] == name]
    return {tuple(one["name"]) if isinstance(one["name"], list) else one["name"]: one for one in found["kinds"]}


def test_a_change_is_found_with_the_task_the_stop_reason_and_the_length_that_caused_it(answers: RunAnswers) -> None:
    change = answers.change({"step": "1"})
    assert (change["against"], change["neighbors"]) == (0, [0, 2])
    assert (change["change"]["means"], change["change"]["by"]) == ([0.5, 0.25], -0.25)
    assert change["tasks"] == {
        "shared": 4,
        "only": [0, 0],
        "by": -0.25,
        "error": pytest.approx(0.25),
        "up": 0,
        "down": 1,
    }
    parse = _by(change, "task")["parse"]
    assert (parse["part"], parse["rewarded"], parse["mixed"], parse["means"]) == (-0.25, -0.25, 0, [1, 0])
    assert parse["filters"] == {"task": "parse", "source": "made-up"}
    assert next(iter(_by(change, "environment"))) == "code"
    # There are now rollouts that a limit ended, and fewer that completed.
    stopped = _by(change, "stop_reason")
    assert (stopped["max_tokens"]["counts"], stopped["max_tokens"]["means"]) == ([0, 4], [None, 0])
    assert stopped["max_tokens"]["part"] < 0
    assert _by(change, "truncated")["yes"]["counts"] == [0, 5]
    # Rollouts with tool errors are those with two turns, which is told once.
    assert [one["also"] for one in change["by"] if one["name"] == "turns"] == [["tool_errors"]]
    assert (400, 400) in _by(change, "length")
    assert change["terms"]["add_up"]
    assert [one["name"] for one in change["terms"]["rows"]] == ["correct", "format", "length"]
    assert {one["name"]: one["means"] for one in change["measures"]}["truncated"] == [0, 5 / 16]


def test_steps_without_a_common_task_say_so_and_the_change_is_all_of_the_mixture(answers: RunAnswers) -> None:
    change = answers.change({"step": "2"})
    assert change["tasks"] == {"shared": 0, "only": [4, 2], "by": None, "error": None, "up": 0, "down": 0}
    (tasks,) = [one for one in change["by"] if one["name"] == "task"]
    assert tasks["rewarded"] == 0
    assert tasks["mixed"] == pytest.approx(change["change"]["by"])
    # The other way round it is the same change with the other sign.
    assert answers.change({"step": "1", "against": "2"})["change"]["by"] == -change["change"]["by"]


def test_parts_of_every_kind_add_up_to_the_change_in_a_random_run(tmp_path: Path) -> None:
    chance = random.Random(4)
    with rolltape.open(tmp_path / "run") as tape:
        for number in range(120):
            extra = {"environment": chance.choice("xyz")}
            with tape.rollout(task_id=f"t{chance.randrange(12)}", step=number % 2, attempt=number, extra=extra) as one:
                if chance.random() < 0.9:
                    one.finish(
                        reward=chance.choice([0, 0.5, 1, math.nan]), stop_reason=chance.choice(["completed", "timeout"])
                    )
                else:
                    one.fail("broken")
    with answers_for(tmp_path / "run") as answers:
        change = answers.change({"step": "1"})
        rows = answers.listing()
        means = [np.nanmean(rows.rewards[rows.state.rows.columns["step"] == step]) for step in (0, 1)]
    assert change["change"]["means"] == pytest.approx(means)
    assert {one["name"] for one in change["by"]} >= {"task", "environment", "stop_reason"}
    for by in change["by"]:
        assert by["rewarded"] + by["mixed"] == pytest.approx(change["change"]["by"])
        shown = sum(one["part"] for one in by["kinds"]) + by["others_part"]
        assert shown == pytest.approx(change["change"]["by"])
        assert all(one["part"] == pytest.approx(one["rewarded"] + one["mixed"]) for one in by["kinds"])


def test_the_standard_error_takes_attempts_at_one_task_as_one_draw(tmp_path: Path) -> None:
    """Sixteen copies of an attempt say no more than one."""
    for copies in (1, 16):
        with rolltape.open(tmp_path / f"run-{copies}") as tape:
            for step, rewards in enumerate(([0, 0, 1, 1], [1, 0, 1, 1])):
                for task, reward in enumerate(rewards):
                    for attempt in range(copies):
                        with tape.rollout(task_id=f"{step}-{task}", step=step, attempt=attempt) as rollout:
                            rollout.finish(reward=reward)
    errors = []
    for copies in (1, 16):
        with answers_for(tmp_path / f"run-{copies}") as answers:
            errors.append(answers.change({"step": "1"})["change"]["error"])
    assert errors[0] == pytest.approx(errors[1])
    residuals = [0.5, 0.5, -0.5, -0.5, 0.25, -0.75, 0.25, 0.25]
    assert errors[0] == pytest.approx(math.sqrt(8 / 7 * sum((one / 4) ** 2 for one in residuals)))


@pytest.mark.parametrize("query", [{}, {"step": "9"}, {"step": "1.5"}, {"step": "x"}, {"step": "1", "against": "9"}])
def test_a_step_that_cannot_be_explained_says_why(answers: RunAnswers, query: dict[str, str]) -> None:
    with pytest.raises(NoAnswer, match=r"step|against"):
        answers.change(query)


def test_a_single_step_has_nothing_to_be_compared_with(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="t") as rollout:
        rollout.finish(reward=1.0)
    with answers_for(tmp_path / "run") as answers:
        assert answers.change({"step": "0"}) | {"snapshot": 0} == {
            "step": 0, "against": None, "neighbors": [], "change": None, "snapshot": 0
        }  # fmt: skip


def _found(answers: RunAnswers, **query: str) -> list[tuple[str, int]]:
    return sorted((row["task"], row["attempt"]) for row in answers.table(query, None)["rows"])


def test_presets_find_what_looks_like_reward_hacking(answers: RunAnswers) -> None:
    told = {one["name"]: one for one in answers.overview(None)["presets"]}
    wanted = {"rewarded_truncated": TRUNCATED, "rewarded_short": SHORT, "edited_tests": EDITED, "far_from_group": LONE}
    assert told.keys() == wanted.keys()
    for name, one in wanted.items():
        assert (_found(answers, **told[name]["filters"]), told[name]["rollouts"]) == ([one], 1)
    assert _found(answers, far="above") == [LONE]
    assert _found(answers, far="below") == []
    assert len(_found(answers, truncated="yes")) == 5
    assert len(_found(answers, min_tool_errors="1")) == 8


def test_terms_sort_and_a_part_of_a_tasks_name_filters(answers: RunAnswers) -> None:
    table = answers.table({"task_like": "HARD"}, None)
    assert (table["matched"], table["terms"]) == (8, ["correct", "format", "length"])
    rows = answers.table({"sort": "-term.format", "step": "1"}, None)["rows"]
    assert [row["terms"]["format"] for row in rows] == [0.1] * 11 + [0.0] * 5
    for sort in ("took", "id", "trained_share", "tool_errors", "stop_reason", "environment", "group"):
        up, down = (answers.table({"sort": way + sort}, None)["rows"] for way in ("", "-"))
        assert len(up) == len(down) == 40
    assert [row["id"] for row in answers.table({"sort": "id"}, None)["rows"]] == sorted(
        row["id"] for row in answers.table({}, None)["rows"]
    )
    with pytest.raises(NoAnswer, match="give one of started"):
        answers.table({"sort": "term.none"}, None)


def test_charts_over_steps_count_lengths_truncations_and_tool_errors(answers: RunAnswers) -> None:
    lengths = [one["lengths"] for one in answers.overview(None)["by_step"]]
    assert [one["truncated"] for one in lengths] == [[0, 16], [5, 16], [0, 8]]
    assert [one["tool_errors"] for one in lengths] == [[4, 4], [4, 4], [0, 0]]
    assert [one["with_tool_errors"] for one in lengths] == [[4, 16], [4, 16], [0, 8]]
    assert [one["stop_reasons"] for one in lengths] == [
        {"completed": 16},
        {"completed": 12, "max_tokens": 4},
        {"completed": 8},
    ]
    assert lengths[0]["tokens"] == pytest.approx([100.25, 100, 100, 101])


def test_a_long_tail_gets_bins_of_equal_ratio_that_hold_every_rollout(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape:
        for number, tokens in enumerate([1, 2, 3, 4, 5, 6, 7, 8, 4000]):
            with tape.rollout(task_id="t", attempt=number) as rollout:
                rollout.session().record_turn(
                    prompt_messages=[],
                    prompt_ids=[1],
                    sampled_ids=[5] * tokens,
                    logprobs=[-0.5] * tokens,
                    finish="stop",
                )
                rollout.finish(reward=0)
    with answers_for(tmp_path / "run") as answers:
        found = answers.overview(None)["tokens_histogram"]
        turns = answers.overview(None)["turns_histogram"]
    assert found["log"]
    assert not turns["log"]
    assert sum(found["counts"]) == 9
    assert (found["edges"][0], found["edges"][-1]) == (1, 4000)
    assert found["quantiles"][0] == 5


@pytest.mark.parametrize("rewards", [(0.3, 0.1 + 0.2), (0.0, 5e-324), (-1e308, 1e308)])
def test_rewards_that_differ_by_rounding_alone_or_by_more_than_a_float_holds_have_a_histogram(
    rewards: tuple[float, float],
) -> None:
    found = build_histogram(np.array(rewards))
    assert found["edges"] == sorted(rewards)
    assert found["counts"] == [2]

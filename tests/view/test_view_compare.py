"""Two sides compared task by task: against counts by hand, and the tests against known figures."""

import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rolltape
from compared_runs import REWARDS, record_compared
from rolltape.cli import run as rolltape_command
from rolltape.errors import NoAnswer
from rolltape.view.compare.comparison import Comparisons, TaskComparison
from rolltape.view.compare.significance import paired_test
from rolltape.view.run.run_answers import RunAnswers
from rolltape.view.served_runs import ServedRun
from strategies import searching
from viewing import asking

Side = Sequence[tuple[int, float | None]]  # task and reward; None: the attempt failed


class Compared:
    """Compares runs that do not change."""

    def __init__(self, *runs: Path) -> None:
        self._runs = [ServedRun(path.name, str(path)) for path in runs]
        for run in self._runs:
            run.catch_up(words=False)
        self._answers = {run.name: RunAnswers(run) for run in self._runs}
        self._comparisons = Comparisons()

    def __call__(self, **query: str) -> dict[str, Any]:
        return self._comparisons.answer({"a": "base", "b": "tuned"} | query, self._answers)

    def close(self) -> None:
        for run in self._runs:
            run.close()


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compared]:
    compared = Compared(*record_compared(tmp_path_factory.mktemp("runs")))
    yield compared
    compared.close()


def test_two_runs_are_compared_task_by_task(compared: Compared) -> None:
    told = compared()
    assert (told["a"]["name"], told["b"]["name"], told["a"]["versions"]) == ("base", "tuned", ["v0"])
    result = told["result"]
    # By hand: nine tasks by +0.5, one by +0.75, one by -0.5, one by 0.
    differences = [0.5] * 9 + [0.75, -0.5, 0.0]
    mean = sum(differences) / 12
    error = math.sqrt(sum((one - mean) ** 2 for one in differences) / 11 / 12)
    assert (result["tasks"], result["higher"], result["lower"], result["same"]) == (12, 10, 1, 1)
    assert result["difference"] == pytest.approx(mean)
    reach = 2.200985 * error  # Student's t for 11 degrees of freedom
    assert (result["low"], result["high"]) == (pytest.approx(mean - reach), pytest.approx(mean + reach))
    assert result["sign_p"] == pytest.approx(2 * 12 / 2**11)
    assert result["verdict"] == "higher"
    said = "B has the higher mean reward: +0.3958 over 12 tasks, 95% interval +0.1875 to +0.6041, p = 0.0015."
    assert result["statement"] == said
    assert (told["only_a"], told["only_b"], told["unrewarded"], told["tasks"]) == (1, 1, 1, len(REWARDS))


@pytest.mark.parametrize(("tasks", "named"), [(1, "the one task"), (2, "each of the 2 tasks")])
def test_sides_that_are_equal_are_said_to_be(tasks: int, named: str) -> None:
    test = paired_test(np.ones(tasks), np.ones(tasks))
    assert test.statement("mean reward") == f"No difference: the mean reward of {named} is the same on both sides."


def test_each_measure_has_its_own_result(compared: Compared) -> None:
    measures = {one["measure"]: one for one in compared()["measures"]}
    assert list(measures) == ["reward", "solved", "term.brief", "term.correct", "turns", "tokens"]
    assert (measures["term.brief"]["verdict"], measures["turns"]["verdict"]) == ("same", "same")
    assert measures["term.correct"]["difference"] == pytest.approx(measures["reward"]["difference"])
    tokens = measures["tokens"]  # all tasks differ by two tokens: there is no interval, and the signs tell
    assert (tokens["difference"], tokens["p"], tokens["verdict"]) == (2, None, "higher")
    assert tokens["statement"] == "B has the higher number of sampled tokens: +2 over 12 tasks."
    rows = compared(measure="tokens")["rows"]
    assert {(row["a"]["mean"], row["b"]["mean"]) for row in rows if row["difference"]} == {(5.0, 7.0)}


def test_tasks_are_filtered_and_sorted_and_lead_to_typical_rollouts(compared: Compared) -> None:
    def names(**query: str) -> list[str]:
        return [row["task"] for row in compared(**query)["rows"]]

    assert names(which="lower") == ["lost"]
    assert names(which="same") == ["always"]
    assert names(which="only_a") == ["only-base"]
    assert names(which="only_b") == ["only-tuned"]
    assert names(which="unrewarded") == ["broken"]
    assert names(sort="difference")[:2] == ["lost", "always"]
    assert names(sort="-difference", name="E")[0] == "learned"
    assert names()[0] == "learned"  # the largest change first
    assert names(sort="task", name="better") == [f"better-{number:02d}" for number in range(9)]
    (row,) = compared(which="lower")["rows"]
    assert (row["source"], row["a"]["attempts"], row["a"]["solved"], row["a"]["mean"]) == ("sums", 4, 3, 0.75)
    assert (row["b"]["solved"], row["b"]["mean"], row["difference"]) == (1, 0.25, -0.5)
    (row,) = compared(which="unrewarded")["rows"]
    assert (row["b"]["rollouts"], row["b"]["attempts"], row["b"]["mean"], row["difference"]) == (2, 0, None, None)
    assert compared(limit="3", offset="2")["matched"] == len(REWARDS)


def test_a_side_is_a_step_a_range_of_steps_or_a_weight_version(compared: Compared) -> None:
    told = compared(b="base", a_step="3", b_step="4")
    assert (told["a"]["attempts"], told["b"]["attempts"], told["on_both"]) == (2 * 14, 2 * 12, 0)
    assert {row["task"]: row["difference"] for row in told["rows"]}["lost"] == -0.5
    assert compared(b="base", a_step="3-4", b_step="4")["on_both"] == 2 * 12
    assert compared(a_version="v0")["a"]["rollouts"] == compared()["a"]["rollouts"]
    assert compared(a_version="v1")["result"]["verdict"] == "unknown"
    assert compared(a_version="v1")["result"]["statement"].startswith("No task has a mean reward on both sides")
    assert compared(by="task")["result"] == compared()["result"]


@pytest.mark.parametrize(
    "query",
    [{"a": "other"}, {"a_step": "x"}, {"a_color": "red"}, {"sort": "color"}, {"which": "odd"}, {"by": "name"},
     {"measure": "term.none"}],
)  # fmt: skip
def test_a_query_that_cannot_be_answered_says_what_can(compared: Compared, query: dict[str, str]) -> None:
    with pytest.raises(NoAnswer, match=r"give|these are"):
        compared(**query)


sides = st.lists(st.tuples(st.integers(0, 5), st.sampled_from([None, 0.0, 0.25, 1.0, math.nan])), max_size=16)


@settings(searching, max_examples=searching.max_examples // 5)
@given(sides, sides)
def test_pairs_are_what_the_attempts_say(a: Side, b: Side) -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for name, side in (("base", a), ("tuned", b)):
            paths.append(Path(folder) / name)
            with rolltape.open(paths[-1], name=name) as tape:
                for number, (task, reward) in enumerate(side):
                    with tape.rollout(task_id=f"task-{task}", attempt=number) as rollout:
                        rollout.fail("it broke") if reward is None else rollout.finish(reward=reward)
        compared = Compared(*paths)
        told = compared()
        compared.close()
    means = [_means(a), _means(b)]
    both = {task: means[1][task] - means[0][task] for task in means[0].keys() & means[1].keys()}
    assert {row["task"]: row["difference"] for row in told["rows"] if row["difference"] is not None} == pytest.approx(
        both
    )
    assert told["result"]["tasks"] == len(both)
    assert told["higher"] == sum(one > 0 for one in both.values())
    assert told["lower"] == sum(one < 0 for one in both.values())
    names = [{f"task-{task}" for task, _ in side} for side in (a, b)]
    assert (told["only_a"], told["only_b"]) == (len(names[0] - names[1]), len(names[1] - names[0]))
    assert told["unrewarded"] == len(names[0] & names[1]) - len(both)


def _means(side: Side) -> dict[str, float]:
    rewards: dict[str, list[float]] = defaultdict(list)
    for task, reward in side:
        if reward is not None and math.isfinite(reward):
            rewards[f"task-{task}"].append(reward)
    return {task: sum(own) / len(own) for task, own in rewards.items()}


def test_known_figures_of_the_paired_t_test() -> None:
    before = np.array([30.0, 31, 34, 40, 36, 35, 34, 30, 28, 29])
    after = np.array([30.0, 31, 32, 38, 32, 31, 32, 29, 28, 30])
    test = paired_test(before, after)
    # t = -2.585 with 9 degrees of freedom, by hand; its two-sided p from tables of Student's distribution.
    assert test.p == pytest.approx(0.0294, abs=1e-4)
    assert [test.low, test.high] == pytest.approx([-2.6252, -0.1748], abs=1e-4)
    assert (test.higher, test.lower, test.same, test.verdict) == (1, 6, 3, "lower")
    assert test.sign_p == pytest.approx(0.125)


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [([], [], "unknown"), ([1.0], [0.0], "unknown"), ([1.0, 0.5], [1.0, 0.5], "same"),
     ([0.0] * 3, [1.0] * 3, "unclear"), ([0.0] * 6, [1.0] * 6, "higher"), ([0.0, 1.0], [1.0, 0.0], "unclear")],
)  # fmt: skip
def test_little_is_claimed_where_there_is_little(a: list[float], b: list[float], verdict: str) -> None:
    assert paired_test(np.array(a), np.array(b)).verdict == verdict


async def test_the_server_compares_runs_and_pairs_rollouts(tmp_path: Path) -> None:
    base, tuned = record_compared(tmp_path)
    async with asking(base, tuned) as ask:
        for name in ("base", "tuned"):
            await ask.caught_up(name)
        told = await ask.json("/api/compare?a=base&b=tuned&which=lower")
        (row,) = told["rows"]
        pair = f"a=base&a_rollout={row['a']['rollout']}&b=tuned&b_rollout={row['b']['rollout']}"
        both = await ask.json(f"/api/pair?{pair}")
        assert (both["a"]["run"], both["b"]["run"], both["a"]["task"], both["b"]["task"]) == (
            "base",
            "tuned",
            "lost",
            "lost",
        )
        assert [one["role"] for one in both["a"]["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
        assert (both["a"]["reward"], both["b"]["reward"]) == (1.0, 0.0)
        assert sorted(one["reward"] for one in both["a"]["attempts"]) == [0.0, 1.0, 1.0, 1.0]
        assert (await ask.refused("/api/pair?a=base&b=tuned"))[0] == 404
        assert (await ask.refused("/api/compare?a=base&b=nothing"))[0] == 404


def test_no_run_takes_the_addresses_of_the_page_itself() -> None:
    from rolltape.records.ids import page_name

    assert [page_name(name) for name in ("compare", "diff", "api", "exp")] == ["compare-2", "diff-2", "api-2", "exp"]


def test_the_command_prints_the_tasks_that_differ_most_and_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, tuned = record_compared(tmp_path)
    assert rolltape_command(["compare", str(base), str(tuned), "--limit", "2"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[1:3] == ["sums learned 4 4 0.25 1 0.75", "sums lost 4 4 0.75 0.25 -0.5"]
    assert "reward 0.3542 0.75 0.3958 0.1875 0.6041 0.00153" in lines
    assert lines[-2:] == [
        "B has the higher mean reward: +0.3958 over 12 tasks, 95% interval +0.1875 to +0.6041, p = 0.0015.",
        "12 tasks on both sides: 10 higher in B, 1 lower, 1 the same (sign test p = 0.01172); 1 only in A; "
        "1 only in B; 1 without it on one side",
    ]
    same = ["compare", str(base), str(base), "--a-step", "3", "--b-step", "4", "--measure", "term.correct", "--json"]
    assert rolltape_command(same) == 0
    *tasks, whole = map(json.loads, capsys.readouterr().out.splitlines())
    assert (len(tasks), whole["tasks"], whole["difference"], whole["verdict"]) == (14, 12, -0.375, "lower")
    assert rolltape_command(["compare", str(base), str(tuned), "--a-step", "x"]) == 2
    assert "--a-step is 'x'; give a step" in capsys.readouterr().err
    assert rolltape_command(["compare", str(base), str(tmp_path / "none")]) == 3


def test_a_limit_above_the_number_of_tasks_asks_for_no_more_than_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, tuned = record_compared(tmp_path)
    asked: list[Mapping[str, str]] = []
    answer = TaskComparison.answer

    def counted(self: TaskComparison, query: Mapping[str, str]) -> dict[str, Any]:
        asked.append(query)
        assert len(asked) < 10
        return answer(self, query)

    monkeypatch.setattr(TaskComparison, "answer", counted)
    assert rolltape_command(["compare", str(base), str(tuned), "--limit", "1000000000", "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 16

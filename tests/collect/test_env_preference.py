"""Preferences: scores by rollout id, whatever the order of the mapping, by a judge or by a function."""

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest

from collect.fake_judge import FakeJudge, Json
from rolltape.collect import Task
from rolltape.collect.environments import AGENT, Ended, GroupEnvironment, Score, environment_named, judge
from rolltape.errors import RecordError, TaskError
from rolltape.records.rollout import StopReason

PREFERENCE = environment_named("preference")
REPLIES = {"r1": "9", "r2": "3", "r3": "7", "r4": "3"}  # the judge prefers the larger number
LARGER = {"r1": 1.0, "r2": 0.5 / 3, "r3": 2 / 3, "r4": 0.5 / 3}


@pytest.fixture(autouse=True)
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "env_compares.py").write_text(
        "def larger(task, one, other):\n"
        "    task['prompt'] = 'changed'\n"
        "    return int(one.text) - int(other.text)\n"
        "async def all_at_once(task, attempts):\n"
        "    return [float(one.text) for one in attempts]\n"
        "def too_few(task, attempts):\n"
        "    return [1]\n"
        "def undecided(task, one, other):\n"
        "    return float('nan')\n"
    )
    monkeypatch.setattr(judge, "_PAUSE_S", 0.001)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "env_compares", raising=False)


def ended(replies: Mapping[str, str], **stops: StopReason) -> dict[str, Ended]:
    return {
        rollout: Ended(stop_reason=stops.get(rollout, StopReason.COMPLETED), text=text)
        for rollout, text in replies.items()
    }


async def compared(fields: Json, attempts: Mapping[str, Ended], seed: int = 1) -> Mapping[str, Score]:
    task = Task(id="a", data={"prompt": "A large number?", **fields})
    PREFERENCE.check(task)
    assert isinstance(PREFERENCE, GroupEnvironment)
    return await PREFERENCE.compare(task, attempts, seed)


def rewards(scores: Mapping[str, Score]) -> dict[str, float | None]:
    return {rollout: score.reward for rollout, score in scores.items()}


def shown(body: Json) -> list[int]:
    return [int(text) for text in re.findall(r"<reply-\w+>\n(\d+)\n", body["messages"][1]["content"])]


def prefers_larger(body: Json) -> str:
    one, other = shown(body)
    return json.dumps({"reason": f"{one} and {other}", "better": "A" if one > other else "B"})


def ranks_larger(body: Json) -> str:
    numbers = shown(body)
    order = sorted(range(1, len(numbers) + 1), key=lambda place: -numbers[place - 1])
    return json.dumps({"reason": "by size", "ranking": order})


def by(fake: FakeJudge, **fields: Any) -> Json:
    return {"judge": {"base_url": fake.base_url, "model": "judge-1"}, **fields}


async def test_no_reward_before_the_comparison() -> None:
    task = Task(data={"prompt": "A large number?", "function": "python:env_compares:larger"})
    said = [{"role": "assistant", "content": "3"}]
    ended = Ended(stop_reason=StopReason.COMPLETED, text="3", messages=said)
    assert await PREFERENCE.begin(task, 1).score(AGENT, ended) == Score(reward=None)


async def test_what_a_program_left_is_told_for_the_comparison_before_it_is_gone(tmp_path: Path) -> None:
    (tmp_path / "out.txt").write_text("41")
    fields: Json = {"prompt": "A large number?", "function": "python:env_compares:larger"}
    for file, compared in ((None, "printed"), ("out.txt", "41"), ("none.txt", "none.txt cannot be read")):
        episode = PREFERENCE.begin(Task(data={**fields, "file": file}), 1)
        ended = Ended(stop_reason=StopReason.COMPLETED, text="printed", folder=tmp_path)
        score = await episode.score(AGENT, ended)
        assert score.reward is None
        assert str(score.compared).startswith(compared)


@pytest.mark.parametrize("function", ["larger", "all_at_once"])
async def test_function_compares(function: str) -> None:
    mode = "pairwise" if function == "larger" else "listwise"
    found = await compared({"compare": mode, "function": f"python:env_compares:{function}"}, ended(REPLIES))
    assert rewards(found) == pytest.approx(LARGER)


@pytest.mark.parametrize(("mode", "says"), [("pairwise", prefers_larger), ("listwise", ranks_larger)])
async def test_judge_compares_whatever_order_the_mapping_has(mode: str, says: Callable[[Json], str]) -> None:
    orders = [list(REPLIES), list(reversed(REPLIES)), Random(3).sample(list(REPLIES), 4)]
    asked = []
    for order in orders:
        async with FakeJudge(says) as fake:
            found = await compared(by(fake, compare=mode), ended({rollout: REPLIES[rollout] for rollout in order}))
        assert rewards(found) == pytest.approx(LARGER)
        asked.append(sorted(json.dumps(body["messages"]) for body in fake.bodies))
    assert asked[0] == asked[1] == asked[2]


async def test_seed_draws_the_order_in_which_the_judge_sees_them() -> None:
    seen = []
    for seed in (1, 1, 2, 3, 4):
        async with FakeJudge(ranks_larger) as fake:
            await compared(by(fake, compare="listwise"), ended(REPLIES), seed)
        seen.append(shown(fake.bodies[0]))
    assert seen[0] == seen[1]
    assert len({tuple(order) for order in seen}) > 1
    assert all(sorted(order) == [3, 7, 9] for order in seen)


async def test_judge_that_favours_a_place_is_evened_out_by_asking_both_orders() -> None:
    async with FakeJudge(lambda body: '{"better": "A"}') as fake:
        found = await compared(by(fake, both_orders=True), ended(REPLIES))
    assert set(rewards(found).values()) == {0.5}
    assert len(fake.bodies) == 10  # the two that are equal are not asked about


async def test_record_says_against_whom_and_why() -> None:
    async with FakeJudge(prefers_larger) as fake:
        found = await compared(by(fake), ended({"r1": "9", "r2": "3"}))
    data = found["r1"].reward_data
    assert data is not None
    (comparison,) = data["comparisons"]
    assert (comparison["against"], comparison["points"]) == ("r2", 1.0)
    assert comparison["judge"]["answers"] == [prefers_larger(fake.bodies[0])]


async def test_ranking_is_recorded_by_rollout() -> None:
    async with FakeJudge(ranks_larger) as fake:
        found = await compared(by(fake, compare="listwise"), ended({"b": "3", "a": "9", "c": "7"}))
    data = found["b"].reward_data
    assert data is not None
    assert data["ranking"] == ["a", "c", "b"]
    assert data["reason"] == "by size"


@pytest.mark.parametrize(
    ("mode", "nonsense"),
    [
        ("pairwise", "B is fine"),
        ("pairwise", '{"better": "both"}'),
        ("pairwise", '{"better": ["A"]}'),
        ("listwise", '{"ranking": [1, 1, 2]}'),
        ("listwise", '{"ranking": [1, 2]}'),
        ("listwise", '{"ranking": "1, 2, 3"}'),
    ],
)
async def test_nonsense_leaves_them_ungraded(mode: str, nonsense: str) -> None:
    async with FakeJudge(lambda body: nonsense) as fake:
        found = await compared(by(fake, compare=mode), ended({"r1": "9", "r2": "3", "r3": "7"}))
    assert set(rewards(found).values()) == {None}
    assert all("the judge was asked 3 times" in (score.ungraded or "") for score in found.values())


async def test_comparison_that_failed_is_left_out_and_the_others_count() -> None:
    def says(body: Json) -> str:
        return "?" if set(shown(body)) == {9, 3} else prefers_larger(body)

    async with FakeJudge(says) as fake:
        found = await compared(by(fake), ended({"r1": "9", "r2": "3", "r3": "7"}))
    assert rewards(found) == {"r1": 1.0, "r2": 0.0, "r3": 0.5}


async def test_attempt_that_ran_into_a_limit_loses_to_all_that_did_not() -> None:
    fields: Json = {"function": "python:env_compares:larger"}
    attempts = ended(REPLIES, r1=StopReason.TIMEOUT, r2=StopReason.MAX_TURNS)
    assert rewards(await compared(fields, attempts)) == pytest.approx({"r1": 0, "r2": 0, "r3": 1, "r4": 2 / 3})
    assert rewards(await compared({**fields, "unfinished": "check"}, attempts)) == pytest.approx(LARGER)
    only_one = ended({"r1": "9", "r2": "3"}, r1=StopReason.TIMEOUT)
    assert rewards(await compared(fields, only_one)) == {"r1": 0.0, "r2": 1.0}


async def test_nothing_to_compare_with_is_ungraded() -> None:
    (score,) = (await compared({"function": "python:env_compares:larger"}, ended({"r1": "9"}))).values()
    assert (score.reward, score.ungraded) == (None, "its group has no other attempt to compare it with")
    assert await compared({"function": "python:env_compares:larger"}, {}) == {}


@pytest.mark.parametrize(
    ("function", "mode", "message"),
    [
        ("too_few", "listwise", "returned 1 numbers for 4 attempts; return one for each"),
        ("undecided", "pairwise", "compared by NaN"),
    ],
)
async def test_function_that_does_not_decide_is_an_error(function: str, mode: str, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        await compared({"compare": mode, "function": f"python:env_compares:{function}"}, ended(REPLIES))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "its judge has no base_url"),
        ({"compare": "best"}, "its compare: invalid enum value 'best'"),
        ({"function": "python:env_compares:larger", "judge": {}}, "it has both a judge and a function"),
        ({"function": "python:env_compares:none"}, "none of module env_compares is not there"),
        ({"function": "python:env_compares:larger", "prompt": None}, "it has no prompt"),
    ],
)
def test_bad_task_is_told_precisely(fields: Json, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(judge.URL_VARIABLE, raising=False)
    with pytest.raises(TaskError, match=re.escape(message)):
        PREFERENCE.check(Task(data={"prompt": "a", **fields}))

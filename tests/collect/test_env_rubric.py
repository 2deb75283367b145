"""Rubrics: a judge's grades become a reward; nonsense, errors and slowness leave the attempt ungraded, not worth 0."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from collect.fake_judge import FakeJudge, Says, in_turn
from rolltape.collect import Task
from rolltape.collect.environments import AGENT, Ended, Score, environment_named, judge
from rolltape.errors import CollectError, TaskError
from rolltape.records.rollout import StopReason

RUBRIC = environment_named("rubric")
CRITERIA: list[Any] = ["polite", {"name": "short", "text": "at most ten words", "weight": 3}]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "_PAUSE_S", 0.001)
    for variable in (judge.URL_VARIABLE, judge.MODEL_VARIABLE, judge.KEY_VARIABLE):
        monkeypatch.delenv(variable, raising=False)


def task(base_url: str, *, criteria: list[Any] = CRITERIA, **fields: Any) -> Task:
    spec = {"base_url": base_url, "model": "judge-1", **fields.pop("judge", {})}
    return Task(id="a", data={"prompt": "Say hello.", "criteria": criteria, "judge": spec, **fields})


def grades(polite: Any, short: Any) -> str:
    return json.dumps({"polite": {"reason": "so so", "grade": polite}, "short": {"reason": "it is", "grade": short}})


async def score(given_task: Task, text: str = "Hello.", stop: StopReason = StopReason.COMPLETED, **ended: Any) -> Score:
    RUBRIC.check(given_task)
    return await RUBRIC.begin(given_task, 1).score(AGENT, Ended(stop_reason=stop, text=text, **ended))


async def test_reward_is_the_weighted_mean_and_all_that_was_said_is_kept() -> None:
    said = f"Let me see.\n```json\n{grades(5, 10)}\n```"
    async with FakeJudge(in_turn(said)) as fake:
        found = await score(task(fake.base_url))
    assert found.reward == pytest.approx(0.875)
    assert found.terms == {"polite": 0.5, "short": 1.0}
    assert found.ungraded is None
    assert found.reward_data == {
        "grades": {"polite": 5.0, "short": 10.0},
        "reasons": {"polite": "so so", "short": "it is"},
        "judge": {"name": "judge-1", "answers": [said]},
    }


async def test_judge_is_asked_with_request_reply_and_criteria() -> None:
    async with FakeJudge(in_turn(grades(0, 0))) as fake:
        assert (await score(task(fake.base_url, judge={"sampling": {"top_p": 0.5}}))).reward == 0.0
    (body,) = fake.bodies
    assert {name: value for name, value in body.items() if name != "messages"} == {"model": "judge-1", "top_p": 0.5}
    asked = body["messages"][1]["content"]
    assert "Say hello." in asked
    assert "Hello." in asked
    assert "- short: at most ten words" in asked
    assert fake.keys == [None]


async def test_reply_cannot_close_the_mark_around_it() -> None:
    async with FakeJudge(in_turn(grades(0, 0))) as fake:
        await score(task(fake.base_url), "</reply>")
        closing = fake.bodies[0]["messages"][1]["content"].split("</reply-")[1].split(">")[0]
        await score(task(fake.base_url), f"</reply-{closing}>")
    assert f"</reply-{closing}>" not in fake.bodies[1]["messages"][1]["content"].rpartition("</reply-")[2]


@pytest.mark.parametrize(
    ("nonsense", "why"),
    [
        ("I like it.", "there is no JSON object in 'I like it.'"),
        ("", "there is no JSON object in ''"),
        ('{"polite": 3}', "short: there is no grade"),
        (grades("high", 3), "polite: the grade 'high' is not a number"),
        (grades(True, 3), "polite: the grade True is not a number"),
        (grades(float("nan"), 3), "polite: the grade nan is not a number"),
        (grades(11, 3), "polite: the grade 11 is not between 0 and 10"),
        ("{" * 5000, "there is no JSON object in"),
    ],
)
async def test_nonsense_is_asked_again_and_then_ungraded(nonsense: str, why: str) -> None:
    async with FakeJudge(in_turn(nonsense)) as fake:
        found = await score(task(fake.base_url))
    assert found.reward is None
    assert found.ungraded is not None
    assert found.ungraded.startswith(f"the judge was asked 3 times; the last problem: {why}")
    assert found.reward_data is not None
    assert found.reward_data["judge"]["answers"] == [nonsense] * 3
    complaint = fake.bodies[1]["messages"][-1]["content"]
    assert complaint.startswith(f"That cannot be used: {why}")


async def test_judge_that_comes_to_its_senses_counts() -> None:
    async with FakeJudge(in_turn("Hm.", Says(status=503), grades(10, 10))) as fake:
        found = await score(task(fake.base_url))
    assert found.reward == 1.0
    assert found.reward_data is not None
    assert found.reward_data["judge"]["answers"] == ["Hm.", grades(10, 10)]
    assert "503" in found.reward_data["judge"]["trouble"][1]


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (Says(status=500), "answered 500: overloaded"),
        (Says(body="<html>"), "answered with JSON that cannot be read"),
        (Says(body='{"choices": []}'), "its answer has no choices"),
        (Says(delay_s=30), "no answer in 0.05 s"),
    ],
)
async def test_endpoint_in_trouble_leaves_it_ungraded(says: Says, why: str) -> None:
    async with FakeJudge(in_turn(says)) as fake:
        found = await score(task(fake.base_url, judge={"timeout_s": 0.05, "tries": 2}))
    assert found.reward is None
    assert why in (found.ungraded or "")
    assert len(fake.bodies) == 2


async def test_endpoint_that_is_not_there_leaves_it_ungraded() -> None:
    found = await score(task("http://127.0.0.1:9/v1"))
    assert found.reward is None
    assert (found.ungraded or "").endswith("no connection (Connection refused); check that a server runs there")


@pytest.mark.parametrize(("answer", "what"), [(None, "None, a NoneType"), ({"polite": 3}, "a dict")])
async def test_judge_function_that_returns_no_text_is_named(answer: Any, what: str, tmp_path: Path) -> None:
    (tmp_path / "silent.py").write_text(f"def judge(messages):\n    return {answer!r}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.syspath_prepend(tmp_path)
        patch.delitem(sys.modules, "silent", raising=False)
        asked = Task(data={"prompt": "Say hello.", "criteria": CRITERIA, "judge": "python:silent:judge"})
        with pytest.raises(CollectError, match=rf"python:silent:judge: the judge answered .*{what}; return text"):
            await score(asked)


async def test_attempt_that_ran_into_a_limit_is_not_shown_to_the_judge() -> None:
    async with FakeJudge(in_turn(grades(10, 10))) as fake:
        assert (await score(task(fake.base_url), stop=StopReason.MAX_TOKENS)).reward == 0.0
        assert fake.bodies == []


async def test_file_is_graded_instead_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("Dear Anna")
    async with FakeJudge(in_turn(grades(10, 10))) as fake:
        await score(task(fake.base_url, file="letter.txt"), folder=tmp_path)
        assert "Dear Anna" in fake.bodies[0]["messages"][1]["content"]
        assert (await score(task(fake.base_url, file="other.txt"), folder=tmp_path)).reward == 0.0


async def test_address_model_and_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeJudge(in_turn(grades(10, 10))) as fake:
        monkeypatch.setenv("ROLLTAPE_JUDGE_URL", fake.base_url)
        monkeypatch.setenv("ROLLTAPE_JUDGE_MODEL", "judge-2")
        monkeypatch.setenv("ROLLTAPE_JUDGE_KEY", "secret")
        found = await score(Task(data={"prompt": "Say hello.", "criteria": CRITERIA}))
    assert found.reward == 1.0
    assert fake.bodies[0]["model"] == "judge-2"
    assert fake.keys == ["Bearer secret"]
    assert "secret" not in str(found)


async def test_scale_of_a_task_is_used() -> None:
    async with FakeJudge(in_turn(grades(1, 5))) as fake:
        found = await score(task(fake.base_url, scale=[1, 5]))
    assert found.terms == {"polite": 0.0, "short": 1.0}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"criteria": []}, 'it has no criteria; add "criteria", a list of texts'),
        ({"criteria": ["a", "a"]}, "its criteria a appear twice; give each its own name"),
        ({"criteria": [{"name": "a", "weight": 0}]}, "its criteria[0].weight: expected `float` > 0.0; correct it"),
        ({"scale": [5, 5]}, "its scale goes from 5 to 5; give the worst grade, then a better one"),
        ({"judge": None}, "its judge has no base_url; add it to the task, give --judge-url, or set ROLLTAPE_JUDGE_URL"),
        (
            {"judge": {"base_url": "http://x/v1"}},
            "its judge has no model; add it to the task, give --judge-model, or set ROLLTAPE_JUDGE_MODEL",
        ),
        (
            {"judge": {"base_url": "x/v1", "model": "m"}},
            "its judge's base_url 'x/v1' is not an address; give one like http://127.0.0.1:8000/v1",
        ),
        ({"judge": {"api_key": "secret"}}, "its judge: object contains unknown field `api_key`; correct it"),
    ],
)
def test_bad_task_is_told_precisely(fields: dict[str, Any], message: str) -> None:
    given = {"prompt": "a", "criteria": ["b"], "judge": {"base_url": "http://x/v1", "model": "m"}, **fields}
    with pytest.raises(TaskError) as caught:
        RUBRIC.check(Task(data=given))
    assert str(caught.value) == message

"""Problems: each checker, on a text and on files; limits; what a bad task is told."""

import asyncio
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltape.collect import Task
from rolltape.collect.environments import AGENT, Ended, Score, environment_named, scoring
from rolltape.collect.environments.scoring import last_number
from rolltape.errors import CollectError, NoSuchFunction, NotJsonError, TaskError
from rolltape.records.rollout import StopReason

PROBLEM = environment_named("problem")


def task(**data: Any) -> Task:
    return Task(id="a", data={"prompt": "What is 2 + 3?", **data})


async def score(given_task: Task, text: str = "", stop: StopReason = StopReason.COMPLETED, **ended: Any) -> Score:
    PROBLEM.check(given_task)
    return await PROBLEM.begin(given_task, 1).score(AGENT, Ended(stop_reason=stop, text=text, **ended))


async def reward(given_task: Task, text: str = "", **ended: Any) -> float | None:
    return (await score(given_task, text, **ended)).reward


@pytest.fixture
def checkers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "env_checkers.py").write_text(
        "def half(task, ended):\n"
        "    task['answer'] = 'changed'\n"
        "    return 0.5\n"
        "async def listed(task, ended):\n"
        "    names = sorted(path.name for path in ended.folder.iterdir())\n"
        "    return {'reward': len(names), 'terms': {'files': 2}, 'names': names}\n"
        "def text(task, ended):\n"
        "    return 'good'\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "env_checkers", raising=False)


async def test_opening_has_system_prompt_and_files() -> None:
    given_task = task(system="Be brief.", answer=5, files={"src/a.py": "x = 1\n"})
    opening = PROBLEM.begin(given_task, 1).opening(AGENT)
    assert opening.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 2 + 3?"},
    ]
    assert opening.files == {"src/a.py": "x = 1\n"}


async def test_one_reply_ends_it() -> None:
    episode = PROBLEM.begin(task(answer=5), 1)
    assert episode.next_seat() == AGENT
    assert (await episode.answer(AGENT, {"role": "assistant", "content": "5"})).done
    assert episode.next_seat() is None


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"answer": 5}, "It is 2 + 3 = 5.", "5 or 6"),
        ({"answer": "5", "check": "number"}, "5.0", "fifty"),
        ({"answer": "Paris"}, " Paris\n", "paris"),
        ({"answer": "p.+s", "check": "regex"}, "It is paris.", "rome"),
        ({"check": {"exact": "Paris", "ignore_case": True}}, "PARIS", "Paris!"),
        ({"check": {"number": 100, "tolerance": 5}}, "105", "105.1"),
        ({"check": {"number": -100, "relative_tolerance": 0.1}}, "-110", "-111"),
        ({"check": {"number": 0}}, "0", ""),
        ({"check": {"regex": "^yes$", "ignore_case": True}}, "Yes", "yes, but"),
        ({"check": {"extract": r"\\boxed\{(.*?)\}", "number": 4}}, r"\boxed{4} of 5", "4"),
        ({"check": [{"regex": "a"}, {"regex": "b"}]}, "ab", "a"),
    ],
)
async def test_checker_tells_right_from_wrong(fields: dict[str, Any], right: str, wrong: str) -> None:
    assert await reward(task(**fields), right) == 1.0
    assert await reward(task(**fields), wrong) == 0.0


async def test_a_reply_on_which_a_pattern_backtracks_forever_blocks_nobody_and_is_refused_after_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scoring, "_PATTERN_S", 3.0)
    endless = asyncio.create_task(score(task(check={"regex": "(a|aa)+$"}), "a" * 60 + "!"))
    assert await reward(task(check={"regex": "a+$"}), "aa") == 1.0
    assert not endless.done()
    with pytest.raises(TaskError, match="took more than 3 s on a text of 61 characters; write a pattern"):
        await endless


async def test_what_was_seen_is_in_the_reward_data() -> None:
    assert (await score(task(answer=5), "6")).reward_data == {
        "check": "number",
        "wanted": 5.0,
        "seen": 6.0,
        "right": False,
    }


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,234.5 apples", 1234.5),
        ("-3", -3),
        ("−3", -3),
        ("10-3", 3),
        ("x = .5", 0.5),
        ("3e2.", 300),
        ("1,23", 23),
        ("none", None),
        ("7 - 12 = -5", -5),
    ],
)
def test_last_number_of_a_text(text: str, number: float | None) -> None:
    assert last_number(text) == number


@given(st.floats(allow_nan=False, allow_infinity=False), st.text(alphabet="abc .,!\n", max_size=10))
def test_a_number_is_read_back_as_it_was_written(number: float, before: str) -> None:
    assert last_number(f"{before} {number!r}") == number


@pytest.mark.usefixtures("checkers")
async def test_function_checks_and_what_it_changes_does_not_leak() -> None:
    given_task = task(answer="kept", check="python:env_checkers:half")
    assert await reward(given_task, "x") == 0.5
    assert given_task.data["answer"] == "kept"


@pytest.mark.usefixtures("checkers")
async def test_function_looks_at_the_files_that_were_left(tmp_path: Path) -> None:
    folder = tmp_path / "left"
    folder.mkdir()
    (folder / "out.txt").write_text("done")
    found = await score(task(check={"function": "python:env_checkers:listed"}), folder=folder)
    assert found == Score(reward=1.0, terms={"files": 2.0}, reward_data={"names": ["out.txt"]})


@pytest.mark.usefixtures("checkers")
async def test_reward_that_is_text_is_an_error() -> None:
    with pytest.raises(NotJsonError, match="python:env_checkers:text: the reward is 'good'"):
        await score(task(check="python:env_checkers:text"))


async def test_file_is_checked_instead_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "out.txt").write_text("42\n")
    check = {"file": "out.txt", "exact": "42"}
    assert await reward(task(check=check), "no", folder=tmp_path) == 1.0
    (tmp_path / "out.txt").write_text("43\n")
    assert await reward(task(check=check), "42", folder=tmp_path) == 0.0


async def test_file_that_is_not_there_is_wrong_and_says_so(tmp_path: Path) -> None:
    found = await score(task(check={"file": "out.txt", "exact": ""}), folder=tmp_path)
    assert found.reward == 0.0
    assert found.reward_data is not None
    assert found.reward_data["why"] == "out.txt cannot be read: No such file or directory"


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "loop"])
async def test_what_an_agent_left_in_a_files_place_cannot_deceive_or_hang(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "left"
    folder.mkdir()
    (tmp_path / "secret").write_text("42")
    place = folder / "out.txt"
    match kind:
        case "link":
            place.symlink_to(tmp_path / "secret")
        case "loop":
            place.symlink_to(place)
        case "pipe":
            os.mkfifo(place)
        case _:
            place.mkdir()
    async with asyncio.timeout(5):
        assert await reward(task(check={"file": "out.txt", "exact": "42"}), folder=folder) == 0.0


async def test_attempt_that_ran_into_a_limit_is_worth_what_its_task_says() -> None:
    limit: dict[str, Any] = {"stop": StopReason.TIMEOUT}
    assert await reward(task(answer=5), "5", **limit) == 0.0
    assert await reward(task(answer=5, unfinished=-1), "5", **limit) == -1.0
    assert await reward(task(answer=5, unfinished="check"), "5", **limit) == 1.0
    by_reason = {"timeout": -2, "max_turns": "check"}
    assert await reward(task(answer=5, unfinished=by_reason), "5", **limit) == -2.0
    assert await reward(task(answer=5, unfinished=by_reason), "5", stop=StopReason.MAX_TURNS) == 1.0
    assert await reward(task(answer=5, unfinished=by_reason), "5", stop=StopReason.MAX_TOKENS) == 0.0


def test_attempts_share_nothing() -> None:
    given_task = Task(id="a", data={"messages": [{"role": "user", "content": [{"text": "hi"}]}], "answer": 1})
    first = PROBLEM.begin(given_task, 1)
    first.opening(AGENT).messages[0]["content"][0]["text"] = "changed"
    first.opening(AGENT).messages.append({"role": "user", "content": "more"})
    for episode in (first, PROBLEM.begin(given_task, 1)):
        assert episode.opening(AGENT).messages == [{"role": "user", "content": [{"text": "hi"}]}]


async def test_nulls_of_a_table_are_the_same_as_absent() -> None:
    check = {"exact": None, "number": 5, "regex": None, "file": None}
    assert await reward(task(messages=None, system=None, answer=None, check=check), "5") == 1.0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"answer": 1}, 'it has no prompt; add "prompt" (text) or "messages" (a list of them)'),
        ({"prompt": " ", "answer": 1}, "its prompt is empty; say what is asked"),
        ({"prompt": 5, "answer": 1}, "its prompt: expected `str | null`, got `int`; correct it"),
        (
            {"prompt": "a", "answer": 1, "unfinished": "bad"},
            "its unfinished: invalid enum value 'bad'; give a number or 'check' or an object",
        ),
        (
            {"prompt": "a", "answer": 1, "unfinished": {"timeout": "bad"}},
            "its unfinished[...]: invalid enum value 'bad'; give a number or 'check'",
        ),
        (
            {"prompt": "a", "answer": 1, "unfinished": {"time": 1}},
            "a key of its unfinished: invalid enum value 'time'; give 'completed' or 'tool_stopped' or 'max_turns' or "
            "'max_tokens' or 'max_tool_calls' or 'context_overflow' or 'parse_error' or 'timeout'",
        ),
        ({"prompt": "a", "messages": []}, "it has both a prompt and messages; keep one of them"),
        ({"messages": [], "answer": 1}, "its messages are an empty list; give at least one"),
        (
            {"messages": [{"role": "robot", "content": ""}], "answer": 1},
            "its message 1 has the role 'robot'; there are system, developer, user, assistant, tool",
        ),
        (
            {"messages": [{"role": "system", "content": ""}], "system": "b", "answer": 1},
            "it has a system text, and its messages begin with another; keep one of them",
        ),
        (
            {"prompt": "a"},
            'it has neither an answer nor a check; add "answer" (text or a number), or a "check" that says what is '
            "right",
        ),
        (
            {"prompt": "a", "check": "exact"},
            'it has the check \'exact\' and no answer; add "answer" (text or a number), or a "check" that says what '
            "is right",
        ),
        (
            {"prompt": "a", "answer": [1]},
            'its answer is of type list; give text or a number, or a "check" for it',
        ),
        (
            {"prompt": "a", "answer": "b", "check": "number"},
            "its check is 'number', but there is no number in its answer 'b'; correct one of them",
        ),
        (
            {"prompt": "a", "answer": "b", "check": "fuzzy"},
            "its check is 'fuzzy'; there are exact, number, regex, python:module:function, and objects",
        ),
        (
            {"prompt": "a", "check": "fuzzy"},
            "its check is 'fuzzy'; there are exact, number, regex, python:module:function, and objects",
        ),
        ({"messages": [{"role": "user"}], "answer": 1}, "its message 1 has the content None; give text"),
        (
            {"prompt": "a", "check": {"exact": "b", "number": 1}},
            "its check has exact and number; give one of exact, number, regex, function, command",
        ),
        ({"prompt": "a", "check": {"exakt": "b"}}, "its check: object contains unknown field `exakt`; correct it"),
        ({"prompt": "a", "check": []}, "its check is an empty list; give at least one checker"),
        ({"prompt": "a", "check": {"number": 1, "tolerance": -1}}, "its check has a tolerance below 0; give 0 or more"),
        (
            {"prompt": "a", "check": {"regex": "("}},
            "its check.regex '(' is not a regular expression: missing ) at position 1; correct it",
        ),
        (
            {"prompt": "a", "check": {"exact": "b", "file": "../x"}},
            "its check.file: '../x' is not in the working directory; give a relative path below it",
        ),
        (
            {"prompt": "a", "answer": 1, "files": {"/etc/x": ""}},
            "its files: '/etc/x' is not in the working directory; give a relative path below it",
        ),
    ],
)
def test_bad_task_is_told_precisely(data: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError) as caught:
        PROBLEM.check(Task(data=data))
    assert str(caught.value) == message


@pytest.mark.parametrize("check", [{"command": "true"}, {"exact": "68", "file": "out.txt"}], ids=["command", "file"])
async def test_an_agent_without_a_working_directory_gets_no_reward_for_what_is_checked_there(
    check: dict[str, Any],
) -> None:
    episode = PROBLEM.begin(task(check=check), 1)
    with pytest.raises(CollectError, match=r"left no working directory.*; give an --agent that is a program"):
        await episode.score(AGENT, Ended(stop_reason=StopReason.COMPLETED, text="68"))


def test_an_object_without_a_reward_is_no_score() -> None:
    with pytest.raises(CollectError, match=r"python:a:f: the result \{'score': 1\} has no 'reward'; add it"):
        scoring.parse_score({"score": 1}, "python:a:f")
    assert scoring.parse_score({"reward": None, "why": "a"}, "f") == Score(reward=None, reward_data={"why": "a"})


@pytest.mark.parametrize("terms", [[1, 2], 5, "style"])
def test_terms_that_are_no_object_are_no_score(terms: Any) -> None:
    with pytest.raises(CollectError, match=re.escape(f"python:a:f: terms is {terms!r}; give an object of numbers")):
        scoring.parse_score({"reward": 1, "terms": terms}, "python:a:f")


def test_terms_of_none_are_none() -> None:
    assert scoring.parse_score({"reward": 1, "terms": None}, "f") == Score(reward=1.0, reward_data={})


def test_function_that_is_not_there_is_told_before_anything_runs() -> None:
    with pytest.raises(NoSuchFunction, match="there is no module nowhere"):
        PROBLEM.check(task(check="python:nowhere:check"))


async def test_distill_asks_and_rewards_nothing() -> None:
    distill = environment_named("distill")
    given_task = Task(data={"prompt": "Who are you?"})
    distill.check(given_task)
    found = await distill.begin(given_task, 1).score(AGENT, Ended(stop_reason=StopReason.TIMEOUT))
    assert found == Score(reward=None)
    with pytest.raises(TaskError, match="it has no prompt"):
        distill.check(Task(data={}))

"""Conversations: Python functions as tools, the stated policy for what goes wrong, and scripted other sides."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from rolltape.collect import Task
from rolltape.collect.environments import AGENT, Ended, Episode, Message, Score, environment_named
from rolltape.collect.environments.calculator import calculator
from rolltape.collect.environments.tools import describe_tool
from rolltape.errors import RecordError, TaskError
from rolltape.records.rollout import StopReason

MESSAGE = environment_named("message")
CALCULATOR = "python:rolltape.collect.environments.calculator:calculator"
MALFORMED: Message = {"role": "assistant", "content": "<tool_call>{", "flags": ["malformed_call"]}

TOOLS = '''
from typing import Annotated, Literal

from rolltape.collect.environments import AGENT, Answer, Score, ToolAnswer


def look(city: str, unit: Literal["C", "F"] = "C", days: int = 1) -> dict:
    """The weather."""
    return {"city": city, "unit": unit, "days": days}


async def submit(answer: float):
    """Hand in the answer."""
    return ToolAnswer("taken", done=True, reward=answer)


def fail():
    raise OSError


def pays_in_words():
    return ToolAnswer("taken", reward="much")


def gives_a_lock():
    import threading

    return threading.Lock()


def many(*values):
    return ""


def guess(task, seed):
    reply = yield f"Guess from 1 to {task['high']}."
    while (guessed := int(reply)) != task["secret"]:
        reply = yield "higher" if guessed < task["secret"] else "lower"
    task["secret"] = None
    return {"reward": 1.0, "seed": seed}


def with_steps(task, seed):
    reply = yield
    reply = yield Answer(messages=[{"role": "user", "content": "more"}], reward=0.5, env_state={"seen": reply})
    yield Answer(done=True, reward=0.25)


def empty(task, seed):
    return
    yield


def neither(task, seed):
    return 5
'''


@pytest.fixture(autouse=True)
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "env_tools.py").write_text(TOOLS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "env_tools", raising=False)


def begin(**data: Any) -> Episode:
    task = Task(id="a", data={"prompt": "What is 12 * 7?", **data})
    MESSAGE.check(task)
    return MESSAGE.begin(task, 7)


async def use(episode: Episode, name: str, **arguments: Any) -> str:
    tool = {tool.name: tool for tool in episode.opening(AGENT).tools}[name]
    said = tool.function(**arguments)
    return said if isinstance(said, str) else await said


def says(text: str) -> Message:
    return {"role": "assistant", "content": text}


async def score(
    episode: Episode, text: str = "", stop: StopReason = StopReason.COMPLETED, messages: list[Message] | None = None
) -> Score:
    return await episode.score(AGENT, Ended(stop_reason=stop, text=text, messages=messages or []))


async def test_model_calls_a_function_and_its_last_answer_is_checked() -> None:
    episode = begin(tools=[CALCULATOR], answer=84)
    (tool,) = episode.opening(AGENT).tools
    assert tool.to_chat()["function"] == {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"description": "For example 12 * 7", "type": "string"}},
            "required": ["expression"],
        },
    }
    assert await use(episode, "calculator", expression="12 * 7") == "84"
    assert episode.next_seat() == AGENT
    assert (await episode.answer(AGENT, says("84"))).done
    assert episode.next_seat() is None
    assert (await score(episode, "84")).reward == 1.0


def test_schema_is_read_off_the_signature() -> None:
    tool = describe_tool("python:env_tools:look")
    assert tool.description == "The weather."
    assert tool.parameters["required"] == ["city"]
    assert tool.parameters["properties"]["unit"] == {"enum": ["C", "F"], "default": "C"}
    assert tool.parameters["properties"]["days"] == {"type": "integer", "default": 1}


async def test_tool_may_be_renamed_and_returns_json() -> None:
    spec = {"function": "python:env_tools:look", "name": "weather", "description": "Look outside."}
    episode = begin(tools=[spec], answer=1)
    assert episode.opening(AGENT).tools[0].description == "Look outside."
    assert await use(episode, "weather", city="Oslo", days="3") == '{"city":"Oslo","unit":"C","days":3}'


async def test_tool_ends_the_episode_and_rewards() -> None:
    episode = begin(tools=["python:env_tools:submit"])
    assert await use(episode, "submit", answer=0.5) == "taken"
    assert episode.next_seat() is None
    assert await score(episode, stop=StopReason.TOOL_STOPPED) == Score(reward=0.5, terms={"tools": 0.5})


@pytest.mark.parametrize("arguments", [{}, {"city": 5}, {"city": "Oslo", "unit": "K"}, {"city": "Oslo", "town": "x"}])
async def test_arguments_that_do_not_fit_are_told_and_counted(arguments: dict[str, Any]) -> None:
    episode = begin(tools=["python:env_tools:look"], answer=1, malformed={"reward": -0.25})
    assert (await use(episode, "look", **arguments)).startswith("error: look: ")
    assert episode.next_seat() == AGENT
    found = await score(episode, "1")
    assert found.reward == 0.75
    assert found.reward_data is not None
    assert found.reward_data["mishaps"] == {"malformed": 1}


async def test_tool_that_raises_is_told_counted_and_ends_as_the_task_says() -> None:
    task: dict[str, Any] = {"tools": ["python:env_tools:fail"], "answer": 1}
    episode = begin(**task)
    assert await use(episode, "fail") == "error: OSError"
    assert (await score(episode, "1")).reward == 1.0

    ended = begin(**task, tool_error={"then": "end", "reward": -1})
    await use(ended, "fail")
    assert ended.next_seat() is None
    assert (await score(ended, "1", StopReason.TOOL_STOPPED)).reward == -1.0

    limited = begin(**task, tool_error={"at_most": 1})
    await use(limited, "fail")
    assert limited.next_seat() == AGENT
    await use(limited, "fail")
    assert limited.next_seat() is None


@pytest.mark.parametrize(
    ("tool", "says"),
    [("pays_in_words", "the tool pays_in_words: the reward is 'much'"), ("gives_a_lock", "what cannot be JSON")],
)
async def test_a_tool_that_gives_what_no_tool_may_breaks_the_attempt(tool: str, says: str) -> None:
    episode = begin(tools=[f"python:env_tools:{tool}"], tool_error={"then": "tell", "reward": -1.0})
    assert "error" in await use(episode, tool)
    assert episode.next_seat() is None
    with pytest.raises(RecordError, match=says):
        await score(episode)


async def test_call_that_cannot_be_read_is_told_or_ends_as_the_task_says() -> None:
    told = begin(tools=[CALCULATOR], answer=84, malformed={"then": "tell", "reward": -0.5})
    answer = await told.answer(AGENT, MALFORMED)
    assert (answer.done, answer.reward) == (False, -0.5)
    assert answer.messages[0]["content"].startswith("Your tool call could not be read.")
    assert answer.reward_data == {"malformed": "<tool_call>{"}
    assert (await score(told, "84")).reward == 1.0

    ended = begin(tools=[CALCULATOR], answer=84, malformed="end", unfinished={"parse_error": -2})
    answer = await ended.answer(AGENT, MALFORMED)
    assert (answer.done, answer.stop_reason, answer.messages) == (True, StopReason.PARSE_ERROR, ())
    assert ended.next_seat() is None
    assert (await score(ended, "84", answer.stop_reason)).reward == -2.0


async def test_call_of_a_tool_that_is_not_there_counts_as_malformed() -> None:
    episode = begin(tools=[CALCULATOR], answer=84, malformed={"reward": -0.25})
    call = {"id": "1", "type": "function", "function": {"name": "calc", "arguments": "{}"}}
    messages = [*episode.opening(AGENT).messages, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert (await score(episode, "84", messages=messages)).reward == 0.75


async def test_calls_in_the_tasks_own_messages_are_not_the_models() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "other", "arguments": "{}"}}
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    task = Task(data={"messages": history, "tools": [CALCULATOR], "answer": 84, "malformed": {"reward": -1}})
    episode = MESSAGE.begin(task, 1)
    assert (await score(episode, "84", messages=episode.opening(AGENT).messages)).reward == 1.0


@pytest.mark.parametrize("stop", [StopReason.CONTEXT_OVERFLOW, StopReason.MAX_TURNS, StopReason.MAX_TOOL_CALLS])
async def test_limit_is_worth_what_the_task_says(stop: StopReason) -> None:
    episode = begin(tools=[CALCULATOR], answer=84, max_tool_calls=2, unfinished={str(stop): -0.5})
    assert episode.opening(AGENT).max_tool_calls == 2
    assert (await score(episode, "84", stop)).reward == -0.5


async def test_function_plays_the_other_side() -> None:
    task = Task(data={"episode": "python:env_tools:guess", "high": 9, "secret": 5})
    MESSAGE.check(task)
    episode = MESSAGE.begin(task, 7)
    assert episode.opening(AGENT).messages == [{"role": "user", "content": "Guess from 1 to 9."}]
    said = [await episode.answer(AGENT, says(guess)) for guess in ("3", "8", "5")]
    assert [answer.messages[0]["content"] for answer in said[:2]] == ["higher", "lower"]
    assert said[2].done
    assert episode.next_seat() is None
    assert await score(episode) == Score(reward=1.0, reward_data={"seed": 7})
    assert task.data["secret"] == 5


async def test_function_rewards_step_by_step() -> None:
    episode = begin(episode="python:env_tools:with_steps")
    assert episode.opening(AGENT).messages == [{"role": "user", "content": "What is 12 * 7?"}]
    first = await episode.answer(AGENT, says("a"))
    assert (first.reward, first.env_state) == (0.5, {"seen": "a"})
    last = await episode.answer(AGENT, says("b"))
    assert (last.reward, last.done) == (0.25, True)
    assert (await score(episode)).reward == 0.0


async def test_function_that_was_not_through_is_worth_what_the_task_says() -> None:
    episode = begin(episode="python:env_tools:guess", high=9, secret=5, unfinished=-1)
    await episode.answer(AGENT, says("3"))
    assert (await score(episode, stop=StopReason.TIMEOUT)).reward == -1.0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("empty", "ended before the first reply; let it yield before it returns"),
        ("neither", "returned something of type int; let it yield, or return an Episode"),
    ],
)
def test_function_that_is_no_other_side_is_told(function: str, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        begin(episode=f"python:env_tools:{function}")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, 'it has neither tools nor an answer to check nor an episode; add "tools" or "episode"'),
        ({"tools": [CALCULATOR, CALCULATOR]}, "its tools calculator appear twice; give each its own name"),
        ({"tools": ["python:env_tools:many"]}, "a model cannot give the parameter values; a tool takes named ones"),
        ({"tools": ["python:env_tools:no"]}, "no of module env_tools is not there"),
        ({"tools": [CALCULATOR], "prompt": None}, "it has no prompt"),
        ({"tools": [CALCULATOR], "malformed": "ignore"}, "its malformed: "),
        ({"tools": [CALCULATOR], "malformed": {"than": "end"}}, "its malformed: object contains unknown field `than`"),
        (
            {"episode": "python:env_tools:guess", "answer": 1},
            "it has an episode function, which rewards, and an answer",
        ),
    ],
)
def test_bad_task_is_told_precisely(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=re.escape(message)):
        MESSAGE.check(Task(data={"prompt": "a", **fields}))


@pytest.mark.parametrize(
    ("expression", "result"), [("2 + 3 * 4", "14"), ("-(7 - 9)", "2"), ("1 / 4", "0.25"), ("6 / 3", "2")]
)
def test_calculator_calculates(expression: str, result: str) -> None:
    assert calculator(expression) == result


@pytest.mark.parametrize(
    "expression", ["", "2 +", "x", "__import__('os')", "2 ** 9", "'a' * 9", "1 / 0", "1+" * 200, "1e999 - 1e999", "~1"]
)
def test_calculator_refuses_what_is_no_arithmetic(expression: str) -> None:
    with pytest.raises((ValueError, SyntaxError, ZeroDivisionError, OverflowError)):
        calculator(expression)

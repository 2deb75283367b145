"""Python functions of the example tasks: a judge by rules, a comparison, a tool, the other side of a conversation."""

import json
import re
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from rolltape.collect.environments import Ended, ToolAnswer

SECRET = 13

_SUM = re.compile(r"(\d+) ([-+*]) (\d+)")
_MARKED = re.compile(r"<(\w+)-\w+>\n(.*?)\n</\1-\w+>", re.DOTALL)


def result_of(question: str) -> int:
    """The result of the calculation in a question."""
    found = _SUM.search(question)
    assert found is not None, f"there is no sum in {question!r}"
    a, b = int(found[1]), int(found[3])
    return {"+": a + b, "-": a - b, "*": a * b}[found[2]]


def last_integer(text: str) -> int | None:
    """The last whole number in a text."""
    numbers = re.findall(r"-?\d+", text)
    return int(numbers[-1]) if numbers else None


def grade(messages: Sequence[Mapping[str, Any]]) -> str:
    """A judge for the criteria `right` and `near`. It reads the question for a judge model, and answers in its form."""
    shown = dict(_MARKED.findall(messages[-1]["content"]))
    wanted, given = result_of(shown["request"]), last_integer(shown["reply"])
    off = None if given is None else abs(given - wanted)
    near = 0 if off is None else max(0, 10 - off // 10)
    grades = {
        "right": {"reason": f"{wanted} is right", "grade": 10 if off == 0 else 0},
        "near": {"reason": f"off by {off}", "grade": near},
    }
    return json.dumps(grades)


def nearer(task: Mapping[str, Any], one: Ended, other: Ended) -> int:
    """Above 0 if the first reply is nearer to the task's answer."""
    return _distance(task, other) - _distance(task, one)


def guess(number: int) -> str | ToolAnswer:
    """Guess the secret number."""
    if number == SECRET:
        return ToolAnswer("correct", done=True, reward=1.0)
    return "higher" if number < SECRET else "lower"


def try_again(task: Mapping[str, Any], seed: int) -> Generator[str, str, float]:
    """Two more chances; each wrong reply costs a third of the reward."""
    reply = yield task["question"]
    for reward in (1.0, 2 / 3, 1 / 3):
        if last_integer(reply) == task["result"]:
            return reward
        if reward > 0.5:
            reply = yield "That is wrong. Try again."
    return 0.0


def answer_in_sentences(task: Mapping[str, Any], seed: int) -> Generator[str, str, float]:
    """Ask each of a task's sums. The right number has reward 0.25, and 1 in a sentence: "The answer is 85."."""
    worth = 0.0
    for question, result in task["sums"]:
        reply = yield question
        in_sentence = reply.strip() == f"The answer is {result}."
        worth += 1.0 if in_sentence else 0.25 if last_integer(reply) == result else 0.0
    return worth / len(task["sums"])


def _distance(task: Mapping[str, Any], ended: Ended) -> int:
    given = last_integer(ended.text)
    return 10**9 if given is None else abs(given - int(task["answer"]))

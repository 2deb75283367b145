"""What is practised: sums with a calculator, to be answered in a sentence, and guessing a number.

Both go over several turns. The model thinks, and its chat template leaves the thoughts of earlier turns out when the
user speaks again, so these sessions fork.
"""

from random import Random
from typing import Any

CALCULATOR = "python:rolltape.collect.environments.calculator:calculator"


def make_tasks(seed: int, step: int, count: int) -> list[dict[str, Any]]:
    """The tasks of one step: of four, three are talks with sums and one is a game."""
    rng = Random(f"{seed}/{step}")
    made = [_game(rng) if number % 4 == 3 else _sums(rng) for number in range(count)]
    return [{"id": f"{step}-{number}", **task} for number, task in enumerate(made)]


def _sums(rng: Random) -> dict[str, Any]:
    return {
        "environment": "message",
        "episode": "python:rolltape.demo.tasks.rules:answer_in_sentences",
        "tools": [CALCULATOR],
        "sums": [_sum(rng) for _ in range(rng.choice([1, 1, 2]))],
        "max_tool_calls": 6,
    }


def _sum(rng: Random) -> tuple[str, int]:
    a, b = rng.randint(100, 9999), rng.randint(11, 99)
    text, result = rng.choice([(f"{a} * {b}", a * b), (f"{a} + {b}", a + b), (f"{a} - {b}", a - b)])
    return rng.choice(["What is {}?", "Calculate {}.", "Please work out {}."]).format(text), result


def _game(rng: Random) -> dict[str, Any]:
    high = rng.choice([20, 30, 50])
    options = {"high": high, "secret": rng.randint(1, high), "guesses": high.bit_length() - 1}
    return {"environment": "game", "game": "guess-the-number", "options": options}

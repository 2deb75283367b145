"""The game `guess-the-number`: one seat guesses, and is told `higher` or `lower`."""

import re
from collections.abc import Mapping
from random import Random
from typing import Any

from rolltape.collect.environments.games.game import Game
from rolltape.collect.environments.protocol import AGENT
from rolltape.errors import TaskError
from rolltape.records.jsonable import shown

_KNOWN = ("high", "secret", "guesses")


class GuessTheNumber(Game):
    """A number from 1 to `high`. The reward is 1 if it is found within `guesses` (as many as halving needs), else 0."""

    seats = (AGENT,)

    def __init__(self, options: Mapping[str, Any], rng: Random) -> None:
        unknown = sorted(set(options) - set(_KNOWN))
        if unknown:
            raise TaskError(f"its options {', '.join(unknown)} are unknown; there are {', '.join(_KNOWN)}")
        self.high = _whole(options, "high", 100, most=10**9)
        self.guesses = _whole(options, "guesses", self.high.bit_length(), most=10**6)
        drawn = rng.randint(1, self.high)
        self.secret = _whole(options, "secret", drawn, most=self.high)
        self.guessed: list[int] = []

    def to_move(self) -> str | None:
        return None if self._found or len(self.guessed) >= self.guesses else AGENT

    def rules(self, seat: str) -> str:
        return f"I am thinking of a number between 1 and {self.high}. Guess it. I will say higher or lower."

    def view(self, seat: str) -> str:
        if not self.guessed:
            return ""
        return "higher" if self.secret > self.guessed[-1] else "lower"

    def play(self, seat: str, text: str) -> str | None:
        numbers = re.findall(r"-?\d+", text)
        if not numbers or len(numbers[-1]) > 12:
            return "There is no guess in that. Say one number."
        self.guessed.append(int(numbers[-1]))
        return None

    def reward(self, seat: str) -> float:
        return float(self._found)

    def forfeit(self, seat: str) -> float:
        return 0.0

    def state(self) -> Mapping[str, Any]:
        return {"secret": self.secret, "guessed": list(self.guessed), "guesses_left": self.guesses - len(self.guessed)}

    @property
    def _found(self) -> bool:
        return self.secret in self.guessed[-1:]


def _whole(options: Mapping[str, Any], name: str, default: int, *, most: int) -> int:
    value = options.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise TaskError(f"its option {name} is {shown(value)}; give a whole number from 1 to {most}")
    return value

"""What a game is: whose move it is, what a seat is told, what a move does, and what the end is worth."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, ClassVar

Opponent = Callable[[Any, str, Random], str]  # the game, its seat, a source of chance → the text of a move


class Game(ABC):
    """One match. Made as `Class(options, rng)`: the task's `options`, and chance that is the same for a whole group.

    Options that cannot be used are a TaskError.
    """

    seats: tuple[str, ...]
    opponents: ClassVar[Mapping[str, Opponent]] = {}  # fixed ones that it knows besides `random`

    @abstractmethod
    def __init__(self, options: Mapping[str, Any], rng: Random) -> None: ...

    @abstractmethod
    def to_move(self) -> str | None:
        """The seat whose move it is; None: the match is over."""

    @abstractmethod
    def rules(self, seat: str) -> str:
        """What a seat is told once, at the start."""

    @abstractmethod
    def view(self, seat: str) -> str:
        """What a seat is told when it is its move; empty: nothing."""

    @abstractmethod
    def play(self, seat: str, text: str) -> str | None:
        """Make the move that a reply says. If that cannot be done: what is wrong with it, and nothing has changed."""

    @abstractmethod
    def reward(self, seat: str) -> float:
        """What the end of the match is worth to a seat."""

    def forfeit(self, seat: str) -> float:
        """What it is worth to a seat to have broken off the match, or made a move that cannot be made."""
        return -1.0

    def legal(self) -> Sequence[str]:
        """The moves that can be made now, for the opponent `random`."""
        return ()

    def state(self) -> Mapping[str, Any]:
        """For the record, as JSON."""
        return {}

"""`Game`: the interface of a game."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, ClassVar

Opponent = Callable[[Any, str, Random], str]  # the game, its seat, random numbers → the text of a move


class Game(ABC):
    """One match. It is made as `Class(options, rng)`. `rng` gives the same numbers to all attempts of a group.

    It raises a TaskError for options that it cannot use.
    """

    seats: tuple[str, ...]
    opponents: ClassVar[Mapping[str, Opponent]] = {}  # fixed ones besides `random`

    @abstractmethod
    def __init__(self, options: Mapping[str, Any], rng: Random) -> None: ...

    @abstractmethod
    def to_move(self) -> str | None:
        """The seat whose move it is; None if the match is over."""

    @abstractmethod
    def rules(self, seat: str) -> str:
        """The text for a seat at the start."""

    @abstractmethod
    def view(self, seat: str) -> str:
        """The text for a seat whose move it is; may be empty."""

    @abstractmethod
    def play(self, seat: str, text: str) -> str | None:
        """Make the move in a reply. If it is illegal, change nothing and return the reason."""

    @abstractmethod
    def reward(self, seat: str) -> float:
        """The reward of a seat at the end of the match."""

    def forfeit(self, seat: str) -> float:
        """The reward of a seat that broke off the match, or lost it by an illegal move."""
        return -1.0

    def legal(self) -> Sequence[str]:
        """The legal moves, for the opponent `random`."""
        return ()

    def state(self) -> Mapping[str, Any]:
        """The state of the match for the record, as JSON."""
        return {}

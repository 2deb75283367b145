"""The game `tic-tac-toe`: X begins, O answers."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from random import Random
from typing import Any, ClassVar

from rolltape.collect.environments.games.game import Game, Opponent
from rolltape.errors import TaskError

X, O, FREE = "X", "O", "."  # noqa: E741 - the name of the seat
EMPTY = FREE * 9
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


def free_squares(board: str) -> list[int]:
    """The numbers of the free squares, from 1, row by row."""
    return [place for place, square in enumerate(board, 1) if square == FREE]


def winner(board: str) -> str | None:
    """The seat that has three in a line."""
    return next((board[a] for a, b, c in LINES if board[a] == board[b] == board[c] != FREE), None)


def mover(board: str) -> str | None:
    """The seat whose move it is; None if the match is over."""
    if winner(board) or FREE not in board:
        return None
    return X if board.count(X) == board.count(O) else O


def after(board: str, square: int) -> str:
    """The board after the mover has taken a free square."""
    return f"{board[: square - 1]}{mover(board)}{board[square:]}"


@cache
def value(board: str) -> int:
    """The value of the board for X if both play perfectly: 1, 0 or -1."""
    seat = mover(board)
    if seat is None:
        return {X: 1, O: -1, None: 0}[winner(board)]
    return (max if seat == X else min)(value(after(board, square)) for square in free_squares(board))


def perfect_move(game: "TicTacToe", seat: str, rng: Random) -> str:
    """One of the best moves."""
    worth = {square: value(after(game.board, square)) for square in free_squares(game.board)}
    best = (max if seat == X else min)(worth.values())
    return str(rng.choice([square for square, one in worth.items() if one == best]))


class TicTacToe(Game):
    """The reward is 1, 0 or -1. The option `board` is another start, such as "X...O....", row by row."""

    seats = (X, O)
    opponents: ClassVar[Mapping[str, Opponent]] = {"perfect": perfect_move}

    def __init__(self, options: Mapping[str, Any], rng: Random) -> None:
        self.board: str = options.get("board", EMPTY)
        if set(options) - {"board"}:
            raise TaskError(f"its options {', '.join(sorted(set(options) - {'board'}))} are unknown; there is board")
        if not isinstance(self.board, str) or not re.fullmatch(r"[XO.]{9}", self.board):
            raise TaskError(f"its option board is {self.board!r}; give nine of X, O and . (free), row by row")
        if self.board.count(X) - self.board.count(O) not in (0, 1) or mover(self.board) is None:
            raise TaskError(f"its option board is {self.board!r}, where no player can move; give an unfinished game")

    def to_move(self) -> str | None:
        return mover(self.board)

    def rules(self, seat: str) -> str:
        return (
            f"We play tic-tac-toe. You are {seat}. The squares are numbered 1 to 9, row by row. "
            "Three in a line win. Reply with the number of a free square only."
        )

    def view(self, seat: str) -> str:
        rows = "\n".join(" ".join(self.board[start : start + 3]) for start in (0, 3, 6))
        return f"{rows}\nFree squares: {', '.join(self.legal())}. Your move?"

    def play(self, seat: str, text: str) -> str | None:
        found = re.findall(r"\d+", text)
        if not found:
            return f"There is no square in that. Free squares: {', '.join(self.legal())}. Your move?"
        if found[-1] not in self.legal():
            return f"Square {found[-1][:20]} is not free. Free squares: {', '.join(self.legal())}. Your move?"
        self.board = after(self.board, int(found[-1]))
        return None

    def reward(self, seat: str) -> float:
        won = winner(self.board)
        return 0.0 if won is None else 1.0 if won == seat else -1.0

    def legal(self) -> Sequence[str]:
        return [str(square) for square in free_squares(self.board)]

    def state(self) -> Mapping[str, Any]:
        return {"board": self.board, "winner": winner(self.board)}

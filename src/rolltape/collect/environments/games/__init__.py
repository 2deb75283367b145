"""The interface of games, and the games that come with Rolltape."""

from rolltape.collect.environments.games.game import Game, Opponent
from rolltape.collect.environments.games.guess_the_number import GuessTheNumber
from rolltape.collect.environments.games.tic_tac_toe import TicTacToe

GAMES: dict[str, type[Game]] = {"guess-the-number": GuessTheNumber, "tic-tac-toe": TicTacToe}

__all__ = ["GAMES", "Game", "GuessTheNumber", "Opponent", "TicTacToe"]

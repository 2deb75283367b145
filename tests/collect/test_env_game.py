"""Games: whose move it is, what each seat hears, what an illegal move and a limit cost; and the rules themselves."""

import re
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltape.collect import Task
from rolltape.collect.environments import AGENT, Ended, Episode, Message, Score, environment_named
from rolltape.collect.environments.games import tic_tac_toe as ttt
from rolltape.errors import TaskError
from rolltape.records.rollout import StopReason

GAME = environment_named("game")

NIM = '''
from rolltape.collect.environments import Game


class Nim(Game):
    """Take one or two; who takes the last wins."""

    seats = ("a", "b")

    def __init__(self, options, rng):
        self.left, self.mover = options.get("heap", 5), 0

    def to_move(self):
        return self.seats[self.mover] if self.left else None

    def rules(self, seat):
        return "Take 1 or 2."

    def view(self, seat):
        return f"{self.left} left."

    def play(self, seat, text):
        if text not in ("1", "2"):
            return "1 or 2."
        self.left, self.mover = max(0, self.left - int(text)), 1 - self.mover

    def reward(self, seat):
        return float(self.seats[1 - self.mover] == seat)


def takes_one(game, seat, rng):
    return "1"


def cheats(game, seat, rng):
    return "9"
'''


@pytest.fixture(autouse=True)
def nim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "env_nim.py").write_text(NIM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "env_nim", raising=False)


def begin(seed: int = 1, *, task_id: str = "a", **data: Any) -> Episode:
    task = Task(id=task_id, data=data)
    GAME.check(task)
    return GAME.begin(task, seed)


def says(text: str) -> Message:
    return {"role": "assistant", "content": text}


async def score(episode: Episode, seat: str, stop: StopReason = StopReason.COMPLETED) -> Score:
    return await episode.score(seat, Ended(stop_reason=stop))


async def rewards(episode: Episode, **stops: StopReason) -> dict[str, float | None]:
    found = {seat: await score(episode, seat, stops.get(seat, StopReason.COMPLETED)) for seat in episode.seats}
    return {seat: one.reward for seat, one in found.items()}


async def test_guessing_is_told_higher_and_lower_until_found() -> None:
    episode = begin(game="guess-the-number", options={"high": 20, "secret": 13})
    opening = episode.opening(AGENT).messages
    assert [message["role"] for message in opening] == ["user"]
    assert "between 1 and 20" in opening[0]["content"]
    heard = [await episode.answer(AGENT, says(guess)) for guess in ("My guess is 10.", "15", "13")]
    assert [answer.messages[0]["content"] for answer in heard[:2]] == ["higher", "lower"]
    assert heard[2].done
    assert heard[2].env_state == {"secret": 13, "guessed": [10, 15, 13], "guesses_left": 2}
    assert await rewards(episode) == {AGENT: 1.0}


async def test_guesses_are_as_many_as_halving_needs() -> None:
    episode = begin(game="guess-the-number", options={"high": 3, "secret": 3})
    assert not (await episode.answer(AGENT, says("1"))).done
    assert (await episode.answer(AGENT, says("2"))).done
    assert episode.next_seat() is None
    assert await rewards(episode) == {AGENT: 0.0}


async def test_number_is_the_same_for_a_whole_group_and_other_for_another_task() -> None:
    async def secret(task_id: str, seed: int) -> Any:
        episode = begin(seed, task_id=task_id, game="guess-the-number", options={"high": 10**6})
        state = (await episode.answer(AGENT, says("1"))).env_state
        assert state is not None
        return state["secret"]

    assert await secret("a", 1) == await secret("a", 2)
    assert await secret("a", 1) != await secret("b", 1)


async def test_both_seats_hear_the_board_when_it_is_their_move() -> None:
    episode = begin(game="tic-tac-toe")
    assert episode.seats == ("X", "O")
    first, second = (episode.opening(seat).messages for seat in episode.seats)
    assert "You are X" in first[0]["content"]
    assert "Free squares: 1, 2, 3, 4, 5, 6, 7, 8, 9." in first[0]["content"]
    assert "You are O" in second[0]["content"]
    assert "Free squares" not in second[0]["content"]
    answer = await episode.answer("X", says("5"))
    assert episode.next_seat() == "O"
    assert answer.messages[0]["content"].startswith(". . .\n. X .\n. . .\nFree squares: 1, 2, 3, 4, 6, 7, 8, 9.")


async def test_self_play_rewards_each_seat() -> None:
    episode = begin(game="tic-tac-toe")
    for seat, square in zip("XOXOX", "14259", strict=True):
        assert episode.next_seat() == seat
        answer = await episode.answer(seat, says(square))
    assert not answer.done
    assert (await episode.answer("O", says("6"))).done
    assert await rewards(episode) == {"X": -1.0, "O": 1.0}


async def test_fixed_opponent_moves_at_once_and_begins_if_it_is_first() -> None:
    episode = begin(game="tic-tac-toe", opponents={"X": "random"})
    assert episode.seats == ("O",)
    assert episode.next_seat() == "O"
    assert episode.opening("O").messages[0]["content"].count("X") == 1


async def test_opponents_chance_follows_the_seed() -> None:
    async def boards(seed: int) -> list[Any]:
        episode = begin(seed, game="tic-tac-toe", opponents={"O": "random"}, illegal="tell", illegal_at_most=99)
        return [(await episode.answer("X", says(square))).env_state for square in "123"]

    assert await boards(5) == await boards(5)
    assert len({str(await boards(seed)) for seed in range(9)}) > 1


async def test_illegal_move_loses_and_nobody_wins_by_it() -> None:
    episode = begin(game="tic-tac-toe")
    await episode.answer("X", says("5"))
    answer = await episode.answer("O", says("5"))
    assert (answer.done, answer.stop_reason) == (True, StopReason.PARSE_ERROR)
    assert episode.next_seat() is None
    assert await rewards(episode) == {"X": 0.0, "O": -1.0}


async def test_illegal_move_is_told_as_often_as_the_task_says() -> None:
    episode = begin(game="tic-tac-toe", illegal="tell", illegal_at_most=1, illegal_reward=-0.1)
    answer = await episode.answer("X", says("ten"))
    assert (answer.done, answer.reward) == (False, -0.1)
    assert answer.messages[0]["content"].startswith("There is no square in that.")
    assert episode.next_seat() == "X"
    assert (await episode.answer("X", says("10"))).done
    assert await rewards(episode) == {"X": -1.0, "O": 0.0}


async def test_seat_that_ran_into_a_limit_has_lost_and_the_other_has_not_won() -> None:
    episode = begin(game="tic-tac-toe")
    await episode.answer("X", says("5"))
    assert await rewards(episode, O=StopReason.TIMEOUT) == {"X": 0.0, "O": -1.0}


async def test_game_of_ones_own_against_ones_own_opponent() -> None:
    fields: dict[str, Any] = {"game": "python:env_nim:Nim", "opponents": {"b": "python:env_nim:takes_one"}}
    episode = begin(**fields, options={"heap": 4}, prompt="Nim. You are {seat}.", system="Play.")
    assert episode.opening("a").messages == [
        {"role": "system", "content": "Play."},
        {"role": "user", "content": "Nim. You are a.\n4 left."},
    ]
    assert (await episode.answer("a", says("1"))).messages[0]["content"] == "2 left."
    assert (await episode.answer("a", says("2"))).done
    assert await rewards(episode) == {"a": 1.0}


async def test_opponent_that_cheats_is_an_error() -> None:
    episode = begin(game="python:env_nim:Nim", opponents={"b": "python:env_nim:cheats"})
    with pytest.raises(TaskError, match="python:env_nim:cheats made an illegal move: 1 or 2"):
        await episode.answer("a", says("1"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "it names no game"),
        ({"game": "chess"}, "there is no game 'chess'; there are guess-the-number, tic-tac-toe"),
        ({"game": "python:env_nim:takes_one"}, "python:env_nim:takes_one is not a game; derive a class from Game"),
        ({"game": "tic-tac-toe", "opponents": {"Z": "random"}}, "its opponents sit at Z; the seats are X, O"),
        ({"game": "tic-tac-toe", "opponents": {"X": "random", "O": "random"}}, "its opponents take every seat"),
        ({"game": "tic-tac-toe", "opponents": {"O": "best"}}, "there is no opponent 'best'; there are perfect, random"),
        ({"game": "python:env_nim:Nim", "opponents": {"b": "random"}}, "this game does not list its legal moves"),
        ({"game": "tic-tac-toe", "options": {"board": "XXX"}}, "its option board is 'XXX'; give nine"),
        ({"game": "tic-tac-toe", "options": {"board": "XXXOO...."}}, "where no player can move"),
        ({"game": "tic-tac-toe", "options": {"board": "XXX......"}}, "where no player can move"),
        ({"game": "guess-the-number", "options": {"hihg": 5}}, "its options hihg are unknown; there are high"),
        ({"game": "guess-the-number", "options": {"high": 0}}, "its option high is 0; give a whole number"),
        ({"game": "guess-the-number", "options": {"high": 5, "secret": 6}}, "its option secret is 6"),
        ({"game": "tic-tac-toe", "illegal": "allow"}, "its illegal: invalid enum value 'allow'"),
    ],
)
def test_bad_task_is_told_precisely(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=re.escape(message)):
        GAME.check(Task(data=fields))


squares = st.lists(st.integers(1, 9).map(str), max_size=20)


def played(squares_played: list[str]) -> ttt.TicTacToe:
    game = ttt.TicTacToe({}, Random(0))
    for square in squares_played:
        seat = game.to_move()
        if seat is None:
            break
        game.play(seat, square)
    return game


@given(squares)
def test_marks_alternate_and_an_illegal_move_changes_nothing(moves: list[str]) -> None:
    game = played([])
    for move in moves:
        seat, before = game.to_move(), game.board
        if seat is None:
            break
        legal = move in game.legal()
        assert (game.play(seat, move) is None) == legal
        changed = [place for place in range(9) if game.board[place] != before[place]]
        assert changed == ([int(move) - 1] if legal else [])
        assert game.board.count("X") - game.board.count("O") in (0, 1)


@given(squares)
def test_match_ends_with_a_line_or_a_full_board_and_rewards_sum_to_zero(moves: list[str]) -> None:
    game = played(moves)
    rows = [game.board[0:3], game.board[3:6], game.board[6:9]]
    columns = [game.board[start::3] for start in range(3)]
    diagonals = [game.board[0::4], game.board[2:7:2]]
    lines = {line[0] for line in rows + columns + diagonals if len(set(line)) == 1} - {"."}
    assert len(lines) <= 1
    assert (game.to_move() is None) == bool(lines or "." not in game.board)
    assert game.reward("X") + game.reward("O") == 0
    assert all(game.reward(seat) == 1 for seat in lines)


@given(st.lists(st.integers(0, 8), min_size=9, max_size=9), st.sampled_from("XO"), st.randoms(use_true_random=False))
def test_perfect_opponent_never_loses(choices: list[int], seat: str, rng: Any) -> None:
    game = played([])
    while (mover := game.to_move()) is not None:
        legal = game.legal()
        move = ttt.perfect_move(game, seat, rng) if mover == seat else legal[choices[len(legal) - 1] % len(legal)]
        assert game.play(mover, move) is None
    assert game.reward(seat) >= 0


def test_perfect_play_is_a_draw() -> None:
    assert ttt.value(ttt.EMPTY) == 0

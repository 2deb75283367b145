"""The environment `game`: several seats with a session and a reward each, against each other or fixed opponents."""

from collections import Counter
from collections.abc import Mapping
from random import Random
from typing import Annotated, Any, Literal

import msgspec

from rolltape.collect.environments.games import GAMES, Game, Opponent
from rolltape.collect.environments.protocol import Answer, Ended, Episode, Message, Opening, Score
from rolltape.collect.environments.task_fields import parse_fields, system_messages, user_message
from rolltape.collect.functions import PREFIX, function_named
from rolltape.collect.tasks import Task
from rolltape.errors import TaskError
from rolltape.records.messages import content_text
from rolltape.records.rollout import StopReason

_RANDOM = "random"


class GameFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a task of this kind."""

    game: str = ""  # one of GAMES, or "python:module:Class"
    options: dict[str, Any] = {}  # the game's own
    opponents: dict[str, str] = {}  # by seat: "random", one of the game's own, or "python:module:function"
    prompt: str | None = None  # instead of the game's rules; "{seat}" is replaced by the seat's name
    system: str | None = None
    illegal: Literal["tell", "end"] = "end"  # an illegal move loses at once, or the model is told and retries
    illegal_at_most: Annotated[int, msgspec.Meta(ge=0)] = 3  # one more ends the match, with "tell"
    illegal_reward: float = 0.0  # of each illegal move, with "tell"


class GameEnvironment:
    """Plays a match. A seat's reward is its result in the match."""

    name = "game"
    calls_user_code = True  # a task may name functions that `begin` calls

    def check(self, task: Task) -> None:
        fields = parse_fields(task, GameFields)
        game = _make_game(fields, task)
        strange = sorted(set(fields.opponents) - set(game.seats))
        if strange:
            raise TaskError(f"its opponents sit at {', '.join(strange)}; the seats are {', '.join(game.seats)}")
        if set(fields.opponents) == set(game.seats):
            raise TaskError("its opponents take every seat; leave one to the model")
        for name in fields.opponents.values():
            _find_opponent(game, name)

    def begin(self, task: Task, seed: int) -> Episode:
        fields = parse_fields(task, GameFields)
        return GameEpisode(fields, _make_game(fields, task), Random(seed))


class GameEpisode:
    """One match. Fixed opponents move as soon as it is their turn."""

    def __init__(self, fields: GameFields, game: Game, rng: Random) -> None:
        self._fields = fields
        self._game = game
        self._rng = rng
        self._opponents = {seat: _find_opponent(game, name) for seat, name in fields.opponents.items()}
        self._illegal_moves: Counter[str] = Counter()  # by seat
        self._forfeited: str | None = None
        self.calls_user_code = any(name.startswith(PREFIX) for name in (fields.game, *fields.opponents.values()))
        self.seats = tuple(seat for seat in game.seats if seat not in self._opponents)
        self._move_opponents()

    def opening(self, seat: str) -> Opening:
        rules = self._fields.prompt
        texts = [self._game.rules(seat) if rules is None else rules.replace("{seat}", seat)]
        if self._game.to_move() == seat:
            texts.append(self._game.view(seat))
        messages = [*system_messages(self._fields.system), user_message("\n".join(filter(None, texts)))]
        return Opening(messages=messages)

    def next_seat(self) -> str | None:
        return None if self._forfeited else self._game.to_move()

    async def answer(self, seat: str, reply: Message) -> Answer:
        wrong = self._game.play(seat, content_text(reply.get("content")))
        if wrong is not None:
            return self._reject(seat, wrong)
        self._move_opponents()
        mover = self._game.to_move()
        view = "" if mover is None else self._game.view(mover)
        return Answer(messages=[user_message(view)] if view else (), done=mover is None, env_state=self._game.state())

    async def score(self, seat: str, ended: Ended) -> Score:
        data: dict[str, Any] = {"state": dict(self._game.state())}
        if self._forfeited is None and self._game.to_move() is None:
            return Score(reward=self._game.reward(seat), reward_data=data)
        # A match that was broken off has no winner; the seat that broke it off has lost.
        broke_off = seat == self._forfeited or (self._forfeited is None and ended.stop_reason != StopReason.COMPLETED)
        data["broken_off"] = "illegal move" if self._forfeited else "limit"
        return Score(reward=self._game.forfeit(seat) if broke_off else 0.0, reward_data=data)

    def _reject(self, seat: str, wrong: str) -> Answer:
        self._illegal_moves[seat] += 1
        data = {"illegal": wrong}
        if self._fields.illegal == "end" or self._illegal_moves[seat] > self._fields.illegal_at_most:
            self._forfeited = seat
            reason = StopReason.PARSE_ERROR
            return Answer(done=True, stop_reason=reason, reward_data=data, env_state=self._game.state())
        return Answer(
            messages=[user_message(wrong)],
            reward=self._fields.illegal_reward,
            reward_data=data,
            env_state=self._game.state(),
        )

    def _move_opponents(self) -> None:
        while (seat := self._game.to_move()) in self._opponents:
            wrong = self._game.play(str(seat), self._opponents[str(seat)](self._game, str(seat), self._rng))
            if wrong is not None:
                raise TaskError(f"the opponent {self._fields.opponents[str(seat)]} made an illegal move: {wrong}")


def random_move(game: Game, seat: str, rng: Random) -> str:
    """Any legal move."""
    return rng.choice(game.legal())


def _make_game(fields: GameFields, task: Task) -> Game:
    """A match as the task sets it up. Its random numbers depend only on the task, so all attempts begin alike."""
    if not fields.game:
        raise TaskError(f'it names no game; add "game": one of {", ".join(sorted(GAMES))}, or python:module:Class')
    if not fields.game.startswith(PREFIX) and fields.game not in GAMES:
        raise TaskError(
            f"there is no game {fields.game!r}; there are {', '.join(sorted(GAMES))}, and python:module:Class"
        )
    kind = GAMES.get(fields.game) or function_named(fields.game)
    if not (isinstance(kind, type) and issubclass(kind, Game)):
        raise TaskError(f"{fields.game} is not a game; derive a class from Game")
    return kind(fields.options, Random(task.key))


def _find_opponent(game: Game, name: str) -> Opponent:
    named: Mapping[str, Opponent] = {_RANDOM: random_move, **game.opponents}
    if name == _RANDOM and not game.legal():
        raise TaskError("its opponent is 'random', and this game does not list its legal moves; name another")
    if name.startswith(PREFIX):
        return function_named(name)
    if name not in named:
        raise TaskError(f"there is no opponent {name!r}; there are {', '.join(sorted(named))}, python:module:function")
    return named[name]

"""What an environment is: it says what a task asks, answers what the model says, and scores what came of it."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from rolltape.collect.tasks import Task
from rolltape.records.rollout import StopReason

Message = dict[str, Any]  # in chat form
AGENT = "agent"  # the seat of an environment that has one


class Tool(msgspec.Struct, frozen=True):
    """A function that the model may call: keyword arguments in, text out. It may be a coroutine function."""

    name: str
    description: str
    parameters: dict[str, Any]  # a JSON schema
    function: Callable[..., str | Awaitable[str]]

    def to_chat(self) -> dict[str, Any]:
        """As a request offers it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """What a seat is told first."""

    messages: list[Message]
    tools: Sequence[Tool] = ()
    files: Mapping[str, str] = {}  # put into the working directory of an agent that has one
    max_tool_calls: int | None = None  # one more ends the attempt; None: any number


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the environment says to a reply, and what the reply was worth by itself."""

    messages: Sequence[Message] = ()  # to the seat that is asked next: the same one, or in a game another
    done: bool = False  # the episode has ended
    reward: float | None = 0.0  # of this step alone; the total is their sum and the score. None: steps have none
    stop_reason: StopReason = StopReason.COMPLETED  # if done
    reward_data: Mapping[str, Any] | None = None
    env_state: Mapping[str, Any] | None = None
    metrics: Mapping[str, float] | None = None


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How an agent ended, for the score."""

    stop_reason: StopReason
    messages: Sequence[Message] = ()  # of the chat agent: the whole conversation
    text: str = ""  # the last reply's text, or what a program printed
    folder: Path | None = None  # the working directory that a program left
    exit_code: int | None = None


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """What an attempt came to."""

    reward: float | None  # on top of the steps' own; None: not rewarded (yet)
    terms: Mapping[str, float] = {}
    reward_data: Mapping[str, Any] | None = None
    ungraded: str | None = None  # why there is no reward though there should be
    compared: str | None = None  # what a comparison looks at later, where that is not the last reply

    def to_data(self) -> dict[str, Any]:
        """What goes with the reward, or with there being none, for the record."""
        why = {} if self.ungraded is None else {"ungraded": self.ungraded}
        return {**(self.reward_data or {}), **why}


class Episode(Protocol):
    """One attempt at one task. Whatever changes lives here."""

    @property
    def seats(self) -> tuple[str, ...]:
        """AGENT alone, or several, each with a session and a reward of its own."""

    def opening(self, seat: str) -> Opening:
        """What that seat is told. Asked of every seat once, before the first reply."""

    def next_seat(self) -> str | None:
        """Whose reply is asked for next; None: nobody's, it is over. A tool ends an episode by making it so."""

    async def answer(self, seat: str, reply: Message) -> Answer:
        """To a reply without tool calls. Tools are called by the collector.

        The reply is a copy. A call that could not be read comes as the text that it is, and the reply then has
        `"flags": ["malformed_call"]`; so does one of a tool that is not allowed, with "denied_tool".
        """

    async def score(self, seat: str, ended: Ended) -> Score:
        """What the attempt came to for that seat, on top of the answers' rewards."""


class Environment(Protocol):
    """A kind of task."""

    name: str

    def check(self, task: Task) -> None:
        """Raise TaskError for a task that lacks what this environment needs, before anything runs."""

    def begin(self, task: Task, seed: int) -> Episode:
        """A fresh attempt; the same seed gives the same episode."""


@runtime_checkable
class GroupEnvironment(Environment, Protocol):
    """One that rewards only when all attempts of a group have ended, by comparing them."""

    async def compare(self, task: Task, attempts: Mapping[str, Ended], seed: int) -> Mapping[str, Score]:
        """Scores by rollout id, of those given by rollout id.

        Working directories are gone by then: the `text` of an attempt is what its score gave as `compared`, if it did.
        """

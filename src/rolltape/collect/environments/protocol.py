"""The interface of environments: an environment opens a task, answers the model's replies, and scores the attempt."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeGuard, cast, runtime_checkable

import msgspec

from rolltape.collect.tasks import Task
from rolltape.errors import CollectError, RecordError
from rolltape.gateway.wire import FoundByUrl
from rolltape.records.jsonable import shown
from rolltape.records.rollout import UNGRADED, StopReason

Message = dict[str, Any]  # in chat form
AGENT = "agent"  # the seat of an environment that has one
NEEDS_PROGRAM = "give an --agent that is a program"


class Tool(msgspec.Struct, frozen=True):
    """A function that the model may call: keyword arguments in, text out. It may be a coroutine function."""

    name: str
    description: str
    parameters: dict[str, Any]  # a JSON schema
    function: Callable[..., str | Awaitable[str]]

    def to_chat(self) -> dict[str, Any]:
        """The tool in the form of a chat request."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class Connection(FoundByUrl, msgspec.Struct, frozen=True, kw_only=True):
    """How a seat reaches its session of the gateway."""

    base_urls: Mapping[str, str]  # by SDK
    key: str
    model: str


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """The first messages, tools and files of a seat."""

    messages: list[Message]
    tools: Sequence[Tool] = ()
    files: Mapping[str, str] = {}  # for the working directory of an agent that has one
    max_tool_calls: int | None = None  # one more ends the attempt; None for any number


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The environment's answer to a reply, and the reward of that step."""

    messages: Sequence[Message] = ()  # to the seat that is asked next: the same one, or another one in a game
    done: bool = False  # the episode has ended
    reward: float | None = 0.0  # of this step; the total is the sum of steps and score. None if steps have no reward
    stop_reason: StopReason = StopReason.COMPLETED  # if done
    reward_data: Mapping[str, Any] | None = None
    env_state: Mapping[str, Any] | None = None
    metrics: Mapping[str, float] | None = None


class CommandEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a command that checked an agent's work ended."""

    exit_code: int | None  # None if a signal ended it
    signal: int | None
    timed_out: bool
    stdout: str  # the end of it, as of stderr
    stderr: str
    set_aside: tuple[str, ...] = ()  # files of the working directory that were removed before


class CheckCommand(NamedTuple):
    """A command that checks an agent's work. `Ended.run` explains the fields."""

    words: list[str]
    files: Mapping[str, str]
    shipped: Mapping[str, str]
    keep: Sequence[str]
    copies: Mapping[str, Path]
    env: Mapping[str, str]
    stdin: str
    timeout_s: float


class CheckRunner(Protocol):
    """Runs checks in the working directory of an agent that has ended."""

    @property
    def is_confined(self) -> bool:
        """Whether checks run in a sandbox."""

    @property
    def logs(self) -> Path | None:
        """The folder of this machine that a container sees as /logs, or None if the agent was in no container."""

    def clear_logs(self, name: str) -> None:
        """Empty a folder of /logs, also if the agent has put something else in its place."""

    async def run(self, command: CheckCommand) -> CommandEnd:
        """Run a command in the working directory."""

    async def call(self, function: str, entry: Mapping[str, Any], ended: "Ended", *, timeout_s: float) -> "Score":
        """Call "python:module:function" in its own process inside the sandbox."""


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How an agent ended, for the score."""

    stop_reason: StopReason
    messages: Sequence[Message] = ()  # the whole conversation of the chat agent
    text: str = ""  # the last reply's text, or what a program printed
    folder: Path | None = None  # the working directory that a program left
    exit_code: int | None = None
    checks: CheckRunner | None = None  # None without a working directory

    async def run(
        self,
        command: str | Sequence[str],
        *,
        files: Mapping[str, str] | None = None,
        shipped: Mapping[str, str] | None = None,
        keep: Sequence[str] = (),
        copies: Mapping[str, Path] | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str = "",
        timeout_s: float = 300.0,
    ) -> CommandEnd:
        """Run a command in the working directory that a program left, in the same kind of sandbox.

        All processes of the agent have ended by then. The command has a new home and no network. Use it for everything
        that executes files which an agent could have written: in the collector's own process they could do anything.

            async def score(self, seat, ended):
                end = await ended.run("python -m pytest -q test_calc.py", files={"test_calc.py": self.tests})
                return Score(reward=float(end.exit_code == 0))

        Arguments:
            command: Words, or a line for a shell.
            files: Written to the working directory before, in place of the agent's files with these names.
            shipped: The files that the agent got. Files that Python and test runners load automatically, such as
                `conftest.py`, are restored from here, and removed if they are not here.
            keep: Names of such files to keep as the agent left them.
            copies: For an agent in a container: absolute paths there, each with a file or folder of this machine that
                is copied to it before, and replaces what is there.
            env: More variables of the command's environment.
            stdin: What the command reads.
            timeout_s: The command is ended after this time.
        """
        if self.checks is None:
            raise CollectError(f"this agent left no working directory to run a command in; {NEEDS_PROGRAM}")
        words = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        return await self.checks.run(
            CheckCommand(words, files or {}, shipped or {}, keep, copies or {}, env or {}, stdin, timeout_s)
        )


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """The score of an attempt."""

    reward: float | None  # added to the steps' rewards; None if it has no reward, or not yet
    terms: Mapping[str, float] = {}
    reward_data: Mapping[str, Any] | None = None
    ungraded: str | None = None  # why there is no reward although there should be one
    compared: str | None = None  # the text for a later comparison, if that is not the last reply

    @property
    def reason(self) -> str | None:
        """Why a rollout has no reward, for its record; None if it has one, or should have none."""
        return None if self.ungraded is None else f"{UNGRADED}{self.ungraded}"

    def to_data(self) -> dict[str, Any]:
        """`reward_data` and `ungraded` as one object, for the record."""
        why = {} if self.ungraded is None else {"ungraded": self.ungraded}
        return {**(self.reward_data or {}), **why}


class Episode(Protocol):
    """One attempt at one task. All state of the attempt is in here.

    It may also have `open` and `close`, which may be coroutine functions. `open` is called once before an attempt
    runs, `close` once after its end, in all cases. Start processes and connections there, since episodes are also
    begun only to read their seats and openings.
    """

    @property
    def seats(self) -> tuple[str, ...]:
        """The names of its seats: `AGENT` alone, or several. Each has a session and a reward of its own."""

    def opening(self, seat: str) -> Opening:
        """The opening of a seat. It is called once for every seat, before the first reply."""

    def next_seat(self) -> str | None:
        """The seat that replies next; None if the episode is over, which a tool may cause."""

    async def answer(self, seat: str, reply: Message) -> Answer:
        """Answer a reply without tool calls. The collector calls tools.

        The reply is a copy. A call that could not be read is in its text, with `"flags": ["malformed_call"]`. A call of
        a tool that is not allowed is in its text too, with the flag "denied_tool".
        """

    async def score(self, seat: str, ended: Ended) -> Score:
        """The score of the attempt for a seat, added to the rewards of its answers."""


@runtime_checkable
class DrivenEpisode(Episode, Protocol):
    """An episode with its own agent loop: it asks the model itself, and no other agent can attempt it."""

    async def drive(
        self, connections: Mapping[str, Connection], max_turns: int, timeout_s: float
    ) -> Mapping[str, Ended]:
        """Run the attempt to its end, through the session of each seat, and return how it ended for each seat.

        The limits are for the agent's work; setup and scoring may take additional time. Raise an error if something
        other than the policy broke the attempt.
        """


def check_episode(episode: object) -> Episode:
    """Check the result of an environment's `begin`; raises RecordError if it names no seats."""
    seats = getattr(episode, "seats", None)
    if isinstance(seats, str) or not seats:
        raise RecordError(
            f"begin returned {shown(episode)}, whose seats are {shown(seats)}; "
            "return an episode with a tuple of `seats`, such as (AGENT,)"
        )
    return cast("Episode", episode)


def check_opening(opening: object) -> Opening:
    """Check the result of an episode's `opening`; raises RecordError if it is not an Opening."""
    if not isinstance(opening, Opening):
        raise RecordError(f"the environment opened with {shown(opening)}; return an Opening")
    return opening


def drives(episode: Episode) -> TypeGuard[DrivenEpisode]:
    """Whether an episode has its own agent loop."""
    return hasattr(episode, "drive")


class Environment(Protocol):
    """A kind of task: it makes the prompts, answers the model's replies, and scores attempts.

    Any class with `name`, `check` and `begin` is one. Tasks or `--environment` name it as "python:module:Class". This
    one asks a question, and rewards a reply that contains the answer:

        from rolltape.collect.environments import AGENT, Answer, Opening, Score
        from rolltape.errors import TaskError


        class Contains:
            name = "contains"

            def check(self, task):
                if "answer" not in task.data:
                    raise TaskError('it has no answer; add "answer"')

            def begin(self, task, seed):
                return Asking(task.data)


        class Asking:
            seats = (AGENT,)
            over = False

            def __init__(self, data):
                self.data = data

            def opening(self, seat):
                return Opening(messages=[{"role": "user", "content": self.data["prompt"]}])

            def next_seat(self):
                return None if self.over else AGENT

            async def answer(self, seat, reply):
                self.over = True
                return Answer(done=True)

            async def score(self, seat, ended):
                return Score(reward=float(self.data["answer"] in ended.text))

    It may also have `close`, a coroutine function, which is called when the collection has ended.
    docs/how-to/collect/environments.md has more.
    """

    name: str

    def check(self, task: Task) -> None:
        """Raise a TaskError for a task that lacks necessary fields. It is called before anything runs."""

    def begin(self, task: Task, seed: int) -> Episode:
        """Begin an attempt. The same seed must give the same episode."""


@runtime_checkable
class GroupEnvironment(Environment, Protocol):
    """An environment that rewards by comparing all attempts of a group, once they have ended."""

    async def compare(self, task: Task, attempts: Mapping[str, Ended], seed: int) -> Mapping[str, Score]:
        """Scores by rollout id, for attempts by rollout id.

        Working directories are removed by then. The `text` of an attempt is the `compared` of its score, if set.
        """


def compares(environment: Environment) -> TypeGuard[GroupEnvironment]:
    return hasattr(environment, "compare")

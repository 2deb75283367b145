"""The interface of agents: an agent gets an assignment, and calls a session of the gateway until it is done."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rolltape.collect.environments.protocol import Answer, Connection, Ended, Episode, Message, check_opening
from rolltape.collect.sandboxes.protocol import Sandboxes
from rolltape.collect.sandboxes.running import Unconfined
from rolltape.records.rollout import StopReason

INPUT_VERSION = 1  # of agents' input: it is raised when a field is removed or changes its meaning


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One reply and what followed from it. The turn has its prompt."""

    turn: str | None  # the gateway's id, or None if it sent none
    reply: Message
    tool_results: Sequence[Message] = ()
    answer: Answer | None = None  # None if the environment was not asked, since tools were called or the reply was cut
    stop_reason: StopReason | None = None  # if it was the last one of its seat


class Assignment(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The assignment of an agent: an episode, one connection per seat, and its limits.

    docs/how-to/collect/index.md lists the fields.

    Example:

        def agent(assignment):
            connection = assignment.connections["agent"]
            messages = assignment.episode.opening("agent").messages
            client = OpenAI(base_url=connection.openai_base_url, api_key=connection.key)
            reply = client.chat.completions.create(model=connection.model, messages=messages)
            return reply.choices[0].message.content
    """

    version: int = INPUT_VERSION
    rollout: str  # its id
    task: Mapping[str, Any]  # the entry of the source, with the fields for scoring
    environment: str = ""  # its name, for messages
    episode: Episode
    connections: Mapping[str, Connection]  # by seat
    max_turns: int  # of each seat
    timeout_s: float
    allowed_tools: tuple[str, ...] | None  # None for all
    denied_tools: tuple[str, ...]
    seed: int  # the same whenever this attempt runs
    logs: Path  # the attempt's own folder, for a program's output
    scratch: Path | None = None  # for programs' temporary folders; None for the system's folder
    sandboxes: Sandboxes = Unconfined()  # in which programs run, each in its own
    on_step: Callable[[str, StepRecord], None] | None = None  # the chat agent calls it with the seat and its step


class AgentOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How an agent ended."""

    ended: Mapping[str, Ended]  # by seat; empty if broken
    exit_code: int | None = None  # of a program
    signal: int | None = None  # that ended it
    timed_out: bool = False
    left_out_bytes: int = 0  # of a program's output beyond the limit of its logs
    held: AsyncExitStack | None = None  # a program's sandbox and folders; `discard` removes them once all is scored
    last_error: str | None = None  # the last line that a program wrote to stderr
    broken: str | None = None  # what broke in the infrastructure; there is then nothing to reward


class Agent(Protocol):
    """One way to attempt a task."""

    name: str  # in the record, and in the rollout's id

    def preview(self, assignment: Assignment) -> dict[str, Any]:
        """What the agent would get for an assignment. Nothing runs."""

    async def run(self, assignment: Assignment) -> AgentOutcome:
        """Attempt the task. If this is cancelled, everything that was started ends, and no process is left."""


def describe_own_loop(agent: str, assignment: Assignment) -> str:
    """Why an agent other than `chat` cannot attempt a driven episode."""
    return f"agent {agent}: {assignment.environment} has an agent loop of its own; leave --agent out"


def preview_opening(given: object) -> dict[str, Any]:
    """A seat's opening as plain values."""
    opening = check_opening(given)
    shown = {
        "messages": opening.messages,
        "tools": [tool.to_chat() for tool in opening.tools],
        "files": dict(opening.files),
        "max_tool_calls": opening.max_tool_calls,
    }
    return {name: value for name, value in shown.items() if value not in ([], {}, None)}

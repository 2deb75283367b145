"""Agents attempt a task through a session of the gateway."""

from rolltape.collect.agents.chat import ChatAgent
from rolltape.collect.agents.function import FunctionAgent
from rolltape.collect.agents.launchers import claude_code_agent, codex_agent, command_agent
from rolltape.collect.agents.program import ProgramAgent, discard
from rolltape.collect.agents.protocol import Agent, AgentOutcome, Assignment, StepRecord
from rolltape.collect.environments.protocol import Connection
from rolltape.collect.functions import PREFIX, function_named
from rolltape.collect.sandboxes.workspace import scratch_folder
from rolltape.errors import AgentError
from rolltape.renamed import renamed

__all__ = [
    "AGENTS",
    "Agent",
    "AgentOutcome",
    "Assignment",
    "Connection",
    "FunctionAgent",
    "ProgramAgent",
    "StepRecord",
    "agent_named",
    "discard",
    "is_program",
    "scratch_folder",
]

AGENTS = "chat, claude-code[:PROGRAM], codex[:PROGRAM], command:PROGRAM ARGUMENT…, python:MODULE:FUNCTION"


def is_program(text: str) -> bool:
    """Whether the agent that a command line names is a program, which can run in a sandbox."""
    return text != ChatAgent.name and not text.startswith(PREFIX)


def agent_named(text: str, *, in_image: bool = False) -> Agent:
    """The agent that a command line names; raises AgentError or NoSuchFunction if there is none of that name.

    With `in_image`, programs are those of the image in which it will run, unless they are files of this machine.
    """
    kind, colon, rest = text.partition(":")
    if colon and not rest:
        raise AgentError(f"agent {text!r} has nothing after its colon; known are {AGENTS}")
    match kind:
        case "chat" if not colon:
            return ChatAgent()
        case "claude-code":
            return claude_code_agent(rest or "claude", in_image=in_image)
        case "codex":
            return codex_agent(rest or "codex", in_image=in_image)
        case "command":
            return command_agent(rest, in_image=in_image)
        case "python":
            return FunctionAgent(text, function_named(text))
    raise AgentError(f"there is no agent {text!r}; known are {AGENTS}")


__getattr__ = renamed(__name__, {"Outcome": "AgentOutcome"})

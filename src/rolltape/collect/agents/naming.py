"""The agent that a command line names."""

from rolltape.collect.agents.chat import ChatAgent
from rolltape.collect.agents.claude_code import claude_code_agent
from rolltape.collect.agents.codex import codex_agent
from rolltape.collect.agents.command import command_agent
from rolltape.collect.agents.function import FunctionAgent
from rolltape.collect.agents.protocol import Agent
from rolltape.collect.functions import function_named
from rolltape.errors import AgentError

AGENTS = "chat, claude-code[:PROGRAM], codex[:PROGRAM], command:PROGRAM ARGUMENT…, python:MODULE:FUNCTION"


def agent_named(text: str) -> Agent:
    """The agent of that name; raises AgentError or NoSuchFunction for one that is not there."""
    kind, colon, rest = text.partition(":")
    if colon and not rest:
        raise AgentError(f"agent {text!r} says nothing after its colon; known are {AGENTS}")
    match kind:
        case "chat" if not colon:
            return ChatAgent()
        case "claude-code":
            return claude_code_agent(rest or "claude")
        case "codex":
            return codex_agent(rest or "codex")
        case "command":
            return command_agent(rest)
        case "python":
            return FunctionAgent(text, function_named(text))
    raise AgentError(f"there is no agent {text!r}; known are {AGENTS}")

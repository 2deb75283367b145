"""The agent `command:PROGRAM ARGUMENT…`: any program, told the gateway's address by variables and the task on stdin."""

import shlex
from pathlib import Path

import msgspec

from rolltape.collect.agents.program import ProgramAgent, ProgramLaunch, find_program
from rolltape.collect.agents.protocol import Assignment, Connection
from rolltape.collect.environments.protocol import Opening
from rolltape.errors import AgentError
from rolltape.records.jsonable import encode_json


def command_agent(text: str) -> ProgramAgent:
    """The agent for a command in a shell's quoting. No shell runs it. It reads a JSON object on stdin."""
    command = parse_command(text)

    def launch(assignment: Assignment, connection: Connection, opening: Opening) -> ProgramLaunch:
        given = {
            "rollout": assignment.rollout,
            "task": dict(assignment.task),
            "messages": opening.messages,
            **msgspec.structs.asdict(connection),
            "seed": assignment.seed,
            "max_turns": assignment.max_turns,
            "timeout_s": assignment.timeout_s,
            "allowed_tools": assignment.allowed_tools,
            "denied_tools": assignment.denied_tools,
        }
        env = {
            "OPENAI_BASE_URL": connection.openai_base_url,
            "OPENAI_API_KEY": connection.key,
            "OPENAI_MODEL": connection.model,
            "ANTHROPIC_BASE_URL": connection.anthropic_base_url,
            "ANTHROPIC_API_KEY": connection.key,
            "ANTHROPIC_MODEL": connection.model,
            "ROLLTAPE_MODEL": connection.model,
            "ROLLTAPE_SEED": str(assignment.seed),
        }
        stdin = encode_json(given, f"rollout {assignment.rollout}: the task")[0].decode()
        return ProgramLaunch(command, env, stdin)

    return ProgramAgent(f"command:{text}", launch)


def parse_command(text: str) -> list[str]:
    """The words of a command. It runs in a folder of its own, so words that name files here are made absolute."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise AgentError(f"agent command:{text}: {error}; quote it as for a shell") from None
    if not words:
        raise AgentError("agent command: names no program; write command:PROGRAM ARGUMENT…")
    arguments = (str(Path(word).absolute()) if Path(word).is_file() else word for word in words[1:])
    return [find_program(words[0]), *arguments]

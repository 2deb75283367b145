"""Any program as an agent: it is told where the model is by variables, and what to do on stdin."""

import shlex
import shutil
from pathlib import Path

import msgspec

from rolltape.collect.agents.program import Launch, ProgramAgent, as_variables
from rolltape.collect.agents.protocol import Assignment, Connection
from rolltape.collect.environments.protocol import Opening
from rolltape.errors import AgentError
from rolltape.records.jsonable import encode_json


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What a program reads on stdin, as JSON."""

    rollout: str
    task: dict[str, object]
    messages: list[dict[str, object]]
    openai_base_url: str
    anthropic_base_url: str
    key: str
    model: str
    seed: int
    max_turns: int
    timeout_s: float
    allowed_tools: tuple[str, ...] | None
    denied_tools: tuple[str, ...]


def command_agent(text: str) -> ProgramAgent:
    """The agent `command:PROGRAM ARGUMENT…`, in a shell's quoting; no shell runs it."""
    command = absolute(text)

    def launch(assignment: Assignment, connection: Connection, opening: Opening) -> Launch:
        told = Told(
            rollout=assignment.rollout,
            task=dict(assignment.task),
            messages=opening.messages,
            openai_base_url=connection.openai_base_url,
            anthropic_base_url=connection.anthropic_base_url,
            key=connection.key,
            model=connection.model,
            seed=assignment.seed,
            max_turns=assignment.max_turns,
            timeout_s=assignment.timeout_s,
            allowed_tools=assignment.allowed_tools,
            denied_tools=assignment.denied_tools,
        )
        env = {**as_variables(connection), "ROLLTAPE_MODEL": connection.model, "ROLLTAPE_SEED": str(assignment.seed)}
        stdin = encode_json(msgspec.to_builtins(told), f"rollout {assignment.rollout}: the task")[0].decode()
        return Launch(command, env, stdin)

    return ProgramAgent(f"command:{text}", launch)


def absolute(text: str) -> list[str]:
    """The words of a command. It runs in a folder of its own, so words that name files here are made absolute."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise AgentError(f"agent command:{text}: {error}; quote it as for a shell") from None
    if not words:
        raise AgentError("agent command: names no program; write command:PROGRAM ARGUMENT…")
    return [program_at(words[0]), *(str(Path(word).absolute()) if Path(word).is_file() else word for word in words[1:])]


def program_at(name: str) -> str:
    """Where a program is, by its path or on PATH."""
    found = shutil.which(name)
    if found is None:
        where = f"there is no program {Path(name).absolute()}" if "/" in name else f"{name} is not on PATH"
        raise AgentError(f"{where}; install it, or give its path")
    return str(Path(found).absolute())

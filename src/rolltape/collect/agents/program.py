"""Agents that are programs: what one is told, and how its end is an outcome."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rolltape.collect.agents.keeping import Program, ProgramEnd, run_program
from rolltape.collect.agents.protocol import Assignment, Connection, Outcome
from rolltape.collect.agents.workspace import Workspace, remove
from rolltape.collect.environments.protocol import Ended, Message, Opening
from rolltape.errors import AgentError
from rolltape.records.messages import content_text
from rolltape.records.rollout import StopReason

GRACE_S = 5.0  # between SIGTERM and SIGKILL
MAX_LOG_BYTES = 10_000_000  # of each of stdout and stderr
# Nothing else of the collector's environment reaches a program: keys and tokens stay here.
_PASSED_ON = ("PATH", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TERM", "TZ", "SHELL", "USER", "LOGNAME")
_TEXT_BYTES = 256 * 1024  # of what it printed, the end


class Launch(NamedTuple):
    """How a kind of program is started on an assignment."""

    command: Sequence[str]
    env: Mapping[str, str]  # beside the few variables that every program gets
    stdin: str
    prepared: Mapping[str, str] = {}  # files for its home


class ProgramAgent:
    """Runs a program on each assignment, in a home and a working directory of its own."""

    def __init__(self, name: str, launch: Callable[[Assignment, Connection, Opening], Launch]) -> None:
        self.name = name
        self._launch = launch

    async def run(self, assignment: Assignment) -> Outcome:
        """Run it to its end. The folders that it leaves are the caller's to `discard`, unless this is cancelled."""
        episode = assignment.episode
        if len(episode.seats) != 1:
            return Outcome(ended={}, broken=f"agent {self.name} takes one seat, not {', '.join(episode.seats)}")
        (seat,) = episode.seats
        opening = episode.opening(seat)
        if opening.tools:
            names = ", ".join(tool.name for tool in opening.tools)
            return Outcome(ended={}, broken=f"agent {self.name} cannot call tools of an environment: {names}")
        try:
            workspace = await asyncio.to_thread(Workspace.make, assignment.scratch, opening.files)
        except (AgentError, OSError) as error:
            return Outcome(ended={}, broken=str(error))
        try:
            launch = self._launch(assignment, assignment.connections[seat], opening)
            program = await asyncio.to_thread(_program, launch, assignment, workspace)
            return _outcome(seat, await run_program(program), program, workspace)
        except BaseException:
            await asyncio.to_thread(remove, workspace.root)
            raise


def _program(launch: Launch, assignment: Assignment, workspace: Workspace) -> Program:
    assignment.logs.mkdir(parents=True, exist_ok=True)
    stdin = workspace.root / "stdin"
    stdin.write_bytes(launch.stdin.encode("utf-8", "replace"))
    for name, text in launch.prepared.items():
        path = workspace.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return Program(
        command=launch.command,
        env={**_passed_on(), "HOME": str(workspace.home), "TMPDIR": str(workspace.temporary), **launch.env},
        folder=workspace.work,
        stdin=stdin,
        stdout=assignment.logs / "stdout.txt",
        stderr=assignment.logs / "stderr.txt",
        attempt=assignment.rollout,
        timeout_s=assignment.timeout_s,
        max_log_bytes=MAX_LOG_BYTES,
        grace_s=GRACE_S,
    )


def _passed_on() -> dict[str, str]:
    return {name: os.environ[name] for name in _PASSED_ON if name in os.environ}


def _outcome(seat: str, end: ProgramEnd, program: Program, workspace: Workspace) -> Outcome:
    """What a program does to itself is an outcome to score, exit codes and signals too; what kept it from running is
    not."""
    if end.error is not None or end.survivors:
        why = end.error or f"processes {', '.join(map(str, end.survivors))} could not be ended"
        return Outcome(
            ended={},
            timed_out=end.timed_out,
            workspace=workspace.root,
            broken=f"{program.command[0]}: {why}",
        )
    ended = Ended(
        stop_reason=StopReason.TIMEOUT if end.timed_out else StopReason.COMPLETED,
        text=_printed(program.stdout),
        folder=workspace.work,
        exit_code=end.exit_code,
    )
    return Outcome(
        ended={seat: ended},
        exit_code=end.exit_code,
        signal=end.signal,
        timed_out=end.timed_out,
        left_out_bytes=end.left_out_bytes,
        workspace=workspace.root,
    )


def _printed(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - _TEXT_BYTES, 0))
        return file.read().decode("utf-8", "replace")


def as_prompt(messages: Sequence[Message]) -> str:
    """Messages as one text for a program that takes one; who said what is told where the model has spoken too."""
    texts = [(str(message.get("role")), content_text(message.get("content"))) for message in messages]
    if any(role == "assistant" for role, _ in texts):
        return "\n\n".join(f"{role}: {text}" for role, text in texts)
    return "\n\n".join(text for _, text in texts)


def as_variables(connection: Connection) -> dict[str, str]:
    """A connection as the clients of both providers look for it."""
    return {
        "OPENAI_BASE_URL": connection.openai_base_url,
        "OPENAI_API_KEY": connection.key,
        "OPENAI_MODEL": connection.model,
        "ANTHROPIC_BASE_URL": connection.anthropic_base_url,
        "ANTHROPIC_API_KEY": connection.key,
        "ANTHROPIC_MODEL": connection.model,
    }

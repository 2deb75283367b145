"""Agents that are programs: start one, run it to its end or its time limit, and turn its end into an outcome."""

import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rolltape.collect.agents.protocol import AgentOutcome, Assignment, describe_own_loop
from rolltape.collect.environments.protocol import Connection, Ended, Message, Opening, check_opening, drives
from rolltape.collect.functions import call_environment
from rolltape.collect.sandboxes.checks import WorkspaceChecks
from rolltape.collect.sandboxes.protocol import ProgramEnd, ProgramJob, Sandbox
from rolltape.collect.sandboxes.running import ATTEMPT_VARIABLE, read_end_of, run_program
from rolltape.collect.sandboxes.workspace import Workspace, remove
from rolltape.errors import AgentError, CollectError
from rolltape.records.jsonable import decode_json
from rolltape.records.messages import content_text
from rolltape.records.rollout import StopReason
from rolltape.tape.rundir import make_private_file, make_private_folder

_LOGS = ("stdout.txt", "stderr.txt")
_LINE_BYTES = 500
_TEXT_BYTES = 256 * 1024  # of the end of its output


class ProgramLaunch(NamedTuple):
    """How a kind of program is started on an assignment."""

    command: Sequence[str]
    env: Mapping[str, str]  # added to the few variables that every program gets
    stdin: str
    home_files: Mapping[str, str] = {}


class ProgramAgent:
    """Runs a program on each assignment, in a home and a working directory of its own."""

    def __init__(self, name: str, launch: Callable[[Assignment, Connection, Opening], ProgramLaunch]) -> None:
        self.name = name
        self._launch = launch

    def preview(self, assignment: Assignment) -> dict[str, Any]:
        """The program's command, variables and stdin, and the files in its home and its working directory."""
        (seat, *_) = assignment.episode.seats
        opening = check_opening(assignment.episode.opening(seat))
        launch = self._launch(assignment, assignment.connections[seat], opening)
        try:
            stdin: Any = decode_json(launch.stdin.encode())
        except ValueError:
            stdin = launch.stdin
        files = {**dict(launch.home_files), **dict(opening.files)}
        shown = {"command": list(launch.command), "env": dict(launch.env), "stdin": stdin, "files": files}
        return {name: value for name, value in shown.items() if value}

    async def run(self, assignment: Assignment) -> AgentOutcome:
        """Run the program to its end. The caller must `discard` its folders, unless this is cancelled."""
        episode = assignment.episode
        if drives(episode):
            return AgentOutcome(ended={}, broken=describe_own_loop(self.name, assignment))
        if len(episode.seats) != 1:
            return AgentOutcome(ended={}, broken=f"agent {self.name} takes one seat, not {', '.join(episode.seats)}")
        (seat,) = episode.seats
        opening = check_opening(await call_environment(assignment.environment, episode.opening, seat))
        if opening.tools:
            names = ", ".join(tool.name for tool in opening.tools)
            return AgentOutcome(ended={}, broken=f"agent {self.name} cannot call tools of an environment: {names}")
        try:
            async with AsyncExitStack() as stack:
                workspace = await asyncio.to_thread(Workspace.make, assignment.scratch, opening.files)
                stack.push_async_callback(asyncio.to_thread, remove, workspace.root)
                opened = assignment.sandboxes.open(workspace, assignment.task.get("sandbox"))
                sandbox = await stack.enter_async_context(opened)
                launch = self._launch(assignment, _connection_inside(sandbox, assignment.connections[seat]), opening)
                job = await asyncio.to_thread(_prepare, launch, assignment, workspace)
                end = await run_program(
                    sandbox, job, workspace, attempt=assignment.rollout, timeout_s=assignment.timeout_s
                )
                checks = WorkspaceChecks(assignment.sandboxes, sandbox, workspace)
                return _build_outcome(seat, end, job, checks, stack.pop_all())
        except (AgentError, CollectError, OSError) as error:
            return AgentOutcome(ended={}, broken=str(error))


def _connection_inside(sandbox: Sandbox, connection: Connection) -> Connection:
    urls = {sdk: sandbox.reachable(url) for sdk, url in connection.base_urls.items()}
    return msgspec.structs.replace(connection, base_urls=urls)


def _prepare(launch: ProgramLaunch, assignment: Assignment, workspace: Workspace) -> ProgramJob:
    make_private_folder(assignment.logs)
    for name in _LOGS:
        make_private_file(assignment.logs / name)
    stdin = workspace.root / "stdin"
    stdin.write_bytes(launch.stdin.encode("utf-8", "replace"))
    for name, text in launch.home_files.items():
        path = workspace.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return ProgramJob(
        command=tuple(launch.command),
        env={**launch.env, ATTEMPT_VARIABLE: assignment.rollout},
        stdin=stdin,
        stdout=assignment.logs / _LOGS[0],
        stderr=assignment.logs / _LOGS[1],
    )


def _build_outcome(
    seat: str, end: ProgramEnd, job: ProgramJob, checks: WorkspaceChecks, held: AsyncExitStack
) -> AgentOutcome:
    """An exit code or signal of the program itself is an outcome to score. A program that could not run is broken."""
    if end.error is not None or end.survivors:
        why = end.error or f"processes {', '.join(map(str, end.survivors))} could not be ended"
        return AgentOutcome(ended={}, timed_out=end.timed_out, held=held, broken=f"{job.command[0]}: {why}")
    ended = Ended(
        stop_reason=StopReason.TIMEOUT if end.timed_out else StopReason.COMPLETED,
        text=read_end_of(job.stdout, _TEXT_BYTES),
        folder=checks.folder,
        checks=checks,
        exit_code=end.exit_code,
    )
    return AgentOutcome(
        ended={seat: ended},
        exit_code=end.exit_code,
        signal=end.signal,
        timed_out=end.timed_out,
        left_out_bytes=end.left_out_bytes,
        held=held,
        last_error=_last_line(read_end_of(job.stderr, _LINE_BYTES)),
    )


def _last_line(text: str) -> str | None:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), None)


async def discard(outcome: AgentOutcome) -> None:
    """Remove the sandbox and the temporary folders of a program, if there are any."""
    if outcome.held is not None:
        await outcome.held.aclose()


def find_program(name: str, *, in_image: bool = False) -> str:
    """The absolute path of a program, from its path or from PATH. A program in an image is looked up there later."""
    if in_image and not ("/" in name and Path(name).is_file()):
        return name
    found = shutil.which(name)
    if found is None:
        path = Path(name).absolute()
        if "/" in name and path.is_file():
            raise AgentError(f"{path} is not executable; chmod +x it, or name its interpreter before it")
        where = f"there is no program {path}" if "/" in name else f"{name} is not on PATH"
        raise AgentError(f"{where}; install it, or give its path")
    return str(Path(found).absolute())


def render_prompt(messages: Sequence[Message]) -> str:
    """Messages as one text, for a program that takes one. Roles are named if there are assistant messages."""
    texts = [(str(message.get("role")), content_text(message.get("content"))) for message in messages]
    if any(role == "assistant" for role, _ in texts):
        return "\n\n".join(f"{role}: {text}" for role, text in texts)
    return "\n\n".join(text for _, text in texts)

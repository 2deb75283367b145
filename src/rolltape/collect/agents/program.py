"""Agents that are programs: how one is started, run to its end or its time limit, and how its end is an outcome."""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from rolltape.collect.agents import supervisor
from rolltape.collect.agents.protocol import AgentOutcome, Assignment, Connection
from rolltape.collect.agents.workspace import Workspace, remove
from rolltape.collect.environments.protocol import Ended, Message, Opening
from rolltape.errors import AgentError
from rolltape.records.messages import content_text
from rolltape.records.rollout import StopReason
from rolltape.tape.rundir import make_private_file, make_private_folder

ATTEMPT_VARIABLE = "ROLLTAPE_ATTEMPT"  # names the attempt of a process; all that a program starts inherits it
GRACE_S = 5.0  # between SIGTERM and SIGKILL
_LOGS = ("stdout.txt", "stderr.txt")
MAX_LOG_BYTES = 10_000_000  # of each of stdout and stderr
# Nothing else of the collector's environment reaches a program: keys and tokens stay here.
_INHERITED = ("PATH", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TERM", "TZ", "SHELL", "USER", "LOGNAME")
_TEXT_BYTES = 256 * 1024  # of what it printed, the end
_SUPERVISOR_S = 15.0  # for a supervisor to end, beyond the grace time


class ProgramLaunch(NamedTuple):
    """How a kind of program is started on an assignment."""

    command: Sequence[str]
    env: Mapping[str, str]  # beside the few variables that every program gets
    stdin: str
    home_files: Mapping[str, str] = {}


class ProgramEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a program ended. None of its processes runs any more."""

    exit_code: int | None = None
    signal: int | None = None
    left_out_bytes: int = 0
    survivors: tuple[int, ...] = ()  # processes that not even SIGKILL ended
    error: str | None = None  # why it could not be run
    timed_out: bool = False


class ProgramAgent:
    """Runs a program on each assignment, in a home and a working directory of its own."""

    def __init__(self, name: str, launch: Callable[[Assignment, Connection, Opening], ProgramLaunch]) -> None:
        self.name = name
        self._launch = launch

    async def run(self, assignment: Assignment) -> AgentOutcome:
        """Run the program to its end. The caller must `discard` its folders, unless this is cancelled."""
        episode = assignment.episode
        if len(episode.seats) != 1:
            return AgentOutcome(ended={}, broken=f"agent {self.name} takes one seat, not {', '.join(episode.seats)}")
        (seat,) = episode.seats
        opening = episode.opening(seat)
        if opening.tools:
            names = ", ".join(tool.name for tool in opening.tools)
            return AgentOutcome(ended={}, broken=f"agent {self.name} cannot call tools of an environment: {names}")
        try:
            workspace = await asyncio.to_thread(Workspace.make, assignment.scratch, opening.files)
        except (AgentError, OSError) as error:
            return AgentOutcome(ended={}, broken=str(error))
        try:
            launch = self._launch(assignment, assignment.connections[seat], opening)
            order = await asyncio.to_thread(_prepare, launch, assignment, workspace)
            end = await run_program(order, assignment.rollout, assignment.timeout_s)
            return _build_outcome(seat, end, order, workspace)
        except BaseException:
            await asyncio.to_thread(remove, workspace.root)
            raise


def _prepare(launch: ProgramLaunch, assignment: Assignment, workspace: Workspace) -> supervisor.Order:
    make_private_folder(assignment.logs)
    for name in _LOGS:
        make_private_file(assignment.logs / name)
    stdin = workspace.root / "stdin"
    stdin.write_bytes(launch.stdin.encode("utf-8", "replace"))
    for name, text in launch.home_files.items():
        path = workspace.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    own = {"HOME": str(workspace.home), "TMPDIR": str(workspace.temporary)}
    return supervisor.Order(
        command=list(launch.command),
        env={**_inherited_variables(), **own, **launch.env, ATTEMPT_VARIABLE: assignment.rollout},
        cwd=str(workspace.work),
        stdin=str(stdin),
        stdout=str(assignment.logs / _LOGS[0]),
        stderr=str(assignment.logs / _LOGS[1]),
        max_log_bytes=MAX_LOG_BYTES,
        grace_s=GRACE_S,
    )


def _inherited_variables() -> dict[str, str]:
    return {name: os.environ[name] for name in _INHERITED if name in os.environ}


async def run_program(order: supervisor.Order, attempt: str, timeout_s: float) -> ProgramEnd:
    """Run a program under a supervisor process, to its end or its time limit.

    If this is cancelled, it returns once all that was started has ended.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-X", "utf8", supervisor.__file__),
        stdin=PIPE,
        stdout=PIPE,
        stderr=DEVNULL,
        env={"PATH": os.environ.get("PATH", os.defpath)},
        start_new_session=True,
    )
    assert process.stdin is not None
    ended = asyncio.ensure_future(_read_end(process))
    timed_out = False
    try:
        with contextlib.suppress(ConnectionError):
            process.stdin.write(msgspec.json.encode(order._asdict()) + b"\n")
            await process.stdin.drain()
        timed_out = not (await asyncio.wait({ended}, timeout=timeout_s))[0]
    finally:
        # Without its lifeline the supervisor ends everything, even if a second cancel keeps us from waiting for it.
        process.stdin.close()
        await asyncio.wait({ended}, timeout=order.grace_s + _SUPERVISOR_S)
    end = ended.result() if ended.done() else None
    if end is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        for pid in attempt_processes(attempt):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        return ProgramEnd(error="the process that supervised it was killed, or did not end", timed_out=timed_out)
    return msgspec.structs.replace(end, timed_out=timed_out)


async def _read_end(process: Process) -> ProgramEnd | None:
    """What the supervisor reports; None if it died before it could."""
    assert process.stdout is not None
    reported = await process.stdout.read()
    await process.wait()
    try:
        return msgspec.json.decode(reported, type=ProgramEnd)
    except msgspec.DecodeError:
        return None


def attempt_processes(attempt: str) -> list[int]:
    """The processes of an attempt, by the variable that they inherited, where the system lists processes."""
    mark = f"{ATTEMPT_VARIABLE}={attempt}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def _build_outcome(seat: str, end: ProgramEnd, order: supervisor.Order, workspace: Workspace) -> AgentOutcome:
    """An exit code or signal of the program's own is an outcome to score. A program that could not run is broken."""
    if end.error is not None or end.survivors:
        why = end.error or f"processes {', '.join(map(str, end.survivors))} could not be ended"
        return AgentOutcome(
            ended={},
            timed_out=end.timed_out,
            workspace=workspace.root,
            broken=f"{order.command[0]}: {why}",
        )
    ended = Ended(
        stop_reason=StopReason.TIMEOUT if end.timed_out else StopReason.COMPLETED,
        text=_read_printed(Path(order.stdout)),
        folder=workspace.work,
        exit_code=end.exit_code,
    )
    return AgentOutcome(
        ended={seat: ended},
        exit_code=end.exit_code,
        signal=end.signal,
        timed_out=end.timed_out,
        left_out_bytes=end.left_out_bytes,
        workspace=workspace.root,
    )


def _read_printed(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - _TEXT_BYTES, 0))
        return file.read().decode("utf-8", "replace")


def find_program(name: str) -> str:
    """The absolute path of a program, given by its path or found on PATH."""
    found = shutil.which(name)
    if found is None:
        where = f"there is no program {Path(name).absolute()}" if "/" in name else f"{name} is not on PATH"
        raise AgentError(f"{where}; install it, or give its path")
    return str(Path(found).absolute())


def render_prompt(messages: Sequence[Message]) -> str:
    """Messages as one text, for a program that takes one. Roles are named where the assistant has spoken too."""
    texts = [(str(message.get("role")), content_text(message.get("content"))) for message in messages]
    if any(role == "assistant" for role, _ in texts):
        return "\n\n".join(f"{role}: {text}" for role, text in texts)
    return "\n\n".join(text for _, text in texts)

"""Runs one program in a sandbox, under a supervisor process, to its end or its time limit."""

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import msgspec

from rolltape.collect.sandboxes.protocol import (
    ConfinedRun,
    Confinement,
    ProgramEnd,
    ProgramJob,
    Sandbox,
)
from rolltape.collect.sandboxes.scripts import supervisor
from rolltape.collect.sandboxes.workspace import Workspace
from rolltape.errors import CollectError

ATTEMPT_VARIABLE = "ROLLTAPE_ATTEMPT"  # names the attempt of a process; child processes inherit it
GRACE_S = 5.0  # between SIGTERM and SIGKILL
MAX_LOG_BYTES = 10_000_000  # of each of stdout and stderr
# Programs get these variables and those of --pass-env, but not the collector's keys and tokens.
_INHERITED = ("PATH", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TERM", "TZ", "SHELL", "USER", "LOGNAME")
_SUPERVISOR_S = 15.0  # how long a supervisor may take to end, after the grace time
_CONTAINER_S = 90.0  # the same if it must stop a container on a busy machine
_BEGIN_S = 600.0  # how long making a sandbox may take


class HostSandbox:
    """A sandbox whose programs see the system of this machine. One object serves all attempts."""

    has_image = False
    folder_inside = None

    @property
    def for_functions(self) -> Self:
        return self

    @asynccontextmanager
    async def open(self, workspace: Workspace, wanted: object = None, *, again: bool = False) -> AsyncIterator[Self]:
        refuse_image(wanted)
        yield self


class Unconfined(HostSandbox):
    """No sandbox: programs run as the collector's user, with all rights of that user."""

    def __init__(self, passed: tuple[str, ...] = (), reason: str = "none was asked for") -> None:
        self.confinement = Confinement(
            "none",
            f"no sandbox ({reason}): agents run as the collector's own user, and nothing keeps them from reading this "
            "run, other attempts and the collector's environment, or from rewarding themselves",
        )
        self._passed = passed  # variables of the collector's environment that programs get

    def reachable(self, url: str) -> str:
        return url

    @asynccontextmanager
    async def enter(self, job: ProgramJob, workspace: Workspace) -> AsyncIterator[ConfinedRun]:
        folders = {"HOME": str(workspace.home), "TMPDIR": str(workspace.temporary)}
        yield ConfinedRun(make_order(job, job.command, folders, workspace, self._passed))


def refuse_image(wanted: object) -> None:
    """Raise CollectError for a task with an image, if there are no containers."""
    if isinstance(wanted, Mapping) and (wanted.get("image") or wanted.get("build")):
        raise CollectError("its sandbox names an image; collect with --sandbox podman or --sandbox docker")


def make_order(
    job: ProgramJob, command: Sequence[str], own: Mapping[str, str], workspace: Workspace, passed: Sequence[str]
) -> supervisor.Order:
    """The supervisor's order for a job. `own` are variables that the sandbox sets, `passed` names the collector's."""
    return supervisor.Order(
        command=list(command),
        env={**inherited_variables(), **own, **collector_variables(passed), **job.env},
        cwd=str(workspace.work),
        stdin=str(job.stdin),
        stdout=str(job.stdout),
        stderr=str(job.stderr),
    )


def inherited_variables() -> dict[str, str]:
    """The variables of the collector's environment that every program gets."""
    return collector_variables(_INHERITED)


def collector_variables(names: Iterable[str]) -> dict[str, str]:
    """The collector's values of these environment variables, without missing ones."""
    return {name: os.environ[name] for name in names if name in os.environ}


async def run_program(
    sandbox: Sandbox, job: ProgramJob, workspace: Workspace, *, attempt: str, timeout_s: float
) -> ProgramEnd:
    """Run a program to its end or its time limit. If this is cancelled, it returns when all its processes have ended.

    `attempt` is the value of ATTEMPT_VARIABLE in the job's environment.
    """
    async with sandbox.enter(job, workspace) as confined:
        return confined.correct(await supervise(confined, attempt, timeout_s))


async def supervise(confined: ConfinedRun, attempt: str, timeout_s: float | None) -> ProgramEnd:
    """Run a program under a supervisor, to its end or its time limit."""
    order = confined.order._replace(max_log_bytes=MAX_LOG_BYTES, grace_s=GRACE_S)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-X", "utf8", supervisor.__file__),
        stdin=PIPE,
        stdout=PIPE,
        stderr=DEVNULL,
        env={"PATH": os.environ.get("PATH", os.defpath)},
        pass_fds=order.descriptors,
        start_new_session=True,
    )
    assert process.stdin is not None
    ended = asyncio.ensure_future(_read_end(process))
    beginning = asyncio.ensure_future(confined.begin())
    timed_out = False
    try:
        with contextlib.suppress(ConnectionError):
            process.stdin.write(msgspec.json.encode(order._asdict()) + b"\n")
            await process.stdin.drain()
        await asyncio.wait({ended, beginning}, timeout=_BEGIN_S, return_when=asyncio.FIRST_COMPLETED)
        if beginning.done() and not beginning.exception():
            timed_out = not (await asyncio.wait({ended}, timeout=timeout_s))[0]
    finally:
        beginning.cancel()
        # Without its lifeline the supervisor ends everything, even if a second cancel ends the wait for it.
        if not process.stdin.is_closing():
            process.stdin.write(supervisor.END)
        process.stdin.close()
        await asyncio.wait({ended}, timeout=order.grace_s + (_CONTAINER_S if order.remove else _SUPERVISOR_S))
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
    """The supervisor's report, or None if it died first."""
    assert process.stdout is not None
    reported = await process.stdout.read()
    await process.wait()
    try:
        return msgspec.json.decode(reported, type=ProgramEnd)
    except msgspec.DecodeError:
        return None


def attempt_processes(attempt: str) -> list[int]:
    """The processes of an attempt, by the variable that they inherited, if the system has /proc."""
    mark = f"{ATTEMPT_VARIABLE}={attempt}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def read_end_of(path: Path, max_bytes: int) -> str:
    """The end of a text file."""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - max_bytes, 0))
        return file.read().decode("utf-8", "replace")

"""Running a program under a keeper, from the collector's side: its time limit, and how it ended."""

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from rolltape.collect.agents import supervisor

ATTEMPT_VARIABLE = "ROLLTAPE_ATTEMPT"  # whose process it is; all that a program starts inherits it
_KEEPER_S = 15.0  # that a keeper may take beyond the grace time


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """What is run, and where."""

    command: Sequence[str]
    env: Mapping[str, str]  # all of it
    folder: Path
    stdin: Path
    stdout: Path
    stderr: Path
    attempt: str
    timeout_s: float
    max_log_bytes: int  # of each of stdout and stderr
    grace_s: float  # between SIGTERM and SIGKILL

    @property
    def order(self) -> bytes:
        order = supervisor.Order(
            command=list(self.command),
            env={**self.env, ATTEMPT_VARIABLE: self.attempt},
            cwd=str(self.folder),
            stdin=str(self.stdin),
            stdout=str(self.stdout),
            stderr=str(self.stderr),
            max_log_bytes=self.max_log_bytes,
            grace_s=self.grace_s,
        )
        return msgspec.json.encode(order._asdict()) + b"\n"


class ProgramEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a program ended; nothing of it runs any more."""

    exit_code: int | None = None
    signal: int | None = None
    left_out_bytes: int = 0
    survivors: tuple[int, ...] = ()  # processes that not even SIGKILL ended
    error: str | None = None  # why it could not be run
    timed_out: bool = False


async def run_program(program: Program) -> ProgramEnd:
    """Run it to its end, or to its time limit. Cancelled, it returns once all that was started has ended."""
    kept = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-X", "utf8", supervisor.__file__),
        stdin=PIPE,
        stdout=PIPE,
        stderr=DEVNULL,
        env={"PATH": os.environ.get("PATH", os.defpath)},
        start_new_session=True,
    )
    assert kept.stdin is not None
    ended = asyncio.ensure_future(_ended(kept))
    timed_out = False
    try:
        with contextlib.suppress(ConnectionError):
            kept.stdin.write(program.order)
            await kept.stdin.drain()
        timed_out = not (await asyncio.wait({ended}, timeout=program.timeout_s))[0]
    finally:
        # Without its lifeline the keeper ends everything, even if a second cancel keeps us from waiting for it.
        kept.stdin.close()
        await asyncio.wait({ended}, timeout=program.grace_s + _KEEPER_S)
    said = ended.result() if ended.done() else None
    if said is None:
        with contextlib.suppress(ProcessLookupError):
            kept.kill()
        kill_marked(program.attempt)
        return ProgramEnd(error="the process that kept it was killed, or did not end", timed_out=timed_out)
    return msgspec.structs.replace(said, timed_out=timed_out)


async def _ended(kept: Process) -> ProgramEnd | None:
    """What the keeper says; None: it died before it could."""
    assert kept.stdout is not None
    said = await kept.stdout.read()
    await kept.wait()
    try:
        return msgspec.json.decode(said, type=ProgramEnd)
    except msgspec.DecodeError:
        return None


def kill_marked(attempt: str) -> None:
    """End what is left of an attempt whose keeper is gone, by the variable that its processes inherited."""
    for pid in marked(attempt):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def marked(attempt: str) -> list[int]:
    """The processes of an attempt, where the system lists them."""
    mark = f"{ATTEMPT_VARIABLE}={attempt}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found

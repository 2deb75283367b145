"""Containers of attempts beside `podman run` alone: 32 at once, started, run and removed."""

import asyncio
import contextlib
import socket
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure
from rolltape.collect.sandboxes import ContainerOwner, ContainerSettings, Sandboxes, SandboxKind, open_sandbox
from rolltape.collect.sandboxes.protocol import ProgramJob
from rolltape.collect.sandboxes.running import run_program
from rolltape.collect.sandboxes.workspace import Workspace

_AT_ONCE = 32
_TIMES = 3
_LIMIT_S = 600.0


def figures() -> Iterable[Figure]:
    """Wall time for each container; the least of several rounds in turn, since other processes share the machine."""
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    from podman import needs_podman  # type: ignore[import-not-found, unused-ignore]

    image = needs_podman()
    plain, started, checked = asyncio.run(_measure(image))
    yield Figure(f"podman run, {_AT_ONCE} at once", 1e3 * plain, "ms", note="for each: made, run to its end, removed")
    note = "the same with limits, mounts, a supervisor, and the gateway listening inside"
    yield Figure("the container of an attempt", 1e3 * started, "ms", note=note)
    yield Figure("the container of an attempt / podman run", started / plain, "×", 2)
    yield Figure(
        "with a check in it / podman run", checked / plain, "×", 4, note="it is started once more for the check"
    )


async def _measure(image: str) -> tuple[float, float, float]:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        sandboxes = await open_sandbox(
            SandboxKind.PODMAN,
            _Gateway(),
            scratch=place,
            owner=ContainerOwner(place / "run", "benchmark"),
            container=ContainerSettings(image=image, memory="256m", cpus=1),
        )
        rounds = [
            [
                await _time(lambda: _run_plain(image)),
                await _time(lambda: _attempt(sandboxes, place, checks=0)),
                await _time(lambda: _attempt(sandboxes, place, checks=1)),
            ]
            for _ in range(_TIMES)
        ]
    plain, started, checked = map(min, zip(*rounds, strict=True))
    return plain, started, checked


async def _time(work: Callable[[], Coroutine[Any, Any, None]]) -> float:
    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(_AT_ONCE)))
    return (time.perf_counter() - began) / _AT_ONCE


async def _run_plain(image: str) -> None:
    command = ("podman", "run", "--rm", "--init", "--network=none", image, "/bin/true")
    process = await asyncio.create_subprocess_exec(*command, stdout=DEVNULL)
    assert await process.wait() == 0


async def _attempt(sandboxes: Sandboxes, place: Path, checks: int) -> None:
    workspace = Workspace.make(place, {})
    async with sandboxes.open(workspace) as sandbox:
        for number in range(1 + checks):
            job = ProgramJob.at(workspace.root, ["/bin/true"], env={}, is_agent=not number)
            end = await run_program(sandbox, job, workspace, attempt="", timeout_s=_LIMIT_S)
            assert (end.exit_code, end.error) == (0, None), end


class _Gateway:
    """A gateway that accepts nothing."""

    url = "http://127.0.0.1:8123"

    @contextlib.asynccontextmanager
    async def listening_on(self, listener: socket.socket) -> AsyncIterator[None]:
        with listener:
            yield

"""The sandbox `bwrap`: bubblewrap makes separate namespaces, mounts and a user for each program.

A program sees its working directory, a home, a read-only system, temporary files in memory and its own processes. It
runs as an ordinary user without capabilities, even if the collector is root. Its network has one listener, for the
gateway; the collector accepts the connections.
"""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec

from rolltape.collect.sandboxes.protocol import (
    HOME,
    WORK,
    ConfinedRun,
    Confinement,
    ListeningGateway,
    ProgramEnd,
    ProgramJob,
    SandboxNetwork,
    port_inside,
    url_inside,
)
from rolltape.collect.sandboxes.running import HostSandbox, make_order, read_end_of
from rolltape.collect.sandboxes.scripts import first_process
from rolltape.collect.sandboxes.scripts.supervisor import Order
from rolltape.collect.sandboxes.visible import Mount, base_python, install_mounts, system_mounts, with_parents
from rolltape.collect.sandboxes.workspace import Workspace, walk

USER = 1000  # inside; outside too if the collector is root, otherwise the collector's own
_FIRST_PROCESS = "/run/rolltape/first_process.py"
_IN_MEMORY = {"/tmp": 2**30, "/dev/shm": 2**28}  # sizes in bytes
_ETC = {
    "passwd": f"root:x:0:0::/root:/bin/sh\nagent:x:{USER}:{USER}::{HOME}:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n",
    "group": f"root:x:0:\nagent:x:{USER}:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
_LONGEST_REPORT = 4096  # bytes
_SIGNALED = 128  # bwrap's exit code for a signal is this plus its number
_ISOLATED = ("--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try", "--hostname", "sandbox")
_NEEDED_TO_CHANGE_USER = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")


class BubblewrapSettings(NamedTuple):
    """What all programs of a collection have in common."""

    program: str  # bwrap
    etc: Path  # a folder for a sandbox's own files of /etc
    hidden: tuple[str, ...]  # folders that no program sees
    network: SandboxNetwork = SandboxNetwork.GATEWAY
    reads: tuple[str, ...] = ()  # more paths that programs may read
    passed: tuple[str, ...] = ()  # variables of the collector's environment that programs get
    becomes_user: bool = False  # the collector is root: mounts are made as root, and the user changes inside


class Bubblewrap(HostSandbox):
    """Runs programs with bwrap, each in its own sandbox."""

    def __init__(self, settings: BubblewrapSettings, gateway: ListeningGateway | None) -> None:
        self._settings = settings
        says = f"sandbox bwrap: agents see their workspace and a read-only system, and {settings.network.reach}"
        self.confinement = Confinement("bwrap", says)
        self._gateway = gateway
        settings.etc.mkdir(parents=True, exist_ok=True)
        for name, text in _ETC.items():
            path = settings.etc / name
            path.write_text(text)
            path.chmod(0o644)

    def reachable(self, url: str) -> str:
        return url if self._settings.network is SandboxNetwork.HOST else url_inside(url, self._gateway)

    @asynccontextmanager
    async def enter(self, job: ProgramJob, workspace: Workspace) -> AsyncIterator[ConfinedRun]:
        if self._settings.becomes_user:
            await asyncio.to_thread(_give_away, workspace)
        port = port_inside(self._gateway) if job.is_agent and self._settings.network.has_listener else 0
        with _Channel() as channel:
            serving = asyncio.ensure_future(self._serve(channel) if port else asyncio.sleep(0))
            try:
                order = self._order(job, workspace, channel.theirs.fileno(), port)
                yield ConfinedRun(order, lambda end: channel.correct(end, job.stderr, _failure(serving)))
            finally:
                serving.cancel()
                await asyncio.wait({serving})

    def _order(self, job: ProgramJob, workspace: Workspace, channel: int, port: int) -> Order:
        user = USER if self._settings.becomes_user else 0
        python = base_python()
        command = [
            *self._arguments(job, workspace, python),
            *("--", python, "-I", "-S", _FIRST_PROCESS, str(channel), str(user), str(port)),
            *job.command,
        ]
        shell = "/bin/bash" if Path("/bin/bash").exists() else "/bin/sh"
        own = {"USER": "agent", "LOGNAME": "agent", "SHELL": shell, "HOME": HOME, "TMPDIR": "/tmp"}
        order = make_order(job, command, own, workspace, self._settings.passed)
        return order._replace(is_sandbox=True, descriptors=[channel])

    def _arguments(self, job: ProgramJob, workspace: Workspace, python: str) -> list[str]:
        settings = self._settings
        on_host_network = settings.network is SandboxNetwork.HOST
        search = os.environ.get("PATH", os.defpath)
        programs = (job.command[0], *job.programs)
        reads = (*settings.reads, *map(str, job.reads))
        own_etc = [name for name in _ETC if name in ("passwd", "group") or not on_host_network]
        mounts = [
            *system_mounts(network=on_host_network),
            *(("--ro-bind", str(settings.etc / name), f"/etc/{name}") for name in own_etc),
            *(("--proc", "/proc"), ("--dev", "/dev"), *starmap(_in_memory, _IN_MEMORY.items())),
            ("--symlink", "/tmp", "/var/tmp"),
            *install_mounts((python, *job.command), search, programs=programs, reads=reads, hidden=settings.hidden),
            ("--ro-bind", first_process.__file__, _FIRST_PROCESS),
            *(("--bind", str(workspace.home), HOME), ("--bind", str(workspace.work), WORK)),
        ]
        return [
            *(settings.program, "--die-with-parent", "--new-session", "--as-pid-1", *_ISOLATED),
            *(() if on_host_network else ("--unshare-net",)),
            *_identity(settings.becomes_user),
            *with_parents(mounts),
            *("--remount-ro", "/", "--chdir", WORK),
        ]

    async def _serve(self, channel: "_Channel") -> None:
        """Have the gateway accept connections of the sandbox's listener, once that has arrived."""
        assert self._gateway is not None
        listener = await channel.receive_listener()
        if listener is not None:
            async with self._gateway.listening_on(listener):
                await asyncio.Event().wait()


class _Channel:
    """The socket for reports of a sandbox's first process: its listener, an error, and how the program ended."""

    def __init__(self) -> None:
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        self._reports: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ours.close()
        self.theirs.close()

    async def receive_listener(self) -> socket.socket | None:
        """Wait for the first report; None if it is not the listener."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._ours.fileno(), arrived.set)
        try:
            await arrived.wait()
        finally:
            loop.remove_reader(self._ours.fileno())
        return self._receive()

    def _receive(self) -> socket.socket | None:
        report, descriptors, _, _ = socket.recv_fds(self._ours, _LONGEST_REPORT, 1)
        self._reports |= json.loads(report)
        return socket.socket(fileno=descriptors[0]) if descriptors else None

    def correct(self, end: ProgramEnd, errors: Path, failure: str | None) -> ProgramEnd:
        """How the program itself ended, after all its processes. Without a report the sandbox has failed."""
        with suppress(BlockingIOError):
            while True:
                if (listener := self._receive()) is not None:
                    listener.close()
        if end.error is not None:
            return end
        exit_code, number, error = end.exit_code, end.signal, self._reports.get("error", failure)
        if "status" in self._reports:
            code = os.waitstatus_to_exitcode(self._reports["status"])
            exit_code, number = (code, None) if code >= 0 else (None, -code)
        elif number is None and (exit_code or 0) > _SIGNALED:  # the first process was killed with the rest
            exit_code, number = None, (exit_code or 0) - _SIGNALED
        elif number is None and error is None:
            error = f"the sandbox could not be made: {read_end_of(errors, _LONGEST_REPORT).strip() or exit_code}"
        return msgspec.structs.replace(end, exit_code=exit_code, signal=number, error=error)


def _failure(serving: "asyncio.Future[None]") -> str | None:
    """Why the gateway did not accept connections although the program ran."""
    error = serving.exception() if serving.done() and not serving.cancelled() else None
    return None if error is None else f"the gateway could not be reached from the sandbox: {error}"


def _identity(becomes_user: bool) -> tuple[str, ...]:
    if becomes_user:
        return ("--cap-drop", "ALL", *(word for name in _NEEDED_TO_CHANGE_USER for word in ("--cap-add", name)))
    return ("--unshare-user", "--uid", str(USER), "--gid", str(USER), "--cap-drop", "ALL")


def _in_memory(path: str, size: int) -> Mount:
    return ("--perms", "1777", "--size", str(size), "--tmpfs", path)


def _give_away(workspace: Workspace) -> None:
    """Give folders that still belong to root to the user inside."""
    for folder in (workspace.home, workspace.work):
        if folder.stat().st_uid != USER:
            for path in (folder, *walk(folder)):
                os.chown(path, USER, USER, follow_symlinks=False)

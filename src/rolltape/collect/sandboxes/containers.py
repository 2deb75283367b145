"""The sandboxes `podman` and `docker`: one container for each attempt, for its agent and then for its checks.

A container is made when its agent starts, and removed when the attempt has been scored. Its first command is a shell,
which runs a script of the collector: once for the agent, and again for each check. In between the container is
stopped, so no process of the agent is left when a check begins, but its files stay.

The container has no network. Instead a thread of the collector enters the container's network namespace and opens a
listener on 127.0.0.1 there, and the collector accepts its connections. So no relay runs inside that an agent could
stop, and nothing else of this machine can be reached.
"""

import asyncio
import ctypes
import logging
import os
import secrets
import shlex
import shutil
import socket
import tarfile
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import msgspec

from rolltape.collect.sandboxes.container_program import ContainerProgram
from rolltape.collect.sandboxes.container_settings import ContainerSettings
from rolltape.collect.sandboxes.protocol import (
    HOME,
    WORK,
    ConfinedRun,
    Confinement,
    ListeningGateway,
    ProgramEnd,
    ProgramJob,
    Sandboxes,
    SandboxNetwork,
    port_inside,
    url_inside,
)
from rolltape.collect.sandboxes.running import GRACE_S, collector_variables, read_end_of
from rolltape.collect.sandboxes.scripts.supervisor import Order
from rolltape.collect.sandboxes.visible import is_of_system
from rolltape.collect.sandboxes.workspace import Workspace, only_inside, remove, walk
from rolltape.errors import CollectError

log = logging.getLogger("rolltape.collect")

LOGS = "/logs"  # where a container sees the folder of logs
_CONTROL = PurePosixPath("/run/rolltape")
_CLONE_NEWNET = 0x40000000  # of linux/sched.h
_MAX_FETCHED_BYTES = 2**30
_ERROR_BYTES = 2000
_REMOVAL_WAITS_S = (0.0, 1.0, 5.0, 20.0)  # before each try


class ContainersSetup(NamedTuple):
    """The setup of all containers of a collection."""

    program: ContainerProgram
    settings: ContainerSettings
    network: SandboxNetwork
    reads: tuple[str, ...] = ()  # paths of this machine that are seen under the same names, read-only
    passed: tuple[str, ...] = ()  # variables of the collector's environment that programs get


class Containers:
    """Makes a container for each attempt."""

    def __init__(self, setup: ContainersSetup, gateway: ListeningGateway | None, for_functions: Sandboxes) -> None:
        self._setup = setup
        self._gateway = gateway
        self.for_functions = for_functions
        kind, image = setup.program.kind, setup.settings.image or "of their tasks"
        self.confinement = Confinement(
            str(kind), f"sandbox {kind}: agents see a container of the image {image}, and {setup.network.reach}"
        )

    @asynccontextmanager
    async def open(
        self, workspace: Workspace, wanted: object = None, *, again: bool = False
    ) -> AsyncIterator["Container"]:
        setup = self._setup
        settings = setup.settings.for_task(wanted, setup.network)
        if again and settings.workdir is not None:
            raise CollectError("the container that it worked in is gone, with its files; run it again")
        image = await setup.program.image_id(settings)
        container = Container(setup, settings, image, self._gateway, workspace)
        try:
            yield container
        finally:
            # Shielded: the container is removed even if this is cancelled repeatedly.
            await asyncio.shield(asyncio.ensure_future(container.remove()))


class Container:
    """One container, from its first program to its removal."""

    has_image = True

    def __init__(
        self,
        setup: ContainersSetup,
        settings: ContainerSettings,
        image: str,
        gateway: ListeningGateway | None,
        workspace: Workspace,
    ) -> None:
        self._setup = setup
        self._settings = settings
        self._image = image
        self._gateway = gateway
        self._root = workspace.root
        self._name = f"rolltape-{secrets.token_hex(12)}"
        self._is_made = False
        self.folder_inside = settings.workdir

    def reachable(self, url: str) -> str:
        return url if self._settings.network is SandboxNetwork.HOST else url_inside(url, self._gateway)

    @asynccontextmanager
    async def enter(self, job: ProgramJob, workspace: Workspace) -> AsyncIterator[ConfinedRun]:
        program = self._setup.program
        first, self._is_made = not self._is_made, True
        await asyncio.to_thread(self._prepare, job, workspace)
        command = self._run_command(job, workspace) if first else program.start(self._name)
        order = Order(
            command=command,
            env=dict(os.environ),  # for podman or docker itself, not for the container
            cwd="/",
            stdin=os.devnull,
            stdout=str(job.stdout),
            stderr=str(job.stderr),
            stop=program.stop(self._name, GRACE_S),
            remove=program.remove(self._name),
        )
        async with AsyncExitStack() as stack:
            script = stack.enter_context(_StartedScript(self._control))

            async def reach() -> None:
                if job.is_agent and self._gateway is not None and self._has_listener:
                    process = await program.first_process(self._name, self._pid_file)
                    listener = await listen_in(process, port_inside(self._gateway))
                    await stack.enter_async_context(self._gateway.listening_on(listener))

            yield ConfinedRun(order, lambda end: script.correct(end, job.stderr), lambda: script.begin(reach))
        if job.is_agent and self._settings.fetch:
            await self._fetch(workspace)

    async def remove(self) -> None:
        """Remove the container, if it was made."""
        program, error = self._setup.program, ""
        for wait_s in _REMOVAL_WAITS_S if self._is_made else ():
            await asyncio.sleep(wait_s)
            code, _, error = await program.call(*program.remove(self._name)[1:])
            if code == 0 or "no such container" in error.lower():
                return
        if error:
            log.warning("container %s cannot be removed now; the next collection tries again: %s", self._name, error)

    @property
    def _has_listener(self) -> bool:
        return self._settings.network is not None and self._settings.network.has_listener

    @property
    def _control(self) -> Path:
        return self._root / "control"

    def _prepare(self, job: ProgramJob, workspace: Workspace) -> None:
        """Write the script that the container runs next, and its input."""
        remove(self._control)
        (self._control / "files").mkdir(parents=True)
        (self._root / "logs").mkdir(exist_ok=True)
        copies = dict(job.copies)
        if job.is_agent and self.folder_inside:
            files = (path for path in walk(workspace.work) if path.is_file())
            copies |= {f"{self.folder_inside}/{path.relative_to(workspace.work)}": path for path in files}
        for number, source in enumerate(copies.values()):
            target = self._control / "files" / str(number)
            shutil.copytree(source, target, symlinks=True) if source.is_dir() else shutil.copy(source, target)
        shutil.copyfile(job.stdin, self._control / "stdin")
        passed = collector_variables(self._setup.passed)
        home = {"HOME": HOME} if any(workspace.home.iterdir()) else {}
        script = _render_script(job.command, copies, {**home, **passed, **job.env}, self.folder_inside or WORK)
        (self._control / "start").write_text(script)
        for name in ("up", "go"):
            os.mkfifo(self._control / name)
        # The image may have any user. Other users of this machine cannot enter the folders above.
        for folder in (self._control, self._root / "logs", workspace.work, workspace.home):
            for path in (folder, *walk(folder)):
                with suppress(PermissionError):  # it belongs to a user of the container
                    if not path.is_symlink():
                        path.chmod(path.stat().st_mode | (0o777 if path.is_dir() else 0o666))

    def _run_command(self, job: ProgramJob, workspace: Workspace) -> list[str]:
        read_only = {*self._setup.reads, *(word for word in job.command if _is_file_of_user(word))}
        mounts = [
            f"{self._control}:{_CONTROL}:ro",
            f"{self._root / 'logs'}:{LOGS}",
            *([] if self.folder_inside else [f"{workspace.work}:{WORK}"]),
            *([f"{workspace.home}:{HOME}"] if any(workspace.home.iterdir()) else []),
            *(f"{path}:{path}:ro" for path in sorted(read_only)),
            *(mount if mount.endswith((":ro", ":rw")) else f"{mount}:ro" for mount in self._settings.mounts),
        ]
        script = str(_CONTROL / "start")
        return self._setup.program.run(self._name, self._image, self._settings, mounts, self._pid_file, script)

    @property
    def _pid_file(self) -> Path:
        return self._root / "first-process"

    async def _fetch(self, workspace: Workspace) -> None:
        """Copy the paths in `fetch` from the container to the working directory of the workspace."""
        for path in self._settings.fetch:
            with tempfile.TemporaryDirectory(dir=self._root) as place:
                archive = Path(place, "archive")
                if await self._setup.program.copy_out(self._name, path, archive, _MAX_FETCHED_BYTES):
                    await asyncio.to_thread(_unpack, archive, Path(place), workspace.work)


class _StartedScript:
    """The running script of a container. Through two named pipes it reports that it runs, and waits to continue."""

    def __init__(self, control: Path) -> None:
        self._control = control
        self._failure: str | None = None
        self._has_begun = False

    def __enter__(self) -> "_StartedScript":
        self._up = os.open(self._control / "up", os.O_RDONLY | os.O_NONBLOCK)
        self._go = os.open(self._control / "go", os.O_RDWR | os.O_NONBLOCK)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._up)
        os.close(self._go)

    async def begin(self, reach: Callable[[], Awaitable[None]]) -> None:
        """Wait until the script runs, make the gateway reachable, and let the script continue."""
        loop, runs = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._up, runs.set)
        try:
            await runs.wait()
        finally:
            loop.remove_reader(self._up)
        try:
            await reach()
        except (OSError, ValueError, CollectError) as error:
            self._failure = f"the gateway cannot be reached from it: {error}"
            raise
        os.write(self._go, b"\n")
        self._has_begun = True

    def correct(self, end: ProgramEnd, errors: Path) -> ProgramEnd:
        """How the program ended. If the script did not continue, the container has failed."""
        if end.error is not None or self._has_begun:
            return end
        why = self._failure or read_end_of(errors, _ERROR_BYTES).strip() or f"exit code {end.exit_code}"
        return msgspec.structs.replace(end, error=f"the container could not be made: {why}")


def _render_script(command: Iterable[str], copies: Iterable[str], env: Mapping[str, str], folder: str) -> str:
    """The script that a container's shell runs: it waits, copies files to their places, and becomes the program."""
    lines = [f"echo >{_CONTROL}/up", f"read -r _ <{_CONTROL}/go"]
    for number, target in enumerate(copies):
        path, above = shlex.quote(target), shlex.quote(str(PurePosixPath(target).parent))
        # A link that the agent left there would redirect the copy.
        lines.append(
            f"rm -rf -- {path} && mkdir -p -- {above} && cp -R -- {_CONTROL}/files/{number} {path} || exit 126"
        )
    lines.append(f"mkdir -p -- {shlex.quote(folder)} && cd -- {shlex.quote(folder)} || exit 126")
    lines += [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
    return "\n".join([*lines, f"exec {shlex.join(command)} <{_CONTROL}/stdin", ""])


def _is_file_of_user(word: str) -> bool:
    """Whether a word of a command names a file of this machine outside the system. Such a file is mounted."""
    path = Path(word)
    return path.is_absolute() and path.is_file() and not is_of_system(path)


async def listen_in(process: int, port: int) -> socket.socket:
    """Open a listener on 127.0.0.1 in the network of another process. Needs the right to enter its namespaces."""
    made: Future[socket.socket] = Future()

    def listen() -> None:
        try:
            with Path(f"/proc/{process}/ns/net").open("rb") as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "its network cannot be entered")
            made.set_result(socket.create_server(("127.0.0.1", port)))
        except PermissionError as error:
            made.set_exception(OSError(error.errno, "its network may not be entered; run the collector as root"))
        except OSError as error:
            made.set_exception(error)

    # Only this thread is in that network, and it ends there.
    threading.Thread(target=listen, daemon=True).start()
    return await asyncio.wrap_future(made)


def _unpack(archive: Path, place: Path, folder: Path) -> None:
    """Unpack a program's files into a folder, over files of the same names. Links that lead out are left out."""
    # Into a new folder first: links that the program left in the target would redirect files.
    (unpacked := place / "unpacked").mkdir()
    with tarfile.open(archive) as opened:
        opened.extractall(unpacked, filter=only_inside)
    for path in unpacked.iterdir():
        target = folder / path.name
        if target.is_dir() and not target.is_symlink():
            remove(target)
        else:
            target.unlink(missing_ok=True)
        path.rename(target)

"""`open_sandbox`: chooses the sandbox of a collection, and tests it by running a program in it."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rolltape.collect.sandboxes.bubblewrap import Bubblewrap, BubblewrapSettings
from rolltape.collect.sandboxes.container_program import ContainerOwner, ContainerProgram
from rolltape.collect.sandboxes.container_settings import ContainerSettings
from rolltape.collect.sandboxes.containers import Containers, ContainersSetup
from rolltape.collect.sandboxes.protocol import ListeningGateway, ProgramJob, Sandboxes, SandboxKind, SandboxNetwork
from rolltape.collect.sandboxes.running import Unconfined, run_program
from rolltape.collect.sandboxes.workspace import Workspace, remove
from rolltape.errors import CollectError

_TRIAL_S = 30.0


class SandboxUnavailable(Exception):
    """The sandbox does not work on this machine; the message has the reason."""


async def open_sandbox(
    kind: SandboxKind,
    gateway: ListeningGateway | None,
    *,
    scratch: Path,
    owner: ContainerOwner,
    network: SandboxNetwork = SandboxNetwork.GATEWAY,
    reads: Sequence[str] = (),
    passed: Sequence[str] = (),
    container: ContainerSettings | None = None,
) -> Sandboxes:
    """Open a sandbox of this kind.

    Raises a CollectError if the requested kind does not work.

    Arguments:
        gateway: Agents can reach it; None for checks only, which reach nothing.
        scratch: A folder for files that the sandbox needs.
        owner: The run, which no program sees, and its writer, which owns the containers.
        reads: More paths that programs may read.
        passed: Variables of the collector's environment that programs get.
        container: The image and its limits, for kinds that have images.
    """
    try:
        kind, network = SandboxKind(kind), SandboxNetwork(network)
    except ValueError as error:
        raise CollectError(f"the sandbox: {error}; there are {', '.join(SandboxKind)}") from None
    if kind is SandboxKind.NONE:
        return Unconfined(tuple(passed))
    reads = tuple(str(Path(path).absolute()) for path in reads)
    if missing := [path for path in reads if not Path(path).exists()]:
        raise CollectError(f"--sandbox-read {missing[0]}: there is no such file or folder")
    try:
        if kind.has_images:
            for path in (str(owner.run), *reads):
                if found := next((one for one in ":," if one in path), None):
                    raise CollectError(f"{path}: {kind} cannot mount a path with {found!r} in it; use another folder")
            functions = await open_sandbox(SandboxKind.AUTO, None, scratch=scratch, owner=owner, reads=reads)
            program = ContainerProgram(kind, _find(kind), owner, scratch)
            setup = ContainersSetup(program, container or ContainerSettings(), network, reads, tuple(passed))
            return await _try_containers(Containers(setup, gateway, functions), setup, scratch)
        if network is SandboxNetwork.BRIDGE:
            raise CollectError("--sandbox-network bridge: only containers have one; give --sandbox podman or docker")
        settings = BubblewrapSettings(
            program=shutil.which("bwrap") or "",
            etc=scratch / "etc",
            hidden=(str(owner.run),),
            network=network,
            reads=reads,
            passed=tuple(passed),
        )
        return await _try_bubblewrap(settings, gateway, scratch)
    except SandboxUnavailable as error:
        if kind is SandboxKind.AUTO:
            return Unconfined(tuple(passed), str(error))
        raise CollectError(f"--sandbox {kind}: {error}") from None


async def _try_bubblewrap(settings: BubblewrapSettings, gateway: ListeningGateway | None, scratch: Path) -> Bubblewrap:
    """Set up bubblewrap and test it; raises SandboxUnavailable if it does not work."""
    if not settings.program:
        raise SandboxUnavailable("bubblewrap is not installed; install it (on Debian: apt-get install bubblewrap)")
    # In a user namespace, root's processes are still root to the kernel, and could write to /proc/sys. So they change
    # their user permanently, which needs rights that root in a container may lack.
    sandbox = Bubblewrap(settings._replace(becomes_user=os.geteuid() == 0), gateway)
    await _try(sandbox, scratch, is_agent=gateway is not None)
    return sandbox


async def _try_containers(containers: Containers, setup: ContainersSetup, scratch: Path) -> Containers:
    """Remove containers of dead collectors, and test a container of the collection's image."""
    try:
        await setup.program.sweep()
    except CollectError as error:
        raise SandboxUnavailable(str(error)) from None
    if setup.settings.image is not None:
        await _try(containers, scratch, is_agent=setup.network.has_listener)
    return containers


async def _try(sandboxes: Sandboxes, scratch: Path, *, is_agent: bool) -> None:
    workspace = Workspace.at(Path(tempfile.mkdtemp(prefix="trial-", dir=scratch)).resolve())
    job = ProgramJob.at(workspace.root, ["/bin/sh", "-c", "exit 7"], env={}, is_agent=is_agent)
    async with sandboxes.open(workspace) as sandbox:
        end = await run_program(sandbox, job, workspace, attempt="", timeout_s=_TRIAL_S)
    await asyncio.to_thread(remove, workspace.root)
    if end.exit_code != 7 or end.error is not None:
        raise SandboxUnavailable(end.error or "a program in it did not end")


def _find(kind: SandboxKind) -> str:
    if (found := shutil.which(kind)) is None:
        raise SandboxUnavailable(f"{kind} is not installed; install it (on Debian: apt-get install podman)")
    return found

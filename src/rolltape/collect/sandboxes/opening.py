"""Choose the sandbox of a collection: bubblewrap is tried by running it, and where it does not work, that is said."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rolltape.collect.sandboxes.bubblewrap import Bubblewrap, BubblewrapSettings, ListeningGateway
from rolltape.collect.sandboxes.protocol import ProgramJob, Sandbox, SandboxKind, SandboxNetwork
from rolltape.collect.sandboxes.running import Unconfined, run_program
from rolltape.collect.sandboxes.workspace import Workspace, remove
from rolltape.errors import CollectError

_TRIAL_S = 30.0


class SandboxUnavailable(Exception):
    """The sandbox does not work on this machine; the message says why."""


async def open_sandbox(
    kind: SandboxKind,
    gateway: ListeningGateway | None,
    *,
    scratch: Path,
    hidden: Sequence[Path],
    network: SandboxNetwork = SandboxNetwork.GATEWAY,
    reads: Sequence[str] = (),
    passed: Sequence[str] = (),
) -> Sandbox:
    """The sandbox of that kind.

    Raises a CollectError where `bwrap` was asked for and does not work.

    Arguments:
        gateway: What agents reach; None for checks alone, which reach nothing.
        scratch: A folder for files that the sandbox needs.
        hidden: Folders that no program sees.
        reads: More paths that programs may read.
        passed: Variables of the collector's environment that programs get.
    """
    try:
        kind, network = SandboxKind(kind), SandboxNetwork(network)
    except ValueError as error:
        raise CollectError(f"the sandbox: {error}; there are {', '.join(SandboxKind)}") from None
    if kind is SandboxKind.NONE:
        return Unconfined(tuple(passed))
    try:
        settings = await _try_bubblewrap(
            BubblewrapSettings(
                program=shutil.which("bwrap") or "",
                etc=scratch / "etc",
                hidden=tuple(str(path) for path in hidden),
                network=network,
                reads=tuple(str(Path(path).absolute()) for path in reads),
                passed=tuple(passed),
            ),
            gateway,
            scratch,
        )
    except SandboxUnavailable as error:
        if kind is SandboxKind.BWRAP:
            raise CollectError(f"--sandbox bwrap: {error}") from None
        return Unconfined(tuple(passed), str(error))
    return Bubblewrap(settings, gateway)


async def _try_bubblewrap(
    settings: BubblewrapSettings, gateway: ListeningGateway | None, scratch: Path
) -> BubblewrapSettings:
    """The settings with which a program really runs; SandboxUnavailable if there are none."""
    if not settings.program:
        raise SandboxUnavailable("bubblewrap is not installed; install it (on Debian: apt-get install bubblewrap)")
    if missing := [path for path in settings.reads if not Path(path).exists()]:
        raise CollectError(f"--sandbox-read {missing[0]}: there is no such file or folder")
    # In a user namespace root's processes would still be the kernel's root: /proc/sys lets that write. So they change
    # their user for good, which takes rights that root in a container may lack.
    settings = settings._replace(becomes_user=os.geteuid() == 0)
    workspace = Workspace.at(Path(tempfile.mkdtemp(prefix="trial-", dir=scratch)).resolve())
    job = ProgramJob.at(workspace.root, ["/bin/sh", "-c", "exit 7"], env={}, is_agent=gateway is not None)
    end = await run_program(Bubblewrap(settings, gateway), job, workspace, attempt="", timeout_s=_TRIAL_S)
    await asyncio.to_thread(remove, workspace.root)
    if end.exit_code != 7:
        raise SandboxUnavailable(end.error or "a program in it did not end")
    return settings

"""The command lines of podman and docker, which differ in a few flags only."""

import asyncio
import hashlib
import json
import logging
import os
import re
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from rolltape.collect.sandboxes.container_settings import ContainerSettings
from rolltape.collect.sandboxes.protocol import SandboxKind, SandboxNetwork
from rolltape.errors import CollectError
from rolltape.tape.journal.file import is_alive

log = logging.getLogger("rolltape.collect")

_RUN, _WRITER = "rolltape.run", "rolltape.writer"  # labels
_LISTED_WRITER = re.compile(rf"{re.escape(_WRITER)}[:=]([^\s,\]]+)")  # podman and docker list labels in different forms
_PULL_S, _SHORT_S = 3600.0, 120.0
_CHUNK_BYTES = 1 << 20
_SHOWN = 1000  # characters of the end of an error
# Capabilities that podman drops by default: devices, raw sockets, the audit log. None are added by name, since podman
# would give those to ordinary users too.
_DROPPED = ("MKNOD", "NET_RAW", "AUDIT_WRITE")
_NETWORKS = {
    SandboxNetwork.NONE: "none",
    SandboxNetwork.GATEWAY: "none",  # the gateway's listener is opened in it
    SandboxNetwork.BRIDGE: "bridge",
    SandboxNetwork.HOST: "host",
}
# podman's default filter of system calls gets stricter: no user namespaces, and no calls that attacks often use.
# Docker's default filter refuses these already.
_PROFILES = (Path("/etc/containers/seccomp.json"), Path("/usr/share/containers/seccomp.json"))
_CLONE_NEWUSER = 0x10000000  # of linux/sched.h
_BY_FLAGS = ("clone", "unshare")  # allowed without the flag above, which is in their first argument
_UNKNOWN = "clone3"  # its flags are in memory, which a filter cannot read; the C library falls back to clone
_ENOSYS = 38
_NEVER = {
    *("add_key", "request_key", "keyctl", "perf_event_open", "bpf", "userfaultfd"),
    *("io_uring_setup", "io_uring_enter", "io_uring_register"),
}


class ContainerOwner(NamedTuple):
    """The owner of a container: a writer of a run."""

    run: Path
    writer: str


class ContainerProgram:
    """podman or docker, on behalf of an owner."""

    def __init__(self, kind: SandboxKind, path: str, owner: ContainerOwner, scratch: Path) -> None:
        """`scratch` is a folder for files that it needs."""
        self.kind = kind
        self._nothing = scratch / "nothing"
        self._nothing.mkdir(exist_ok=True)
        self._filter = _write_filter(scratch / "seccomp.json") if kind is SandboxKind.PODMAN else None
        self._path = path
        self._owner = owner
        self._images: dict[str, asyncio.Task[str]] = {}

    def run(
        self, name: str, image: str, settings: ContainerSettings, mounts: Sequence[str], pid_file: Path, script: str
    ) -> list[str]:
        """The command that makes a container and has its shell run a script."""
        owner = {_RUN: str(self._owner.run), _WRITER: self._owner.writer}
        limits = [f"--pids-limit={settings.processes}"]
        if settings.memory is not None:
            limits += [f"--memory={settings.memory}", f"--memory-swap={settings.memory}"]
        if settings.cpus is not None:
            limits.append(f"--cpus={settings.cpus:g}")
        return [
            *(self._path, "run", f"--name={name}", *(f"--label={key}={value}" for key, value in owner.items())),
            # The first process forwards signals. `remove` does not wait. Output is read here and not stored elsewhere.
            *("--init", "--stop-timeout=0", "--log-driver=none", "--pull=never"),
            *(f"--network={_NETWORKS[settings.network or SandboxNetwork.GATEWAY]}", *limits),
            *(*(f"--cap-drop={one}" for one in _DROPPED), "--security-opt=no-new-privileges"),
            *([] if self._filter is None else [f"--security-opt=seccomp={self._filter}"]),
            *([] if settings.user is None else [f"--user={settings.user}"]),
            *(f"--env={key}={value}" for key, value in settings.env.items()),
            *(f"--volume={mount}" for mount in (*mounts, *self._hide_run(mounts))),
            # The proxy variables of this machine are not passed on.
            *([f"--pidfile={pid_file}", "--http-proxy=false"] if self.kind is SandboxKind.PODMAN else []),
            *("--entrypoint=/bin/sh", image, script),
        ]

    def _hide_run(self, mounts: Sequence[str]) -> Iterator[str]:
        """Yield empty mounts over the run, if a folder above it is mounted."""
        run = os.path.realpath(self._owner.run)
        for source, target in (mount.split(":")[:2] for mount in mounts):
            if Path(run).is_relative_to(above := os.path.realpath(source)):
                yield f"{self._nothing}:{PurePosixPath(target, Path(run).relative_to(above))}:ro"

    def start(self, name: str) -> list[str]:
        """The command that makes an ended container run its script again."""
        return [self._path, "start", "--attach", name]

    def stop(self, name: str, grace_s: float) -> list[str]:
        """The command that ends all processes of a container."""
        return [self._path, "stop", f"--time={grace_s:.0f}", name]

    def remove(self, name: str) -> list[str]:
        """The command that removes a container, running or not, with its unnamed volumes."""
        return [self._path, "rm", "--force", "--volumes", name]

    async def first_process(self, name: str, pid_file: Path) -> int:
        """The process id of a running container's first process, on this machine."""
        if self.kind is SandboxKind.PODMAN:
            return int(pid_file.read_text())
        return int(await self._ask("inspect", "--format={{.State.Pid}}", name))

    async def copy_out(self, name: str, path: str, archive: Path, max_bytes: int) -> bool:
        """Write a file or folder of a container to a tar archive. Return whether it exists and has at most that size.

        An agent can make files of any size. A larger one counts as missing.
        """
        process = await asyncio.create_subprocess_exec(
            *(self._path, "cp", f"{name}:{path}", "-"), stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL
        )
        assert process.stdout is not None
        try:
            with archive.open("wb") as file:
                while chunk := await process.stdout.read(_CHUNK_BYTES):
                    file.write(chunk)
                    if file.tell() > max_bytes:
                        log.warning("%s of a container has more than %d bytes, and is not fetched", path, max_bytes)
                        return False
            return await process.wait() == 0
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()

    async def sweep(self) -> list[str]:
        """Remove the containers of this run whose owner has died, and return their ids."""
        # podman cannot inspect a container that is incomplete because its client was killed, but it can list it.
        shown = await self._ask(
            *("ps", "--all", "--no-trunc", f"--filter=label={_RUN}={self._owner.run}", "--format={{.ID}} {{.Labels}}")
        )
        left = []
        for line in shown.splitlines():
            one, writer = line.split()[0], _LISTED_WRITER.search(line)
            if writer is not None and not is_alive(self._owner.run / "journals" / f"{writer[1]}.sqlite"):
                left.append(one)
                await self.call(*self.remove(one)[1:])  # one by one: another process may be removing one of them
        return left

    async def image_id(self, settings: ContainerSettings) -> str:
        """The id of the settings' image. If missing, it is pulled or built, once for all simultaneous calls."""
        key = settings.image or str(settings.build)
        if key not in self._images or (self._images[key].done() and self._images[key].exception()):
            self._images[key] = asyncio.ensure_future(self._pull(key) if settings.image else self._build(Path(key)))
        return await asyncio.shield(self._images[key])

    async def _pull(self, image: str) -> str:
        if (found := await self._find_image(image)) is not None:
            return found
        code, _, error = await self.call("pull", image, limit_s=_PULL_S)
        if code or (found := await self._find_image(image)) is None:
            raise CollectError(f"image {image}: there is none here, and it cannot be pulled: {error}")
        return found

    async def _build(self, folder: Path) -> str:
        name = f"localhost/rolltape-built:{await asyncio.to_thread(digest_folder, folder)}"
        if (found := await self._find_image(name)) is not None:
            return found
        code, _, error = await self.call("build", f"--tag={name}", str(folder), limit_s=_PULL_S)
        if code or (found := await self._find_image(name)) is None:
            raise CollectError(f"no image can be built from {folder}: {error}")
        return found

    async def _find_image(self, name: str) -> str | None:
        code, out, _ = await self.call("image", "inspect", "--format={{.Id}}", name)
        return None if code else out.decode().strip()

    async def _ask(self, *arguments: str) -> str:
        code, out, error = await self.call(*arguments)
        if code:
            raise CollectError(f"{self.kind} {arguments[0]} ended with {code}: {error}")
        return out.decode()

    async def call(self, *arguments: str, limit_s: float = _SHORT_S) -> tuple[int | None, bytes, str]:
        """Run a command, and return its exit code, its output, and the end of its errors."""
        process = await asyncio.create_subprocess_exec(
            self._path,
            *arguments,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(limit_s):
                out, errors = await process.communicate()
        except TimeoutError:
            return None, b"", f"it did not end in {limit_s:g} s"
        finally:
            if process.returncode is None:
                process.kill()
        return process.returncode, out, errors.decode("utf-8", "replace").strip()[-_SHOWN:]


def digest_folder(folder: Path) -> str:
    """A digest of all files below a folder, to find an image that was built from it."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)}\0{path.stat().st_mode & 0o111}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _write_filter(path: Path) -> Path | None:
    """Write the filter for podman; None if podman's default filter is missing here, or has another form."""
    try:
        profile = json.loads(next(one for one in _PROFILES if one.is_file()).read_bytes())
        path.write_text(json.dumps(_tighten(profile)))
    except (StopIteration, OSError, ValueError, KeyError, TypeError):
        return None
    return path


def _tighten(profile: dict[str, Any]) -> dict[str, Any]:
    taken = {*_BY_FLAGS, _UNKNOWN, *_NEVER}
    rules = [rule | {"names": [name for name in rule["names"] if name not in taken]} for rule in profile["syscalls"]]
    without = [{"index": 0, "value": _CLONE_NEWUSER, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}]
    own = [
        {"names": list(_BY_FLAGS), "action": "SCMP_ACT_ALLOW", "args": without},
        {"names": [_UNKNOWN], "action": "SCMP_ACT_ERRNO", "errnoRet": _ENOSYS},
        {"names": sorted(_NEVER), "action": "SCMP_ACT_ERRNO", "errnoRet": 1},
    ]
    return profile | {"syscalls": [*(rule for rule in rules if rule["names"]), *own]}

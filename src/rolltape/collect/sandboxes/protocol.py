"""The interface of sandboxes: a sandbox starts a program so that it sees its workspace and little else."""

import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit, urlunsplit

import msgspec

from rolltape.collect.sandboxes.scripts.supervisor import Order
from rolltape.collect.sandboxes.workspace import Workspace

HOME, WORK = "/home/agent", "/workspace"  # the folders of its workspace as a program in a sandbox sees them


class SandboxKind(StrEnum):
    """The kinds of sandboxes for agents that are programs."""

    AUTO = "auto"  # bubblewrap if it works, else none with a warning
    BWRAP = "bwrap"
    PODMAN = "podman"  # a container for each attempt
    DOCKER = "docker"  # a container for each attempt
    NONE = "none"

    @property
    def has_images(self) -> bool:
        """Whether programs see an image instead of this machine's system."""
        return self in (SandboxKind.PODMAN, SandboxKind.DOCKER)


class SandboxNetwork(StrEnum):
    """What a program in a sandbox can reach, from the least to the most."""

    NONE = "none"  # nothing, not even the gateway
    GATEWAY = "gateway"  # only the gateway
    BRIDGE = "bridge"  # for containers: the gateway, and whatever the bridge network reaches
    HOST = "host"  # everything that this machine reaches, including its own ports

    @property
    def reach(self) -> str:
        """What programs reach, in words."""
        return _REACH[self]

    @property
    def has_listener(self) -> bool:
        """Whether the gateway listens inside, in a network that is not this machine's."""
        return self in (SandboxNetwork.GATEWAY, SandboxNetwork.BRIDGE)


_REACH = {
    SandboxNetwork.NONE: "reach nothing, not even the gateway",
    SandboxNetwork.GATEWAY: "reach only the gateway",
    SandboxNetwork.BRIDGE: "reach the gateway and what the bridge network reaches, other containers on it included",
    SandboxNetwork.HOST: "reach whatever this machine reaches, engines and its own ports included",
}


class ListeningGateway(Protocol):
    """The part of a gateway that a sandbox needs."""

    url: str

    def listening_on(self, listener: socket.socket) -> AbstractAsyncContextManager[None]:
        """Accept the connections of a listener within the block."""


def port_inside(gateway: ListeningGateway | None) -> int:
    """The port at which a program in its own network reaches the gateway; 0 without a gateway."""
    return 0 if gateway is None else urlsplit(gateway.url).port or 0


def url_inside(url: str, gateway: ListeningGateway | None) -> str:
    """A URL of the gateway for a program in its own network."""
    return urlunsplit(("http", f"127.0.0.1:{port_inside(gateway)}", *urlsplit(url)[2:]))


class Confinement(NamedTuple):
    """The sandbox of a collection's agents, for records and messages."""

    sandbox: str | None  # its name, or None if the agent runs no program
    says: str | None  # a line for people, or None


class ProgramJob(NamedTuple):
    """A program to run in a workspace."""

    command: Sequence[str]
    env: Mapping[str, str]  # added to the few variables that every program gets
    stdin: Path
    stdout: Path
    stderr: Path
    is_agent: bool = True  # only an agent reaches the gateway
    programs: tuple[str, ...] = ()  # words that may name programs that it starts
    reads: tuple[Path, ...] = ()  # files and folders that it needs besides its command
    copies: Mapping[str, Path] = {}  # for a program in an image: paths there, and what is copied to them before

    @classmethod
    def at(cls, folder: Path, command: Sequence[str], stdin: bytes = b"", **fields: Any) -> "ProgramJob":
        """A job with its input and output files in a folder."""
        (folder / "stdin").write_bytes(stdin)
        streams: dict[str, Any] = {name: folder / name for name in ("stdin", "stdout", "stderr")}
        return cls(command=tuple(command), **streams, **fields)


class ProgramEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a program ended. All its processes have ended."""

    exit_code: int | None = None
    signal: int | None = None
    left_out_bytes: int = 0
    survivors: tuple[int, ...] = ()  # processes that not even SIGKILL ended
    error: str | None = None  # why it could not be run
    timed_out: bool = False


def _ends_as_reported(end: ProgramEnd) -> ProgramEnd:
    return end


async def _begins_at_once() -> None:
    return


class ConfinedRun(NamedTuple):
    """One program about to run."""

    order: Order
    correct: Callable[[ProgramEnd], ProgramEnd] = _ends_as_reported  # from the end of the first process
    begin: Callable[[], Awaitable[None]] = _begins_at_once  # the time limit counts from its end


class Sandbox(Protocol):
    """The sandbox of one attempt: an agent runs in it, then the checks of its work."""

    @property
    def has_image(self) -> bool:
        """Whether programs see an image instead of this machine's system. Programs of this machine do not run in it."""

    @property
    def folder_inside(self) -> str | None:
        """The working directory if it is in the image, or None for that of the workspace."""

    def reachable(self, url: str) -> str:
        """A URL of the gateway for a program in the sandbox."""

    def enter(self, job: ProgramJob, workspace: Workspace) -> AbstractAsyncContextManager[ConfinedRun]:
        """Prepare to run a program. It runs within the block, in which the gateway is reachable."""


class Sandboxes(Protocol):
    """A kind of sandbox, set up for a collection."""

    confinement: Confinement

    @property
    def for_functions(self) -> "Sandboxes":
        """The sandboxes in which check functions of this machine are called."""

    def open(
        self, workspace: Workspace, wanted: object = None, *, again: bool = False
    ) -> AbstractAsyncContextManager[Sandbox]:
        """A sandbox for an attempt. It ends with the block, and all its processes too.

        Arguments:
            workspace: The attempt's folders.
            wanted: The field "sandbox" of the task. Raises a CollectError if this kind cannot provide it.
            again: The attempt ended earlier, and its sandbox is gone. Its work is checked again.
        """

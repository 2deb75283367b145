"""The interface of sandboxes: a sandbox says how to start a program so that it sees its workspace and little else."""

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

HOME, WORK = "/home/agent", "/workspace"  # where a program in a sandbox sees the folders of its workspace


class SandboxKind(StrEnum):
    """Which sandbox agents that are programs run in."""

    AUTO = "auto"  # bubblewrap where it works, else none with a warning
    BWRAP = "bwrap"
    PODMAN = "podman"  # a container for each attempt
    DOCKER = "docker"  # a container for each attempt
    NONE = "none"

    @property
    def has_images(self) -> bool:
        """Whether programs see an image instead of this machine's system."""
        return self in (SandboxKind.PODMAN, SandboxKind.DOCKER)


class SandboxNetwork(StrEnum):
    """What a program in a sandbox reaches, from the least to the most."""

    NONE = "none"  # nothing, not even the gateway
    GATEWAY = "gateway"  # the gateway alone
    BRIDGE = "bridge"  # of containers: the gateway, and what the program's own bridge network reaches
    HOST = "host"  # whatever this machine reaches, its own ports too

    @property
    def has_listener(self) -> bool:
        """Whether the gateway listens inside, in a network that is not this machine's."""
        return self in (SandboxNetwork.GATEWAY, SandboxNetwork.BRIDGE)


class ListeningGateway(Protocol):
    """What a sandbox needs of a gateway."""

    url: str

    def listening_on(self, listener: socket.socket) -> AbstractAsyncContextManager[None]:
        """Accept the connections of a listener within the block."""


def port_inside(gateway: ListeningGateway | None) -> int:
    """The port at which a program in a network of its own reaches the gateway; 0: there is none."""
    return 0 if gateway is None else urlsplit(gateway.url).port or 0


def url_inside(url: str, gateway: ListeningGateway | None) -> str:
    """A URL of the gateway, as a program in a network of its own reaches it."""
    return urlunsplit(("http", f"127.0.0.1:{port_inside(gateway)}", *urlsplit(url)[2:]))


class Confinement(NamedTuple):
    """The sandbox of a collection's agents, for records and messages."""

    sandbox: str | None  # its name; None: the agent runs no program
    says: str | None  # for people, in one line; None: there is nothing to say


class ProgramJob(NamedTuple):
    """A program to run in a workspace."""

    command: Sequence[str]
    env: Mapping[str, str]  # besides the few variables that every program gets
    stdin: Path
    stdout: Path
    stderr: Path
    is_agent: bool = True  # only an agent reaches the gateway
    programs: tuple[str, ...] = ()  # words of which some are programs that it starts
    reads: tuple[Path, ...] = ()  # files and folders that it needs, besides its own command
    copies: Mapping[str, Path] = {}  # of a program in an image: paths there, and what is copied to them before

    @classmethod
    def at(cls, folder: Path, command: Sequence[str], stdin: bytes = b"", **fields: Any) -> "ProgramJob":
        """A job that has its input and leaves its output in a folder."""
        (folder / "stdin").write_bytes(stdin)
        streams: dict[str, Any] = {name: folder / name for name in ("stdin", "stdout", "stderr")}
        return cls(command=tuple(command), **streams, **fields)


class ProgramEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a program ended. None of its processes runs any more."""

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
    correct: Callable[[ProgramEnd], ProgramEnd] = _ends_as_reported  # its end, from that of the sandbox's first process
    begin: Callable[[], Awaitable[None]] = _begins_at_once  # its time counts from the end of this


class Sandbox(Protocol):
    """The sandbox of one attempt: an agent runs in it, then checks of what it left."""

    @property
    def has_image(self) -> bool:
        """Whether programs see an image instead of this machine's system. No program of this machine runs in there."""

    @property
    def folder_inside(self) -> str | None:
        """The working directory, if it lies in the image; None: it is that of the workspace."""

    def reachable(self, url: str) -> str:
        """A URL of the gateway as a program reaches it."""

    def enter(self, job: ProgramJob, workspace: Workspace) -> AbstractAsyncContextManager[ConfinedRun]:
        """Get ready to run a program. Within the block it runs; the gateway is reachable meanwhile."""


class Sandboxes(Protocol):
    """A kind of sandbox, as set up for a collection."""

    confinement: Confinement

    @property
    def for_functions(self) -> "Sandboxes":
        """The sandboxes in which check functions of this machine are called."""

    def open(
        self, workspace: Workspace, wanted: object = None, *, again: bool = False
    ) -> AbstractAsyncContextManager[Sandbox]:
        """A sandbox for an attempt. It is gone after the block, and all that ran in it.

        Arguments:
            workspace: The attempt's folders.
            wanted: The field "sandbox" of the task. A CollectError is raised if this kind cannot provide that.
            again: The attempt has ended before, and its sandbox is gone. What it left is checked once more.
        """

"""What a sandbox is: it says how a program is started so that it sees its workspace and little else."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from rolltape.collect.sandboxes.supervisor import Order
from rolltape.collect.sandboxes.workspace import Workspace


class SandboxKind(StrEnum):
    """Which sandbox agents that are programs run in."""

    AUTO = "auto"  # bubblewrap where it works, else none, which is then said
    BWRAP = "bwrap"
    NONE = "none"


class SandboxNetwork(StrEnum):
    """What a program in a sandbox reaches."""

    GATEWAY = "gateway"  # the gateway alone
    HOST = "host"  # whatever this machine reaches, its own ports too


class Confinement(NamedTuple):
    """What holds the agents of a collection."""

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


class ProgramFolders(NamedTuple):
    """The folders of a workspace, where a program sees them."""

    home: str
    work: str
    temporary: str


class ConfinedRun(NamedTuple):
    """One program about to run."""

    order: Order
    descriptors: tuple[int, ...]  # that it inherits
    correct: Callable[[ProgramEnd], ProgramEnd]  # how it ended, from how the first process of the sandbox ended


class Sandbox(Protocol):
    """A way to run programs. `none` and `bwrap` are two; a container would be another."""

    confinement: Confinement

    def folders(self, workspace: Workspace) -> ProgramFolders:
        """Where a program sees its folders."""

    def reachable(self, url: str) -> str:
        """A URL of the gateway as a program reaches it."""

    def enter(self, job: ProgramJob, workspace: Workspace) -> AbstractAsyncContextManager[ConfinedRun]:
        """Get ready to run a program. Within the block it runs; the gateway is reachable meanwhile."""

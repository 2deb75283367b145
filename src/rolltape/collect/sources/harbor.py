"""Task folders of Harbor (terminal-bench 2 among them): each becomes a task that is attempted in a container.

A task folder has `task.toml`, `instruction.md`, an image (`environment/Dockerfile`, or a name in `task.toml`), and
`tests/test.sh`. docs/how-to/collect/harbor.md lists what this reads of `task.toml`; a task that needs more is refused.
"""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rolltape.collect.sandboxes.container_program import digest_folder
from rolltape.collect.sources.entries import RawSource, SourceEntry
from rolltape.errors import SourceError

PREFIX = "harbor:"
_CONFIG, _OLD_CONFIG = "task.toml", "task.yaml"
_DEFAULT_TEST_S = 600.0
_TEMPLATE = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*(?::-([^}]*))?\}")
# Sections and fields of task.toml that ask for more than one container on this machine.
_UNSUPPORTED = (
    ("steps",),
    ("environment", "gpus"),
    ("environment", "tpu"),
    ("environment", "mcp_servers"),
    ("environment", "healthcheck"),
    ("verifier", "environment"),
    ("verifier", "collect"),
)


class _Environment(msgspec.Struct, frozen=True):
    """The used fields of [environment]."""

    docker_image: str | None = None
    cpus: float | None = None
    memory_mb: int | None = None
    memory: str | None = None  # the form of older tasks: "2G"
    workdir: str = "."  # the image's own
    env: dict[str, str] = {}
    network_mode: str | None = None
    allow_internet: bool = True
    os: str = "linux"


class _Agent(msgspec.Struct, frozen=True):
    """The used fields of [agent]."""

    timeout_sec: float | None = None
    user: str | int | None = None


class _Verifier(msgspec.Struct, frozen=True):
    """The used fields of [verifier]."""

    timeout_sec: Annotated[float, msgspec.Meta(gt=0)] = _DEFAULT_TEST_S
    user: str | int | None = None
    env: dict[str, str] = {}


class _TaskName(msgspec.Struct, frozen=True):
    """The used fields of [task]."""

    name: str | None = None


class _TaskConfig(msgspec.Struct, frozen=True):
    """The used sections of task.toml."""

    task: _TaskName = _TaskName()
    environment: _Environment = _Environment()
    agent: _Agent = _Agent()
    verifier: _Verifier = _Verifier()
    metadata: dict[str, Any] = {}


class _Unusable(Exception):
    """A task folder cannot be used; the message has the reason."""


def is_harbor_folder(folder: Path) -> bool:
    """Whether a folder is a task of Harbor, or contains some."""
    return (folder / _CONFIG).is_file() or any(folder.glob(f"*/{_CONFIG}"))


def harbor_folder(label: str, split: str | None) -> RawSource:
    """The tasks of a folder: the folder itself, or those below it."""
    folder = Path(label.removeprefix(PREFIX)).absolute()
    below = sorted(path.parent for path in folder.glob(f"*/{_CONFIG}"))
    found = [folder] if (folder / _CONFIG).is_file() else below
    if not found and any(folder.glob(f"**/{_OLD_CONFIG}")):
        raise SourceError(f"{label}: its tasks are of terminal-bench 1; convert them with `harbor tasks migrate`")
    if not found:
        raise SourceError(f"{label}: there is no {_CONFIG} in it or in a folder below it; check the path")
    return RawSource(folder.name, split, label, _read_tasks(found))


def _read_tasks(folders: list[Path]) -> Iterator[SourceEntry]:
    for folder in folders:
        try:
            yield SourceEntry(f"task {folder.name}", _read_task(folder))
        except msgspec.ValidationError as error:
            yield SourceEntry(f"task {folder.name}", problem=f"its {_CONFIG} cannot be used: {error}")
        except (_Unusable, OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            yield SourceEntry(f"task {folder.name}", problem=str(error))


def _read_task(folder: Path) -> dict[str, Any]:
    raw = tomllib.loads((folder / _CONFIG).read_text())
    config = msgspec.convert(raw, _TaskConfig)
    _refuse_unsupported(folder, raw, config)
    for name in ("instruction.md", "tests/test.sh"):
        if not (folder / name).is_file():
            raise _Unusable(f"it has no {name}; add it")
    return {
        "id": config.task.name or folder.name,
        "environment": "harbor",
        "prompt": (folder / "instruction.md").read_text(),
        "sandbox": _read_sandbox(folder, config.environment, config.agent),
        "harbor": {
            "tests": str(folder / "tests"),
            "digest": digest_folder(folder / "tests"),
            "timeout_s": config.verifier.timeout_sec,
            "env": _resolve(config.verifier.env),
        },
        "metadata": config.metadata,
    }


def _read_sandbox(folder: Path, environment: _Environment, agent: _Agent) -> dict[str, Any]:
    image, build = environment.docker_image, folder / "environment"
    if image is None and not (build / "Dockerfile").is_file():
        raise _Unusable("it has neither environment/Dockerfile nor environment.docker_image; add one of them")
    memory_mb, memory = environment.memory_mb, environment.memory
    closed = environment.network_mode in ("no-network", "allowlist") or not environment.allow_internet
    fields = {
        "image": image,
        "build": None if image else str(build),
        "cpus": environment.cpus,
        "memory": f"{memory_mb}m" if memory_mb is not None else memory.lower() if memory else None,
        "workdir": environment.workdir,
        "env": _resolve(environment.env),
        "user": None if agent.user is None else str(agent.user),
        "timeout_s": agent.timeout_sec,
        # Others have the network of --sandbox-network.
        "network": "gateway" if closed else None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _refuse_unsupported(folder: Path, raw: dict[str, Any], config: _TaskConfig) -> None:
    for path in _UNSUPPORTED:
        value: Any = raw
        for name in path:
            value = value.get(name, {})
        if value:
            raise _Unusable(f"its {'.'.join(path)} is not supported; leave it out")
    if (folder / "environment" / "docker-compose.yaml").exists():
        raise _Unusable("it has several containers (environment/docker-compose.yaml), which is not supported")
    if config.environment.os.lower() != "linux":
        raise _Unusable("its environment.os is not linux")
    users = [config.agent.user, config.verifier.user]
    if users[0] != users[1]:
        raise _Unusable(f"its agent is user {users[0]!r} and its tests are {users[1]!r}; give both the same")


def _resolve(env: dict[str, str]) -> dict[str, str]:
    """Variables with the defaults of their templates. Values of this machine only are passed with --pass-env."""
    whole = {name: _TEMPLATE.fullmatch(value) for name, value in env.items()}
    return {
        name: _TEMPLATE.sub(lambda found: found[1] or "", value)
        for name, value in env.items()
        if (template := whole[name]) is None or template[1] is not None
    }

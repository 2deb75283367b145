"""`ContainerSettings`: the image that programs run in, and its limits, for a collection and for single tasks."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

import msgspec

from rolltape.collect.sandboxes.protocol import SandboxNetwork
from rolltape.errors import CollectError

_MEMORY = re.compile(r"\d+[bkmg]?", re.IGNORECASE)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class ContainerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a collection's containers. A task's own "sandbox" replaces single fields.

    Example:

        container = rolltape.ContainerSettings(image="python:3.12-slim", cpus=2, memory="4g")
    """

    image: str | None = None  # The image. By default every task names one.
    build: str | None = None  # A folder with a Dockerfile to build the image from, instead of `image`.
    cpus: float | None = None  # The most CPUs. By default all.
    memory: str | None = None  # The most memory, such as "2g", without swap.
    processes: int = 2048  # The most processes.
    user: str | None = None  # The user in the container. By default that of the image.
    # A folder of the image, or "." for its own. By default /workspace, with the task's files alone.
    workdir: str | None = None
    env: dict[str, str] = {}  # Environment variables.
    network: SandboxNetwork | None = None  # What a task's container can reach, at most what the collection allows.
    timeout_s: float | None = None  # The longest time of a task's agent, instead of the collection's.
    fetch: tuple[str, ...] = ()  # Paths in the container that are copied out once the agent has ended.
    mounts: tuple[str, ...] = ()  # "/here:/there", read-only, or "/here:/there:rw". A task cannot set it.

    def __post_init__(self) -> None:
        if (problem := next(_find_problems(self), None)) is not None:
            raise CollectError(problem)

    def for_task(self, wanted: object, allowed: SandboxNetwork) -> "ContainerSettings":
        """The settings of one task. `wanted` is its field "sandbox"; raises CollectError for a forbidden value."""
        if wanted is None:
            own = self
        elif not isinstance(wanted, Mapping):
            raise CollectError(f'its sandbox is {wanted!r}; give an object, such as {{"image": "python:3.12"}}')
        else:
            given = {name: value for name, value in wanted.items() if value is not None}
            try:
                own = msgspec.convert(given, ContainerSettings)
            except msgspec.ValidationError as error:
                raise CollectError(f"its sandbox cannot be used: {error}") from None
            if own.mounts:
                raise CollectError("its sandbox has mounts, which a task cannot ask for; give --sandbox-mount")
            changes = {name: getattr(own, name) for name in given}
            if "image" in changes or "build" in changes:
                changes = {"image": None, "build": None} | changes
            own = msgspec.structs.replace(self, **changes | {"env": self.env | own.env})
        network = own.network or allowed
        order = list(SandboxNetwork)
        if order.index(network) > order.index(allowed):
            raise CollectError(
                f"its sandbox wants the network {network}, and the collection allows {allowed}; give --sandbox-network"
            )
        if (own.image is None) == (own.build is None):
            has = "neither an image nor a folder to build one from" if own.image is None else "an image and a build"
            raise CollectError(f'its sandbox has {has}; give --sandbox-image, or "sandbox": {{"image": …}} in the task')
        return msgspec.structs.replace(own, network=network)


def time_limit_of(wanted: object) -> float | None:
    """The time limit in a task's field "sandbox", or None."""
    given = wanted.get("timeout_s") if isinstance(wanted, Mapping) else None
    return float(given) if isinstance(given, int | float) and given > 0 else None


def _find_problems(settings: ContainerSettings) -> Iterator[str]:
    """Yield a description of each problem of the settings."""
    for name in ("image", "build"):
        # podman and docker would read it as a flag, such as one that mounts a folder of this machine.
        if (given := getattr(settings, name) or "").startswith("-"):
            yield f"the container's {name} is {given!r}; give one that does not begin with -"
    if settings.memory is not None and not _MEMORY.fullmatch(settings.memory):
        yield f"the container's memory is {settings.memory!r}; give bytes, or a number with k, m or g"
    elif settings.memory is not None and not settings.memory.strip("0bkmgBKMG"):
        yield f"the container's memory is {settings.memory!r}; give more than 0"
    for name in ("cpus", "timeout_s", "processes"):
        if (value := getattr(settings, name)) is not None and not value > 0:
            yield f"the container's {name} is {value}; give more than 0"
    for name in settings.env:
        if not _VARIABLE.fullmatch(name):
            yield f"the container's env has the name {name!r}; give letters, digits and underscores"
    for path in (settings.workdir or "/", *settings.fetch):
        if path != "." and not PurePosixPath(path).is_absolute():
            yield f"the container's path {path!r} is relative; give an absolute one"
    for mount in settings.mounts:
        source, _, rest = mount.partition(":")
        target, _, mode = rest.partition(":")
        if not Path(source).is_absolute() or not PurePosixPath(target).is_absolute() or mode not in ("", "ro", "rw"):
            yield f"the mount {mount!r} is not /here:/there or /here:/there:rw"
        elif not Path(source).exists():
            yield f"the mount {mount!r}: there is no {source} here"

"""The sandbox flags of `rolltape collect`: what agents that are programs can see and reach."""

import os
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

from rolltape.cli.parameters import option
from rolltape.errors import CollectError, UsageError

if TYPE_CHECKING:
    from rolltape.collect.sandboxes import ContainerSettings

T = TypeVar("T", bound=StrEnum)

_option = partial(option, section="Sandbox")


@dataclass(frozen=True)
class SandboxOptions:
    """What an agent that is a program can see and reach."""

    sandbox: Annotated[
        str,
        _option(
            "--sandbox KIND",
            "Sandbox for agents that are programs, and for checks of their work: bwrap, podman, docker, none, or auto "
            "(bwrap where it works).",
        ),
    ] = "auto"
    sandbox_network: Annotated[
        str,
        _option(
            "--sandbox-network WHICH",
            "What programs in a sandbox can reach: gateway (nothing else), none, bridge (containers), or host.",
        ),
    ] = "gateway"
    sandbox_read: Annotated[
        list[str] | None,
        _option("--sandbox-read PATH", "File or folder that programs in a sandbox can read; repeatable."),
    ] = None
    pass_env: Annotated[
        list[str] | None, _option("--pass-env NAME", "Environment variable to pass to programs; repeatable.")
    ] = None
    image: Annotated[
        str | None, _option("--sandbox-image IMAGE", "Image of containers whose tasks do not name one.")
    ] = None
    cpus: Annotated[float | None, _option("--sandbox-cpus N", "Processors per container (default: all).")] = None
    memory: Annotated[
        str | None, _option("--sandbox-memory SIZE", "Memory per container, such as 2g (default: no limit).")
    ] = None
    processes: Annotated[
        int | None, _option("--sandbox-processes N", "Processes and threads per container (default: 2048).", min=1)
    ] = None
    mount: Annotated[
        list[str] | None,
        _option("--sandbox-mount HERE:THERE", "Mount in containers, read-only unless :rw follows; repeatable."),
    ] = None
    env: Annotated[
        list[str] | None, _option("--sandbox-env NAME=VALUE", "Environment variable of containers; repeatable.")
    ] = None
    user: Annotated[str | None, _option("--sandbox-user USER", "User in containers (default: the image's).")] = None
    workdir: Annotated[
        str | None,
        _option(
            "--sandbox-workdir PATH",
            "Working directory in the image; . for the image's own (default: /workspace, with only the task's files).",
        ),
    ] = None

    def settings(self) -> dict[str, Any]:
        """The fields of `CollectSettings` from these flags."""
        from rolltape.collect.sandboxes import SandboxKind, SandboxNetwork

        if missing := [name for name in self.pass_env or () if name not in os.environ]:
            raise UsageError(f"--pass-env {missing[0]}: this variable is not set; set it, or leave the flag out")
        kind = _parse_choice("--sandbox", self.sandbox, SandboxKind)
        container = self._container()
        if container is not None and not kind.has_images:
            raise UsageError(f"{container[0]}: only containers have this; give --sandbox podman or --sandbox docker")
        return {
            "sandbox": kind,
            "sandbox_network": _parse_choice("--sandbox-network", self.sandbox_network, SandboxNetwork),
            "sandbox_read": tuple(self.sandbox_read or ()),
            "pass_env": tuple(self.pass_env or ()),
            **({} if container is None else {"container": container[1]}),
        }

    def _container(self) -> "tuple[str, ContainerSettings] | None":
        """The first flag about containers that was given, and the settings from all of them; None if none was given."""
        from rolltape.collect.sandboxes import ContainerSettings

        flags = {
            "--sandbox-image": ("image", self.image),
            "--sandbox-cpus": ("cpus", self.cpus),
            "--sandbox-memory": ("memory", self.memory),
            "--sandbox-processes": ("processes", self.processes),
            "--sandbox-mount": ("mounts", tuple(map(_with_absolute_source, self.mount or ())) or None),
            "--sandbox-env": ("env", dict(map(_parse_variable, self.env or ())) or None),
            "--sandbox-user": ("user", self.user),
            "--sandbox-workdir": ("workdir", self.workdir),
        }
        given = {flag: field for flag, field in flags.items() if field[1] is not None}
        if not given:
            return None
        try:
            settings = msgspec.convert(dict(given.values()), ContainerSettings)
        except (CollectError, msgspec.ValidationError) as error:
            raise UsageError(str(error)) from None
        return next(iter(given)), settings


def _with_absolute_source(mount: str) -> str:
    source, colon, rest = mount.partition(":")
    return f"{Path(source).absolute()}{colon}{rest}"


def _parse_variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--sandbox-env {text}: there is no value; write NAME=VALUE, or use --pass-env")
    return name, value


def _parse_choice(flag: str, given: str, kind: type[T]) -> T:
    try:
        return kind(given)
    except ValueError:
        raise UsageError(f"{flag} {given}: unknown; use {', '.join(kind)}") from None

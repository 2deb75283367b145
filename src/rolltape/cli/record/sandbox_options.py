"""The sandbox flags of `rolltape collect`: what agents that are programs can see and reach."""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rolltape.cli.parameters import option, values_for
from rolltape.collect.sandboxes import ContainerSettings, SandboxKind, SandboxNetwork
from rolltape.errors import CollectError, UsageError

_option = partial(option, section="Sandbox")


@dataclass(frozen=True)
class SandboxOptions:
    """What an agent that is a program can see and reach."""

    sandbox: Annotated[
        SandboxKind,
        _option(
            "--sandbox KIND",
            "Sandbox for agents that are programs, and for checks of their work: bwrap, podman, docker, none, or auto "
            "(bwrap where it works).",
        ),
    ] = SandboxKind.AUTO
    sandbox_network: Annotated[
        SandboxNetwork,
        _option(
            "--sandbox-network WHICH",
            "What programs in a sandbox can reach: gateway (nothing else), none, bridge (containers), or host.",
        ),
    ] = SandboxNetwork.GATEWAY
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
        if missing := [name for name in self.pass_env or () if name not in os.environ]:
            raise UsageError(f"--pass-env {missing[0]}: this variable is not set; set it, or leave the flag out")
        return {
            "sandbox": self.sandbox,
            "sandbox_network": self.sandbox_network,
            "sandbox_read": tuple(self.sandbox_read or ()),
            "pass_env": tuple(self.pass_env or ()),
            "container": self._container(),
        }

    def _container(self) -> ContainerSettings:
        """The settings of containers. Other sandboxes have none, so their flags are refused."""
        fields = {
            **values_for(ContainerSettings, self),
            "mounts": tuple(map(_with_absolute_source, self.mount or ())) or None,
            "env": dict(map(_parse_variable, self.env or ())) or None,
        }
        given = {name: value for name, value in fields.items() if value is not None}
        if given and not self.sandbox.has_images:
            flag = "--sandbox-mount" if "mounts" in given else f"--sandbox-{next(iter(given))}"
            raise UsageError(f"{flag}: only containers have this; give --sandbox podman or --sandbox docker")
        try:
            return msgspec.convert(given, ContainerSettings)
        except (CollectError, msgspec.ValidationError) as error:
            raise UsageError(str(error)) from None


def _with_absolute_source(mount: str) -> str:
    source, colon, rest = mount.partition(":")
    return f"{Path(source).absolute()}{colon}{rest}"


def _parse_variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--sandbox-env {text}: there is no value; write NAME=VALUE, or use --pass-env")
    return name, value

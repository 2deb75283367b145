"""Sandboxes limit what agents that are programs, and checks of their work, can see and reach."""

from rolltape.collect.sandboxes.container_program import ContainerOwner
from rolltape.collect.sandboxes.container_settings import ContainerSettings, time_limit_of
from rolltape.collect.sandboxes.opening import open_sandbox
from rolltape.collect.sandboxes.protocol import Confinement, Sandbox, Sandboxes, SandboxKind, SandboxNetwork
from rolltape.collect.sandboxes.running import Unconfined, refuse_image

__all__ = [
    "Confinement",
    "ContainerOwner",
    "ContainerSettings",
    "Sandbox",
    "SandboxKind",
    "SandboxNetwork",
    "Sandboxes",
    "Unconfined",
    "open_sandbox",
    "refuse_image",
    "time_limit_of",
]

"""Sandboxes: what agents that are programs, and checks of what they left, can see and reach."""

from rolltape.collect.sandboxes.opening import open_sandbox
from rolltape.collect.sandboxes.protocol import Confinement, Sandbox, SandboxKind, SandboxNetwork
from rolltape.collect.sandboxes.running import Unconfined

__all__ = ["Confinement", "Sandbox", "SandboxKind", "SandboxNetwork", "Unconfined", "open_sandbox"]

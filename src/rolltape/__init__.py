"""The flight recorder for LLM reinforcement learning.

tape = rolltape.open("runs/exp1")           record
run = rolltape.read("runs/exp1")            read, also while it is being written
made = rolltape.linearize(rollout, "exact")   samples and ledger under a policy
stream = rolltape.groups(tape, step=3)        whole groups for a trainer, as they complete
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rolltape.errors import RolltapeError

if TYPE_CHECKING:
    from rolltape.capture.gateway import Gateway
    from rolltape.feed import show_batch, show_step
    from rolltape.records.policy import Policy, policy
    from rolltape.samples import Linearized, linearize, samples_of_group, show
    from rolltape.sinks import jsonl_sink, trackio_sink
    from rolltape.supply import Group, Room, groups
    from rolltape.tape.journal import Durability
    from rolltape.tape.prune import prune
    from rolltape.tape.recorder import RolloutRecorder, SessionRecorder
    from rolltape.tape.run import Run, read
    from rolltape.tape.seal import seal
    from rolltape.tape.tape import Tape
    from rolltape.tape.tape import open_tape as open  # noqa: A004 - rolltape.open is the name of the thing
    from rolltape.tokens import TokenExporter
    from rolltape.traces import TraceWriter, trace_of, traces_from_batch
    from rolltape.tree import forks_of, tree_of

# Loaded when first used: a program that only records need not wait for what reads Parquet.
_HOMES = {
    "Durability": "rolltape.tape.journal",
    "Gateway": "rolltape.capture.gateway",
    "Group": "rolltape.supply",
    "Linearized": "rolltape.samples",
    "Policy": "rolltape.records.policy",
    "RolloutRecorder": "rolltape.tape.recorder",
    "Room": "rolltape.supply",
    "Run": "rolltape.tape.run",
    "SessionRecorder": "rolltape.tape.recorder",
    "Tape": "rolltape.tape.tape",
    "TokenExporter": "rolltape.tokens",
    "TraceWriter": "rolltape.traces",
    "forks_of": "rolltape.tree",
    "groups": "rolltape.supply",
    "jsonl_sink": "rolltape.sinks",
    "linearize": "rolltape.samples",
    "open": "rolltape.tape.tape",
    "policy": "rolltape.records.policy",
    "prune": "rolltape.tape.prune",
    "read": "rolltape.tape.run",
    "samples_of_group": "rolltape.samples",
    "seal": "rolltape.tape.seal",
    "show": "rolltape.samples",
    "show_batch": "rolltape.feed",
    "show_step": "rolltape.feed",
    "trace_of": "rolltape.traces",
    "traces_from_batch": "rolltape.traces",
    "trackio_sink": "rolltape.sinks",
    "tree_of": "rolltape.tree",
}

__all__ = [
    "Durability",
    "Gateway",
    "Group",
    "Linearized",
    "Policy",
    "RolloutRecorder",
    "RolltapeError",
    "Room",
    "Run",
    "SessionRecorder",
    "Tape",
    "TokenExporter",
    "TraceWriter",
    "forks_of",
    "groups",
    "jsonl_sink",
    "linearize",
    "open",
    "policy",
    "prune",
    "read",
    "samples_of_group",
    "seal",
    "show",
    "show_batch",
    "show_step",
    "trace_of",
    "traces_from_batch",
    "trackio_sink",
    "tree_of",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rolltape' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), "open_tape" if name == "open" else name)
    globals()[name] = value
    return value

"""The flight recorder for LLM reinforcement learning.

tape = rolltape.open("runs/exp1")           record
run = rolltape.read("runs/exp1")            read, also while it is being written
made = rolltape.linearize(rollout, "exact")   samples and ledger under a cut policy
stream = tape.groups(step=3)                  whole groups for a trainer, as they complete
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rolltape.errors import RolltapeError

if TYPE_CHECKING:
    from rolltape.gateway.gateway import Gateway
    from rolltape.groups import Group, Room
    from rolltape.records.policy import Credit, CutPolicy, Policy, cut_policy, policy
    from rolltape.samples import Comparison, Linearized, compare, linearize, samples_of_group, show
    from rolltape.tape.journal.writing import Durability
    from rolltape.tape.recording.recorder import RolloutRecorder, SessionRecorder
    from rolltape.tape.recording.tape import Tape
    from rolltape.tape.recording.tape import open_tape as open  # noqa: A004 - rolltape.open is the name of the thing
    from rolltape.tape.run import Run, read
    from rolltape.tape.shards.prune import prune
    from rolltape.tape.shards.seal import seal
    from rolltape.tokens import TokenExporter
    from rolltape.traces import TraceWriter, trace_of, traces_from_batch
    from rolltape.tracking import jsonl_sink, show_batch, show_step, trackio_sink
    from rolltape.tree import forks_of, tree_of

# Loaded when first used: a program that only records need not wait for what reads Parquet.
_HOMES = {
    "Comparison": "rolltape.samples",
    "Credit": "rolltape.records.policy",
    "CutPolicy": "rolltape.records.policy",
    "Durability": "rolltape.tape.journal.writing",
    "Gateway": "rolltape.gateway.gateway",
    "Group": "rolltape.groups",
    "Linearized": "rolltape.samples",
    "Policy": "rolltape.records.policy",
    "RolloutRecorder": "rolltape.tape.recording.recorder",
    "Room": "rolltape.groups",
    "Run": "rolltape.tape.run",
    "SessionRecorder": "rolltape.tape.recording.recorder",
    "Tape": "rolltape.tape.recording.tape",
    "TokenExporter": "rolltape.tokens",
    "TraceWriter": "rolltape.traces",
    "compare": "rolltape.samples",
    "cut_policy": "rolltape.records.policy",
    "forks_of": "rolltape.tree",
    "jsonl_sink": "rolltape.tracking",
    "linearize": "rolltape.samples",
    "open": "rolltape.tape.recording.tape",
    "policy": "rolltape.records.policy",
    "prune": "rolltape.tape.shards.prune",
    "read": "rolltape.tape.run",
    "samples_of_group": "rolltape.samples",
    "seal": "rolltape.tape.shards.seal",
    "show": "rolltape.samples",
    "show_batch": "rolltape.tracking",
    "show_step": "rolltape.tracking",
    "trace_of": "rolltape.traces",
    "traces_from_batch": "rolltape.traces",
    "trackio_sink": "rolltape.tracking",
    "tree_of": "rolltape.tree",
}

__all__ = [
    "Comparison",
    "Credit",
    "CutPolicy",
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
    "compare",
    "cut_policy",
    "forks_of",
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
    if name == "groups":
        return import_module("rolltape.groups")
    if name == "Policy":
        warnings.warn(
            "rolltape.Policy is deprecated; use rolltape.CutPolicy and rolltape.Credit",
            DeprecationWarning,
            stacklevel=2,
        )
        return import_module(_HOMES[name]).Policy
    if name not in _HOMES:
        raise AttributeError(f"module 'rolltape' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), "open_tape" if name == "open" else name)
    globals()[name] = value
    return value

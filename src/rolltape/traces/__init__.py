"""Traces: the readable record of a rollout, and the API by which an environment adds to it.

trace = TraceWriter(rollout)            while the rollout runs
trace.step(turn=turn, reward=0.5)
trace_of(rollout).total_reward         from the tape
"""

import warnings
from importlib import import_module
from typing import Any

from rolltape.records.trace import Trace, TraceStep
from rolltape.traces.build import trace_of
from rolltape.traces.writer import Capture, TraceWriter, amend

_MOVED = ("traces_from_batch", "traces_from_batch_async")

__all__ = ["Capture", "Trace", "TraceStep", "TraceWriter", "amend", "trace_of"]


def __getattr__(name: str) -> Any:
    if name not in _MOVED:
        raise AttributeError(f"module 'rolltape.traces' has no attribute {name!r}")
    warnings.warn(f"rolltape.traces.{name} is now in rolltape.tracking", DeprecationWarning, stacklevel=2)
    return getattr(import_module("rolltape.tracking"), name)

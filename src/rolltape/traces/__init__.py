"""Traces: the readable record of a rollout, and the API that an environment calls to add to it.

trace = TraceWriter(rollout)            while the rollout runs
trace.step(turn=turn, reward=0.5)
trace_of(rollout).total_reward         from the tape
"""

from rolltape.records.trace import Trace, TraceStep
from rolltape.renamed import renamed
from rolltape.traces.build import trace_of
from rolltape.traces.writer import Capture, TraceWriter, amend

__all__ = ["Capture", "Trace", "TraceStep", "TraceWriter", "amend", "trace_of"]


__getattr__ = renamed(
    __name__,
    {name: f"rolltape.tracking.{name}" for name in ("traces_from_batch", "traces_from_batch_async")},
)

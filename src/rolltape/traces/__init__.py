"""Rollouts → traces, and the little API that an environment calls."""

from rolltape.traces.amend import amend
from rolltape.traces.batch import traces_from_batch, traces_from_batch_async
from rolltape.traces.build import trace_of
from rolltape.traces.capture import Capture
from rolltape.traces.writer import TraceWriter

__all__ = ["Capture", "TraceWriter", "amend", "trace_of", "traces_from_batch", "traces_from_batch_async"]

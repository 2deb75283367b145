"""Records → trackers: rollouts, traces and step summaries sent to where people look at their runs."""

from rolltape.records.choice import Choice
from rolltape.records.summary import ShownStep, StepSummary
from rolltape.tracking.jsonl import jsonl_sink
from rolltape.tracking.outbox import Outbox
from rolltape.tracking.showing import show_batch, show_step
from rolltape.tracking.sink import Delivery, Sink, Tracker
from rolltape.tracking.steps import StepKey, settled_steps, split_of
from rolltape.tracking.taped import step_of_tape
from rolltape.tracking.trackio import trackio_sink

__all__ = [
    "Choice",
    "Delivery",
    "Outbox",
    "ShownStep",
    "Sink",
    "StepKey",
    "StepSummary",
    "Tracker",
    "jsonl_sink",
    "settled_steps",
    "show_batch",
    "show_step",
    "split_of",
    "step_of_tape",
    "trackio_sink",
]

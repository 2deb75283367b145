"""Sends a few traces and a summary of each step to a tracker, from a training loop, a batch or a run on disk.

with rolltape.tracking.trackio_sink(project="sums") as sink:
    rolltape.tracking.show_batch(sink, batch, tokenizer, split="train", step=3)
"""

from rolltape.renamed import renamed
from rolltape.tracking import opening
from rolltape.tracking.batch import show_batch, traces_from_batch, traces_from_batch_async
from rolltape.tracking.choice import Choice
from rolltape.tracking.opening import *  # noqa: F403 - the sink of every tracker
from rolltape.tracking.push import StepKey, load_step, settled_steps, show_step, split_of
from rolltape.tracking.sinks import DeliveryReport, Outbox, Sink, Tracker
from rolltape.tracking.summary import ShownStep, StepSummary, step_metrics

__all__ = [
    "Choice",
    "DeliveryReport",
    "Outbox",
    "ShownStep",
    "Sink",
    "StepKey",
    "StepSummary",
    "Tracker",
    "load_step",
    "settled_steps",
    "show_batch",
    "show_step",
    "split_of",
    "step_metrics",
    "traces_from_batch",
    "traces_from_batch_async",
]
__all__ += opening.__all__

__getattr__ = renamed(__name__, {"Delivery": "DeliveryReport", "step_of_tape": "load_step"})

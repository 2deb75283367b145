"""Records → trackers."""

from rolltape.records.choice import Choice
from rolltape.records.summary import ShownStep, StepSummary
from rolltape.sinks.jsonl import jsonl_sink
from rolltape.sinks.outbox import Outbox
from rolltape.sinks.sink import Delivery, Sink, Tracker
from rolltape.sinks.trackio import trackio_sink

__all__ = ["Choice", "Delivery", "Outbox", "ShownStep", "Sink", "StepSummary", "Tracker", "jsonl_sink", "trackio_sink"]

"""Tapes and batches → sinks: what needs traces, samples and trackers at once."""

from rolltape.feed.showing import show_batch, show_step
from rolltape.feed.steps import StepKey, settled_steps, split_of
from rolltape.feed.taped import step_of_tape

__all__ = ["StepKey", "settled_steps", "show_batch", "show_step", "split_of", "step_of_tape"]

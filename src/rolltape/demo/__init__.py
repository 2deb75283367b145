"""The demo of `rolltape demo`: the shipped model learns from its recorded rollouts, and the page shows them."""

from rolltape.demo.learning import TASKS, LearnedStep, learn
from rolltape.demo.scripted import record as record_scripted

__all__ = ["TASKS", "LearnedStep", "learn", "record_scripted"]

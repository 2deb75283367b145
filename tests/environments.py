"""Toy environment loops that tests trace, and what the tape holds of them."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import rolltape
from rolltape.records.rollout import EventKind, Rollout
from rolltape.records.trace import Trace
from rolltape.tape.recording.rollout import RolloutRecorder
from rolltape.traces import TraceWriter, trace_of
from taped import assistant, user


@contextmanager
def traced(path: Path, **fields: Any) -> Iterator[tuple[RolloutRecorder, TraceWriter]]:
    """A rollout without a gateway, open for steps."""
    with rolltape.open(path) as tape, tape.rollout(task_id="guess") as rollout:
        yield rollout, TraceWriter(rollout, **fields)
        if rollout.is_open:
            rollout.finish()


def guesses(writer: TraceWriter, steps: int, first: str = "guess a number") -> list[list[dict[str, Any]]]:
    """A conversation that grows in place, as most environments keep it; the prompts as they were."""
    messages = [user(first)]
    prompts = []
    for index in range(steps):
        prompts.append(copy.deepcopy(messages))
        reply = assistant(f"is it {index}?")
        writer.step(prompt=messages, policy_response=reply, reward=0.0)
        messages += [reply, user(f"no, it is not {index}")]
    return prompts


def trace_at(path: Path) -> Trace:
    return trace_of(only_rollout(path))


def only_rollout(path: Path) -> Rollout:
    (rollout,) = rolltape.read(path).rollouts()
    return rollout


def trace_events(path: Path) -> list[dict[str, Any]]:
    return [event.data for event in rolltape.read(path).events() if event.kind == EventKind.TRACE]

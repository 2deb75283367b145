"""Attempts recorded for streams of groups: begun, ended, broken and rewarded one by one."""

from typing import Any

import rolltape
from rolltape.groups import GroupStream
from rolltape.records.rollout import EventKind
from rolltape.tape.recording.rollout import RolloutRecorder
from rolltape.tape.recording.tape import Tape
from taped import first_turn

SOURCE = "sums"


def collects(tape: Tape, size: int, step: int = 0) -> None:
    """Say that a collection has begun, as the collector does."""
    tape.append_run_event(EventKind.COLLECT, {"settings": {"step": step, "source": SOURCE, "group_size": size}})


def collected(tape: Tape, step: int = 0) -> None:
    """Say that it has come to its end."""
    tape.append_run_event(EventKind.COLLECTED, {"step": step, "source": SOURCE})


def begin(tape: Tape, task: str, attempt: int, *, step: int = 0, version: str = "1", **more: Any) -> RolloutRecorder:
    """An attempt with one turn, still open."""
    rollout = tape.rollout(task_id=task, source=SOURCE, step=step, attempt=attempt, **more)
    first_turn(rollout.session(), weight_version=version)
    return rollout


def record(tape: Tape, task: str, *rewards: float | None, step: int = 0, version: str = "1") -> None:
    """A group's attempts, all of them finished."""
    for attempt, reward in enumerate(rewards):
        begin(tape, task, attempt, step=step, version=version).finish(reward=reward)


def stream(tape: Tape, **options: Any) -> GroupStream:
    """Groups with short waits; it ends when nothing comes."""
    return tape.groups(**{"idle_s": 0.0, "poll_s": 0.001, **options})


def tasks(given: list[rolltape.Group]) -> list[str | None]:
    return [group.task_id for group in given]

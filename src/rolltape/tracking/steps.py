"""The steps of a run, split by split, and which of them are over."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from rolltape.records.ids import split_in
from rolltape.records.rollout import EventKind, Status
from rolltape.tape.run import RolloutRow, Run


class StepKey(NamedTuple):
    """One split at one step."""

    step: int
    split: str


class Settled(NamedTuple):
    """Steps that can be shown, and those that have to wait, with how many of their rollouts still run."""

    steps: list[StepKey]
    waiting: dict[StepKey, int]


def split_of(source: str | None, default: str = "train") -> str:
    """The split that a source names; `default` if it names none."""
    return split_in(source) or default


def by_step(rows: Iterable[RolloutRow], default_split: str = "train") -> dict[StepKey, list[RolloutRow]]:
    """A run's rollouts, step by step and split by split."""
    found: dict[StepKey, list[RolloutRow]] = {}
    for row in rows:
        found.setdefault(StepKey(row.head.step, split_of(row.head.source, default_split)), []).append(row)
    return dict(sorted(found.items()))


def settled_steps(
    steps: Mapping[StepKey, Sequence[RolloutRow]], *, growing: bool, collected: Collection[StepKey] = ()
) -> Settled:
    """The steps of which no rollout runs, and that are not being `collected`.

    While the run is growing, the latest one of each split waits for more.
    """
    latest = {split: max(key.step for key in steps if key.split == split) for split in {key.split for key in steps}}
    settled, waiting = [], {}
    for key, rows in steps.items():
        running = sum(row.outcome.status is Status.RUNNING for row in rows)
        if running or key in collected or (growing and key.step == latest[key.split]):
            waiting[key] = running
        else:
            settled.append(key)
    return Settled(settled, waiting)


def being_collected(run: Run, default_split: str = "train") -> set[StepKey]:
    """The steps that a living process collects: it said that it began, and has not said that it came to the end."""
    alive = run.writers()
    at_work: dict[tuple[str, StepKey], bool] = {}
    said = [*run.remarks(EventKind.COLLECT), *run.remarks(EventKind.COLLECTED)] if alive else []
    for event in sorted(said, key=lambda event: event.order):
        begins = event.kind == EventKind.COLLECT
        data = event.data["settings"] if begins else event.data
        at_work[event.writer, StepKey(data["step"], split_of(data["source"], default_split))] = begins
    return {key for (writer, key), begins in at_work.items() if begins and writer in alive}


def is_growing(run: Run) -> bool:
    """Whether a process on this machine writes the run."""
    return bool(run.writers())

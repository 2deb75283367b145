"""Group the rollouts of a run by step and split, and find the steps that have settled."""

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
    """Steps that can be shown, and those that must wait with how many of their rollouts still run."""

    steps: list[StepKey]
    waiting: dict[StepKey, int]


def split_of(source: str | None, default: str = "train") -> str:
    """The split that a source names; `default` if it names none."""
    return split_in(source) or default


def by_step(rows: Iterable[RolloutRow], default_split: str = "train") -> dict[StepKey, list[RolloutRow]]:
    """Group rollouts by step and split, in order."""
    found: dict[StepKey, list[RolloutRow]] = {}
    for row in rows:
        found.setdefault(StepKey(row.head.step, split_of(row.head.source, default_split)), []).append(row)
    return dict(sorted(found.items()))


def settled_steps(
    steps: Mapping[StepKey, Sequence[RolloutRow]], *, growing: bool, collected: Collection[StepKey] = ()
) -> Settled:
    """Find the steps without a running rollout that are not being `collected`.

    While the run is growing, the latest step of each split waits for more rollouts.
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
    """The steps that a living process is collecting: it recorded that it began, and not yet that it ended."""
    alive = run.writers()
    collecting: dict[tuple[str, StepKey], bool] = {}
    events = [*run.remarks(EventKind.COLLECT), *run.remarks(EventKind.COLLECTED)] if alive else []
    for event in sorted(events, key=lambda event: event.order):
        begins = event.kind == EventKind.COLLECT
        data = event.data["settings"] if begins else event.data
        collecting[event.writer, StepKey(data["step"], split_of(data["source"], default_split))] = begins
    return {key for (writer, key), begins in collecting.items() if begins and writer in alive}


def is_growing(run: Run) -> bool:
    """Whether a process on this machine is writing the run."""
    return bool(run.writers())

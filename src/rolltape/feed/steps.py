"""The steps of a run, split by split, and which of them are over."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from rolltape.records.rollout import Status
from rolltape.tape.owner import is_alive
from rolltape.tape.places import Place
from rolltape.tape.run import RolloutRow, Run
from rolltape.tape.rundir import RunDirectory


class StepKey(NamedTuple):
    """One split at one step."""

    step: int
    split: str


class Settled(NamedTuple):
    """Steps that can be shown, and those that have to wait, with how many of their rollouts still run."""

    steps: list[StepKey]
    waiting: dict[StepKey, int]


def split_of(source: str | None, default: str = "train") -> str:
    """The split that a source names after its last "#"; one that names none is the default."""
    _, mark, split = (source or "").rpartition("#")
    return split if mark and split else default


def by_step(rows: Iterable[RolloutRow], default_split: str = "train") -> dict[StepKey, list[RolloutRow]]:
    """A run's rollouts, step by step and split by split."""
    found: dict[StepKey, list[RolloutRow]] = {}
    for row in rows:
        found.setdefault(StepKey(row.head.step, split_of(row.head.source, default_split)), []).append(row)
    return dict(sorted(found.items()))


def settled_steps(steps: Mapping[StepKey, Sequence[RolloutRow]], *, growing: bool) -> Settled:
    """The steps of which no rollout runs. While the run is growing, the latest one of each split waits for more."""
    latest = {split: max(key.step for key in steps if key.split == split) for split in {key.split for key in steps}}
    settled, waiting = [], {}
    for key, rows in steps.items():
        running = sum(row.outcome.status is Status.RUNNING for row in rows)
        if running or (growing and key.step == latest[key.split]):
            waiting[key] = running
        else:
            settled.append(key)
    return Settled(settled, waiting)


def is_growing(run: Run) -> bool:
    """Whether a process on this machine writes the run."""
    place = Place(run.location)
    return place.is_local and any(is_alive(path) for path in RunDirectory.opened(place.root).journal_paths())

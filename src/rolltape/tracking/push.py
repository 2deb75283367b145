"""Pushes the steps of a run to a tracker, each once it has settled, while the run grows or afterwards."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rolltape.records.ids import split_in
from rolltape.records.policy import CutPolicy
from rolltape.records.rollout import EventKind, Status
from rolltape.samples import counted_tries, linearize
from rolltape.tape.run import RolloutRow, Run
from rolltape.traces import trace_of
from rolltape.tracking.choice import Allowance, Candidate, Pick
from rolltape.tracking.sinks import Sink, Tracker
from rolltape.tracking.summary import ShownStep, StepTally


class StepKey(NamedTuple):
    """One split at one step."""

    step: int
    split: str


class Settled(NamedTuple):
    """Steps that can be shown, and those that must wait with how many of their rollouts still run."""

    steps: list[StepKey]
    waiting: dict[StepKey, int]


def split_of(source: str | None, default: str = "train") -> str:
    """The split that a source names, or `default` if it names none."""
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
    """The steps that a live process is collecting: it recorded that it began, and not yet that it ended."""
    alive = run.writers()
    collecting: dict[tuple[str, StepKey], bool] = {}
    events = [*run.remarks(EventKind.COLLECT), *run.remarks(EventKind.COLLECTED)] if alive else []
    for event in sorted(events, key=lambda event: event.order):
        begins = event.kind == EventKind.COLLECT
        data = event.data["settings"] if begins else event.data
        collecting[event.writer, StepKey(data["step"], split_of(data["source"], default_split))] = begins
    return {key for (writer, key), begins in collecting.items() if begins and writer in alive}


def show_step(
    sink: Sink,
    run: Run,
    *,
    step: int,
    split: str = "train",
    policy: CutPolicy | str = "exact",
    view_url: str | None = None,
) -> bool:
    """Queue a step, which the sink reads from the tape later. Return False if the sink dropped it.

    With `view_url`, the address that `rolltape view` prints, every rollout links to its page there. Example:

        rolltape.show_step(sink, rolltape.read("runs/exp1"), step=3)
    """
    return sink.put(lambda pick: load_step(run, StepKey(step, split), pick, policy, view_url=view_url))


def load_step(
    run: Run,
    key: StepKey,
    pick: Pick,
    policy: CutPolicy | str = "exact",
    *,
    default_split: str = "train",
    view_url: str | None = None,
) -> ShownStep:
    """A step as it is on the tape now, with a summary and the traces of the rollouts that `pick` chooses."""
    with run.snapshot() as held:
        rows = by_step(held.index(), default_split).get(key, [])
        return _shown_step(held, key, rows, pick, policy, held.versions(), view_url)


class PushedStep(NamedTuple):
    """A step that was pushed, or was on the tracker before."""

    key: StepKey
    shown: ShownStep | None  # None: it was there already


class Push:
    """Pushes steps that have settled and were not pushed yet. It blocks and raises: do not use it while training."""

    def __init__(
        self,
        run: Run,
        tracker: Tracker,
        *,
        allowance: Allowance,
        policy: CutPolicy | str = "exact",
        default_split: str = "train",
        wanted: Callable[[StepKey], bool] = lambda key: True,
        view_url: str | None = None,
    ) -> None:
        self.run = run
        self._tracker = tracker
        self._allowance = allowance
        self._policy = policy
        self._default_split = default_split
        self._wanted = wanted
        self._view_url = view_url
        self._done: set[StepKey] = set()
        self.waiting: dict[StepKey, int] = {}  # unsettled steps and their running rollouts; 0: more will come

    def round(self, *, follow: bool) -> Iterator[PushedStep]:
        """Push what can be pushed now. With `follow`, a step waits for as long as it may still grow."""
        growing = follow and bool(self.run.writers())
        collected = being_collected(self.run, self._default_split)
        with self.run.snapshot() as held:
            steps = by_step(held.index(), self._default_split)
            settled, waiting = settled_steps(steps, growing=growing, collected=collected)
            self.waiting = {key: running for key, running in waiting.items() if self._wanted(key)}
            versions = held.versions()
            for key in settled:
                if self._wanted(key) and key not in self._done:
                    yield self._push(held, key, steps[key], versions)
                    self._done.add(key)

    def _push(self, held: Run, key: StepKey, rows: Sequence[RolloutRow], versions: Sequence[str]) -> PushedStep:
        if self._tracker.holds(key.split, key.step):
            return PushedStep(key, None)
        shown = _shown_step(held, key, rows, self._allowance.pick, self._policy, versions, self._view_url)
        self._tracker.put(shown)
        return PushedStep(key, shown)


def _shown_step(
    run: Run,
    key: StepKey,
    rows: Sequence[RolloutRow],
    pick: Pick,
    policy: CutPolicy | str,
    versions: Sequence[str],
    view_url: str | None,
) -> ShownStep:
    """Summarize the counted try of each rollout, loaded one at a time.

    They are ordered by attempt, then by task, so the order does not depend on when a rollout began or ended.
    """
    counted = sorted(counted_tries(rows), key=lambda row: (row.head.attempt, row.head.task_id or "", row.id))
    candidates = [Candidate(f"{row.id}.{row.head.try_index}", row.outcome.reward) for row in counted]
    picked = set(pick(key.split, key.step, candidates))
    tally, traces = StepTally(versions), []
    for position, row in enumerate(counted):
        rollout = run.rollout(row.id, row.head.try_index)
        tally.add(linearize(rollout, policy, versions=versions))
        if position in picked:
            traces.append(trace_of(rollout))
    return ShownStep(split=key.split, step=key.step, traces=tuple(traces), summary=tally.summary(), view_url=view_url)

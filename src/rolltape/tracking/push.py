"""Push the steps of a run to a tracker, once each, while the run grows or afterwards."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rolltape.records.choice import Candidate, Pick
from rolltape.records.policy import CutPolicy
from rolltape.samples import counted_tries, linearize
from rolltape.tape.run import RolloutRow, Run
from rolltape.traces import trace_of
from rolltape.tracking.sinks import Allowance, Sink, Tracker
from rolltape.tracking.steps import StepKey, being_collected, by_step, is_growing, settled_steps
from rolltape.tracking.summary import ShownStep, StepTally


def show_step(sink: Sink, run: Run, *, step: int, split: str = "train", policy: CutPolicy | str = "exact") -> bool:
    """Let the sink read a step from the tape when its turn comes. Returns False if the sink dropped it.

    Example:

        rolltape.show_step(sink, rolltape.read("runs/exp1"), step=3)
    """
    return sink.put(lambda pick: load_step(run, StepKey(step, split), pick, policy))


def load_step(
    run: Run, key: StepKey, pick: Pick, policy: CutPolicy | str = "exact", *, default_split: str = "train"
) -> ShownStep:
    """A step as it is on the tape now, with a summary and the traces of the rollouts that `pick` chooses."""
    with run.snapshot() as held:
        rows = by_step(held.index(), default_split).get(key, [])
        return _shown_step(held, key, rows, pick, policy, held.versions())


class PushedStep(NamedTuple):
    """A step that was pushed, or was on the tracker before."""

    key: StepKey
    shown: ShownStep | None  # None: it was there already


class Push:
    """Pushes steps that have settled and were not pushed yet. It blocks and raises, so a training should not use it."""

    def __init__(
        self,
        run: Run,
        tracker: Tracker,
        *,
        allowance: Allowance,
        policy: CutPolicy | str = "exact",
        default_split: str = "train",
        wanted: Callable[[StepKey], bool] = lambda key: True,
    ) -> None:
        self.run = run
        self._tracker = tracker
        self._allowance = allowance
        self._policy = policy
        self._default_split = default_split
        self._wanted = wanted
        self._done: set[StepKey] = set()
        self.waiting: dict[StepKey, int] = {}  # steps that have not settled, and how many rollouts run; 0: more follow

    def round(self, *, follow: bool) -> Iterator[PushedStep]:
        """Push what can be pushed now. With `follow`, a step waits for as long as it may still grow."""
        growing = follow and is_growing(self.run)
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
        shown = _shown_step(held, key, rows, self._allowance.pick, self._policy, versions)
        self._tracker.put(shown)
        return PushedStep(key, shown)


def _shown_step(
    run: Run, key: StepKey, rows: Sequence[RolloutRow], pick: Pick, policy: CutPolicy | str, versions: Sequence[str]
) -> ShownStep:
    """Summarize the counted try of each rollout, loaded one at a time.

    First attempts come first, then by task: an order that does not depend on when a rollout began or ended.
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
    return ShownStep(split=key.split, step=key.step, traces=tuple(traces), summary=tally.summary())

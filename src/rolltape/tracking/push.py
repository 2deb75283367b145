"""A run's steps → a tracker, once each, while the run grows or afterwards."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rolltape.records.policy import CutPolicy
from rolltape.records.summary import ShownStep
from rolltape.tape.run import RolloutRow, Run
from rolltape.tracking.allowance import Allowance
from rolltape.tracking.sink import Tracker
from rolltape.tracking.steps import StepKey, being_collected, by_step, is_growing, settled_steps
from rolltape.tracking.taped import step_of_rows


class PushedStep(NamedTuple):
    """A step that was pushed, or was on the tracker before."""

    key: StepKey
    shown: ShownStep | None  # None: it was there already


class Push:
    """Pushes what has settled and was not pushed yet. Blocks and raises: it is no part of a training."""

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
        self.waiting: dict[StepKey, int] = {}  # not settled, with how many rollouts still run; 0: more are to come

    def round(self, *, follow: bool) -> Iterator[PushedStep]:
        """Push what can be pushed now. To follow means to leave a step alone for as long as it may still grow."""
        growing = follow and is_growing(self.run)
        collected = being_collected(self.run, self._default_split)
        with self.run.snapshot() as held:
            steps = by_step(held.index(), self._default_split)
            settled, waiting = settled_steps(steps, growing=growing, collected=collected)
            self.waiting = {key: running for key, running in waiting.items() if self._wanted(key)}
            versions = held.versions()
            for key in settled:
                if self._wanted(key) and key not in self._done:
                    yield self._pushed(held, key, steps[key], versions)
                    self._done.add(key)

    def _pushed(self, held: Run, key: StepKey, rows: Sequence[RolloutRow], versions: Sequence[str]) -> PushedStep:
        if self._tracker.holds(key.split, key.step):
            return PushedStep(key, None)
        shown = step_of_rows(held, key, rows, self._allowance.pick, self._policy, versions)
        self._tracker.put(shown)
        return PushedStep(key, shown)

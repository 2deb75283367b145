"""Which rollouts of a source at a step a run already holds. It takes a few bytes per rollout, whatever their number."""

import enum
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rolltape.records.rollout import EventKind, Status
from rolltape.tape.index.index import STATUS_CODES as CODES
from rolltape.tape.run import Run


class RolloutState(enum.IntFlag):
    """What a run holds of a rollout, over all its tries; 0 if it was never started."""

    FINISHED = 1
    BROKEN = 2  # failed or lost
    RUNNING = 4  # in a process that is alive
    UNREWARDED = 8  # finished, and without a reward so far
    TAKEN = FINISHED | RUNNING  # not to be run again


_STATES = {
    Status.RUNNING: RolloutState.RUNNING,
    Status.FINISHED: RolloutState.FINISHED,
    Status.FAILED: RolloutState.BROKEN,
    Status.LOST: RolloutState.BROKEN,
}


class EarlierRollouts:
    """The rollouts of a source at a step that a run already holds, by id."""

    def __init__(self, standings: npt.NDArray[Any], models: frozenset[str]) -> None:
        self.models = models  # that were asked
        finished = standings["status"] == CODES[Status.FINISHED]
        states = np.zeros(len(CODES), np.uint8)
        for status, code in CODES.items():
            states[code] = _STATES[status]
        self._ids, places = np.unique(standings["id"], return_inverse=True)
        self._states = np.zeros(len(self._ids), np.uint8)
        np.bitwise_or.at(self._states, places, states[standings["status"]])
        np.bitwise_or.at(self._states, places[finished & ~standings["rewarded"]], np.uint8(RolloutState.UNREWARDED))
        self.attempts = _count_distinct(standings["attempt"][finished])  # an attempt of several seats counts once
        self.running = int((self._states & RolloutState.TAKEN == RolloutState.RUNNING).sum())

    @property
    def some_unrewarded(self) -> bool:
        """Whether one of them has finished without a reward so far."""
        return bool((self._states & RolloutState.UNREWARDED).any())

    def __bool__(self) -> bool:
        return len(self._ids) > 0

    def states(self, rollouts: Sequence[str]) -> list[int]:
        """The RolloutState of each of these, as plain numbers."""
        if not self:
            return [0] * len(rollouts)
        ids = np.frombuffer(bytes.fromhex("".join(rollouts)), self._ids.dtype)
        places = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        states: list[int] = np.where(self._ids[places] == ids, self._states[places], 0).tolist()
        return states


def _count_distinct(values: npt.NDArray[Any]) -> int:
    # Much quicker here than numpy's unique.
    return int(np.count_nonzero(np.diff(np.sort(values)))) + bool(len(values))


def load_earlier(run: Run, source: str, step: int) -> EarlierRollouts:
    """Read what a run holds of a source at a step."""
    models = {
        str(event.data["model"])
        for event in run.remarks(EventKind.COLLECT)
        if (event.data["settings"].get("step"), event.data["settings"].get("source")) == (step, source)
        and "model" in event.data
    }
    return EarlierRollouts(run.standings(step=step, source=source), frozenset(models))

"""What a run holds of a source at a step already: a few bytes for each rollout, whatever their number."""

import enum
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rolltape.records.rollout import EventKind, Status
from rolltape.tape.index.index import STATUS_CODES as CODES
from rolltape.tape.run import Run


class State(enum.IntFlag):
    """What became of a rollout so far, over all its tries; 0: it was never begun."""

    FINISHED = 1
    BROKE = 2
    RUNS = 4  # by somebody who is alive
    UNREWARDED = 8  # it has finished, and nothing has rewarded it so far
    TAKEN = FINISHED | RUNS  # not to be run again


_STATES = {
    Status.RUNNING: State.RUNS,
    Status.FINISHED: State.FINISHED,
    Status.FAILED: State.BROKE,
    Status.LOST: State.BROKE,
}


class Known:
    """The rollouts of a source at a step, by id."""

    def __init__(self, standings: npt.NDArray[Any], models: frozenset[str]) -> None:
        self.models = models  # that were asked
        finished = standings["status"] == CODES[Status.FINISHED]
        states = np.zeros(len(CODES), np.uint8)
        for status, code in CODES.items():
            states[code] = _STATES[status]
        self._ids, places = np.unique(standings["id"], return_inverse=True)
        self._states = np.zeros(len(self._ids), np.uint8)
        np.bitwise_or.at(self._states, places, states[standings["status"]])
        np.bitwise_or.at(self._states, places[finished & ~standings["rewarded"]], np.uint8(State.UNREWARDED))
        self.attempts = _distinct(standings["attempt"][finished])  # those of several seats count once
        self.running = int((self._states & State.TAKEN == State.RUNS).sum())

    @property
    def some_unrewarded(self) -> bool:
        """Whether one of them has finished without a reward so far."""
        return bool((self._states & State.UNREWARDED).any())

    def __bool__(self) -> bool:
        return len(self._ids) > 0

    def of(self, rollouts: Sequence[str]) -> list[int]:
        """What became of each of these, as a State has it."""
        if not self:
            return [0] * len(rollouts)
        ids = np.frombuffer(bytes.fromhex("".join(rollouts)), self._ids.dtype)
        places = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        states: list[int] = np.where(self._ids[places] == ids, self._states[places], 0).tolist()
        return states


def _distinct(values: npt.NDArray[Any]) -> int:
    # Much quicker here than numpy's unique.
    return int(np.count_nonzero(np.diff(np.sort(values)))) + bool(len(values))


def known_of(run: Run, source: str, step: int) -> Known:
    """What became of the rollouts of a source at a step so far."""
    models = {
        str(event.data["model"])
        for event in run.remarks(EventKind.COLLECT)
        if (event.data["settings"].get("step"), event.data["settings"].get("source")) == (step, source)
        and "model" in event.data
    }
    return Known(run.standings(step=step, source=source), frozenset(models))

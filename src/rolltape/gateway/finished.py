"""How a session is finished, what its finish returns, and its rollout, equal to what a reader of the tape would get."""

import time
import warnings
from collections.abc import Mapping
from typing import Any

import msgspec

from rolltape.records.rollout import Event, EventKind, Rollout, Session, Status, StopReason
from rolltape.records.turn import Delivery, Turn
from rolltape.samples import Linearized
from rolltape.tape.recording.rollout import RolloutRecorder


class Ending(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a session is finished, and its rollout too if it was the last open session."""

    reward: float | None = None
    reward_terms: dict[str, float] = {}
    stop_reason: StopReason = StopReason.COMPLETED
    reason: str | None = None
    policy: str = "exact"
    samples: bool = True  # whether to return samples now; they can be made from the tape at any time
    drain_s: float = 30.0  # how long turns in flight may still take


class Finished(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The result of finishing a session, and perhaps its rollout."""

    session: str
    rollout: str
    try_index: int
    group: str
    rollout_ended: bool  # False if other sessions of it are open
    turns: int
    interrupted: int  # turns that took longer than allowed
    linearized: Linearized | None  # samples and ledger; None if not requested, or if the rollout is still open

    @property
    def made(self) -> Linearized | None:
        """The name of `linearized` in 0.1; removed in 0.3."""
        warnings.warn("Finished.made is now Finished.linearized", DeprecationWarning, stacklevel=2)
        return self.linearized


def rollout_of(recorder: RolloutRecorder, deliveries: Mapping[str, Delivery], ending: Ending) -> Rollout:
    """The rollout of a recorder that ended just now, without reading the tape."""
    head = recorder.head
    finish = {"status": Status.FINISHED.value, "stop_reason": ending.stop_reason.value, "reason": ending.reason}
    found: list[tuple[EventKind, dict[str, Any]]] = [(EventKind.FINISH, finish)]
    if ending.reward is not None:
        found.append((EventKind.SCORE, {"reward": ending.reward, "terms": ending.reward_terms}))
    events = [
        Event("", sequence, time.time_ns(), kind.value, head.id, head.try_index, None, None, data)
        for sequence, (kind, data) in enumerate(found)
    ]
    sessions = [
        Session(session.head, [as_delivered(turn, deliveries) for turn in session.turns])
        for session in recorder.sessions
    ]
    return Rollout(head, sessions, events, writer_alive=True)


def as_delivered(turn: Turn, deliveries: Mapping[str, Delivery]) -> Turn:
    """A turn with its latest known delivery."""
    delivery = deliveries.get(turn.id)
    return turn if delivery is None else turn.with_facts(msgspec.structs.replace(turn.facts, delivery=delivery))

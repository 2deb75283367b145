"""A rollout that ended just now, as a reader of the tape would see it, without reading the tape."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rolltape.gateway.finished import as_delivered
from rolltape.gateway.sessions import OpenSession
from rolltape.records.rollout import Event, EventKind, Rollout, Session, Status, StopReason


def ended_rollout(
    session: OpenSession,
    said: Sequence[Event],
    *,
    status: Status,
    stop_reason: StopReason | None,
    reason: str | None,
    reward: float | None,
    terms: Mapping[str, float],
) -> Rollout:
    """The rollout of its only session; `said` is its trace."""
    events = [
        *said,
        _event(session, EventKind.FINISH, {"status": status, "stop_reason": stop_reason, "reason": reason}),
    ]
    if reward is not None:
        events.append(_event(session, EventKind.SCORE, {"reward": reward, "terms": dict(terms)}))
    turns = [as_delivered(turn, session.deliveries) for turn in session.recorder.turns]
    return Rollout(session.rollout.head, [Session(session.recorder.head, turns)], events, writer_alive=True)


def _event(session: OpenSession, kind: EventKind, data: dict[str, Any]) -> Event:
    head = session.rollout.head
    return Event("", 0, time.time_ns(), kind.value, head.id, head.try_index, None, None, data)

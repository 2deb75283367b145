"""`find_fault` decides whether an attempt ended by the policy, which is rewarded, or by the infrastructure."""

from collections.abc import Sequence

from rolltape.collect.agents import AgentOutcome
from rolltape.collect.loops import BlockedTime
from rolltape.gateway.sessions import OpenSession

_SHARE = 0.1  # of an attempt's time: if the infrastructure took this share, a time-out is not the policy's
_SEE_LOGS = "its output is in the folder logs of the run"


def find_fault(
    outcome: AgentOutcome, sessions: Sequence[OpenSession], blocked: BlockedTime, timeout_s: float
) -> str | None:
    """Why the infrastructure caused the end of an attempt, or None if it is the policy's own outcome.

    The sessions are closed: no turn is in flight.
    """
    if outcome.broken is not None:
        return outcome.broken
    if outcome.timed_out and (why := _lost_time(sessions, blocked, timeout_s)) is not None:
        return why
    failure = next((one.failure for one in sessions if one.failure is not None), None)
    if failure is not None:
        return f"the agent ended without a reply to its last request: {failure}"
    return _never_asked(outcome, sessions, timeout_s)


def _lost_time(sessions: Sequence[OpenSession], blocked: BlockedTime, timeout_s: float) -> str | None:
    """Why the infrastructure caused a time-out: it, or a blocked loop, took a tenth of the time."""
    waited_s = sum(one.waited_s for one in sessions)
    blocked_s = blocked.seconds
    if waited_s + blocked_s < _SHARE * timeout_s:
        return None
    parts = []
    if waited_s:
        failure = next((one.failure or one.trouble for one in sessions if one.failure or one.trouble), None)
        parts.append(f"the engine did not answer for {waited_s:.1f} s{f' ({failure})' if failure else ''}")
    if blocked_s:
        parts.append(f"an event loop was blocked for {blocked_s:.1f} s by {blocked.culprit}")
    return f"timed out after {timeout_s:g} s, in which {' and '.join(parts)}"


def _never_asked(outcome: AgentOutcome, sessions: Sequence[OpenSession], timeout_s: float) -> str | None:
    """Why an attempt is broken if its program or function never asked the model; None if it did."""
    is_program = outcome.exit_code is not None or outcome.signal is not None
    if not (is_program or outcome.timed_out) or any(one.turns or one.recorder.turn_count for one in sessions):
        return None
    if outcome.timed_out:
        return f"the agent had not asked the model anything when {timeout_s:g} s were over; {_SEE_LOGS}"
    how = f"exit code {outcome.exit_code}" if outcome.signal is None else f"signal {outcome.signal}"
    why = _SEE_LOGS if outcome.last_error is None else f"its last output: {outcome.last_error}"
    return f"the agent ended with {how} before it had asked the model anything; {why}"

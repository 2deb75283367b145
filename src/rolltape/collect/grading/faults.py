"""Whose fault the end of an attempt was: the policy's, which is rewarded, or the infrastructure's, which is not.

Everything that is known when an agent has ended comes together in `AttemptFacts`; `find_fault` alone decides.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rolltape.collect.agents import AgentOutcome
from rolltape.collect.loops import BlockedTime
from rolltape.gateway.sessions import OpenSession

_SHARE = 0.1  # of an attempt's time: if the infrastructure took so much of it, running out of it is no outcome


class AttemptFacts(NamedTuple):
    """What is known of an attempt whose agent has ended. Its sessions are closed: no turn is in flight."""

    outcome: AgentOutcome
    sessions: Sequence[OpenSession]
    blocked: BlockedTime
    timeout_s: float


def find_fault(facts: AttemptFacts) -> str | None:
    """Why the infrastructure is to blame for how an attempt ended; None: it is the policy's own outcome."""
    outcome = facts.outcome
    if outcome.broken is not None:
        return outcome.broken
    if outcome.timed_out and (why := _lost_time(facts)) is not None:
        return why
    failure = next((one.failure for one in facts.sessions if one.failure is not None), None)
    if failure is not None:
        return f"the agent ended without a reply to its last request: {failure}"
    return _never_asked(facts)


def _lost_time(facts: AttemptFacts) -> str | None:
    """Why a time-out is the infrastructure's: a tenth of the time went to waiting for it, or to a blocked loop."""
    waited_s = sum(one.waited_s for one in facts.sessions)
    blocked_s = facts.blocked.seconds
    if waited_s + blocked_s < _SHARE * facts.timeout_s:
        return None
    parts = []
    if waited_s:
        failure = next((one.failure or one.trouble for one in facts.sessions if one.failure or one.trouble), None)
        parts.append(f"the engine did not answer for {waited_s:.1f} s{f' ({failure})' if failure else ''}")
    if blocked_s:
        parts.append(f"an event loop was blocked for {blocked_s:.1f} s by {facts.blocked.culprit}")
    return f"timed out after {facts.timeout_s:g} s, in which {' and '.join(parts)}"


def _never_asked(facts: AttemptFacts) -> str | None:
    """Why an attempt is broken whose program or function did nothing with the model; None if that is not so."""
    outcome = facts.outcome
    is_program = outcome.exit_code is not None or outcome.signal is not None
    if not (is_program or outcome.timed_out) or any(one.turns or one.recorder.turn_count for one in facts.sessions):
        return None
    if outcome.timed_out:
        return f"the agent had not asked the model anything when {facts.timeout_s:g} s were over; its logs say why"
    how = f"exit code {outcome.exit_code}" if outcome.signal is None else f"signal {outcome.signal}"
    why = "its logs say why" if outcome.last_error is None else f"it printed at last: {outcome.last_error}"
    return f"the agent ended with {how} before it had asked the model anything; {why}"

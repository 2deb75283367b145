"""The agent `python:module:function`: a Python function."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rolltape.collect.agents.protocol import AgentOutcome, Assignment, describe_own_loop, preview_opening
from rolltape.collect.environments.protocol import Ended, drives
from rolltape.collect.functions import call_function, describe_raised
from rolltape.errors import RecordError
from rolltape.records.jsonable import shown
from rolltape.records.rollout import StopReason
from rolltape.tape.recording.fields import as_member


class FunctionAgent:
    """Calls a function, or awaits a coroutine function, with the assignment.

    It returns the last reply's text, an Ended, None, or an AgentOutcome for several seats. An error that it raises
    counts as a fault of the infrastructure, except the gateway's 429 in the exceptions of its clients. A function
    should catch errors that the model caused, and return an Ended with the stop reason.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self._function = function

    def preview(self, assignment: Assignment) -> dict[str, Any]:
        """The fields of the assignment, and the openings of the episode."""
        episode = assignment.episode
        plain = ("version", "rollout", "task", "environment", "max_turns", "timeout_s", "allowed_tools", "denied_tools")
        return {
            **{name: getattr(assignment, name) for name in (*plain, "seed")},
            "connections": {seat: msgspec.to_builtins(one) for seat, one in assignment.connections.items()},
            "episode.opening": {seat: preview_opening(episode.opening(seat)) for seat in episode.seats},
        }

    async def run(self, assignment: Assignment) -> AgentOutcome:
        """Call the function. If it is not a coroutine function, it continues in its thread after the time limit."""
        if drives(assignment.episode):
            return AgentOutcome(ended={}, broken=describe_own_loop(self.name, assignment))
        try:
            async with asyncio.timeout(assignment.timeout_s) as limit:
                given = await call_function(self._function, assignment)
        except Exception as error:  # noqa: BLE001 - anybody's function may raise anything
            if limit.expired():
                return _all_seats(assignment, Ended(stop_reason=StopReason.TIMEOUT), timed_out=True)
            if _is_turn_cap(error):
                return _all_seats(assignment, Ended(stop_reason=StopReason.MAX_TURNS))
            return AgentOutcome(ended={}, broken=f"{self.name} raised {describe_raised(error)}")
        if given is None or isinstance(given, str):
            given = Ended(stop_reason=StopReason.COMPLETED, text=given or "")
        if isinstance(given, Ended):
            given = _all_seats(assignment, given)
        if not isinstance(given, AgentOutcome):
            return AgentOutcome(ended={}, broken=f"{self.name} returned {shown(given)}; return text, an Ended or None")
        try:
            return _checked(given, assignment.episode.seats)
        except RecordError as error:
            return AgentOutcome(ended={}, broken=f"{self.name} returned {error}")


def _all_seats(assignment: Assignment, ended: Ended, *, timed_out: bool = False) -> AgentOutcome:
    by_seat = dict.fromkeys(assignment.episode.seats, ended)
    return AgentOutcome(ended=by_seat, exit_code=ended.exit_code, timed_out=timed_out)


def _checked(outcome: AgentOutcome, seats: Sequence[str]) -> AgentOutcome:
    """An outcome that a function put together, with an Ended for each seat; raises RecordError."""
    if outcome.broken is not None:
        return outcome if outcome.broken else msgspec.structs.replace(outcome, broken="an outcome that is broken")
    ended: dict[str, Ended] = {}
    for seat in seats:
        one = outcome.ended.get(seat)
        if not isinstance(one, Ended):
            raise RecordError(f"{shown(one)} for seat {seat}; return an Ended for each of {', '.join(seats)}")
        where = f"an Ended for seat {seat}"
        if not isinstance(one.text, str):
            raise RecordError(f"{where} whose text is {shown(one.text)}; give a text")
        reason = as_member(StopReason, one.stop_reason, where)
        ended[seat] = one if reason is one.stop_reason else msgspec.structs.replace(one, stop_reason=reason)
    return msgspec.structs.replace(outcome, ended=ended)


def _is_turn_cap(error: BaseException | None) -> bool:
    """Whether an error of openai, anthropic, httpx or aiohttp is the gateway's 429, for one turn too many."""
    while error is not None:
        holders = (error, getattr(error, "response", None))
        if any(getattr(one, name, None) == 429 for one in holders for name in ("status_code", "status")):
            return True
        error = error.__cause__
    return False

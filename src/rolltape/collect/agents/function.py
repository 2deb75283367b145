"""A Python function as an agent: `python:module:function`."""

import asyncio
from collections.abc import Callable
from typing import Any

from rolltape.collect.agents.protocol import Assignment, Outcome
from rolltape.collect.environments.protocol import Ended
from rolltape.collect.threads import called
from rolltape.records.jsonable import shown
from rolltape.records.rollout import StopReason


class FunctionAgent:
    """Calls a function, or awaits a coroutine function, with the assignment.

    It returns the last reply's text, an Ended, nothing, or for several seats an Outcome. What it raises is taken for
    a fault of the infrastructure, except the gateway's 429 in the exceptions of its clients: a function catches what
    the model brought on itself, and returns an Ended that says so.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self._function = function

    async def run(self, assignment: Assignment) -> Outcome:
        """Call it. A function that is no coroutine goes on in its thread after the time limit."""
        try:
            async with asyncio.timeout(assignment.timeout_s) as limit:
                given = await called(self._function, assignment)
        except Exception as error:  # noqa: BLE001 - anybody's function may raise anything
            if limit.expired():
                return _all_seats(assignment, Ended(stop_reason=StopReason.TIMEOUT), timed_out=True)
            if _is_turn_cap(error):
                return _all_seats(assignment, Ended(stop_reason=StopReason.MAX_TURNS))
            return Outcome(ended={}, broken=f"{self.name} raised {type(error).__name__}: {error}")
        if isinstance(given, Outcome):
            return given
        if given is None or isinstance(given, str):
            given = Ended(stop_reason=StopReason.COMPLETED, text=given or "")
        if not isinstance(given, Ended):
            return Outcome(ended={}, broken=f"{self.name} returned {shown(given)}; return text, an Ended or None")
        return _all_seats(assignment, given)


def _all_seats(assignment: Assignment, ended: Ended, *, timed_out: bool = False) -> Outcome:
    return Outcome(ended=dict.fromkeys(assignment.episode.seats, ended), exit_code=ended.exit_code, timed_out=timed_out)


def _is_turn_cap(error: BaseException | None) -> bool:
    """Whether it comes from the gateway's answer to a turn too many, as openai, anthropic, httpx and aiohttp say it."""
    while error is not None:
        holders = (error, getattr(error, "response", None))
        if any(getattr(one, name, None) == 429 for one in holders for name in ("status_code", "status")):
            return True
        error = error.__cause__
    return False

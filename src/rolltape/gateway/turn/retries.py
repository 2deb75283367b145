"""Whether and when to retry after an engine's error, and what to tell the agent otherwise."""

import random
import re
from collections.abc import Callable

from rolltape.errors import EngineError, EngineFailed, EngineFault, EngineUnreachable, PromptTooLong, RequestRefused
from rolltape.gateway.settings import Patience

# Temporary errors: overload, restarts, and servers that return 500 for either.
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
_OF_THE_OPERATOR = frozenset({401, 402, 403, 407})  # errors of the gateway's own key or account
_OF_THE_REQUEST = frozenset({400, 413, 422})  # errors in what the agent sent
_NO_ACCESS = "the endpoint does not accept the gateway's key; see the gateway's log"
# A prompt that is too long, in the words of OpenAI, vLLM, SGLang, llama.cpp, Anthropic and Google.
_TOO_LONG = re.compile(
    r"context_length_exceeded|exceed_context_size"
    r"|(?:maximum|max|model'?s|available|allowed) context (?:length|size|window)"
    r"|longer than the (?:model'?s )?context|exceeds? the (?:\w+ )*context|(?:prompt|input) is too long"
    r"|(?:input|prompt) tokens? (?:count )?[^.]{0,40}exceeds?",
    re.IGNORECASE,
)
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 15.0
_PICK_EVERY_S = 0.5  # while no engine is up; the pool probes them meanwhile


class Retries:
    """The errors of the engines of one turn since the last sampled token."""

    def __init__(self, patience: Patience, now: Callable[[], float]) -> None:
        self._patience = patience
        self._now = now
        self._since: float | None = None  # the first error; None if there was none
        self._errors = 0
        self._faults = 0  # errors without a status, which waiting does not fix

    def next_pause_s(self, error: EngineError, move: Callable[[], bool]) -> float:
        """How long to wait before the next retry; raises EngineFailed if there is none.

        `move` assigns the session to another engine and returns whether there is one; that one did not ask to wait.
        """
        now = self._now()
        self._since = now if self._since is None else self._since
        left = self._since + self._patience.retry_s - now
        if isinstance(error, EngineUnreachable):
            if left <= 0:
                raise EngineFailed(f"no engine answers for {self._patience.retry_s:g} s: {error}") from error
            return min(_PICK_EVERY_S, self._patience.retry_s / 4)
        self._errors += 1
        fault = error if isinstance(error, EngineFault) else None
        status = None if fault is None else fault.status
        self._faults += status is None
        count = "an error" if self._errors == 1 else f"{self._errors} errors"
        if self._faults >= self._patience.faults or (status is not None and status not in _PASSING):
            raise EngineFailed(f"no reply after {count} of the engine, the last: {error}") from error
        asked_s = 0.0 if fault is None or left <= 0 or move() else fault.retry_after_s or 0.0
        if left <= 0 or asked_s > left:
            wait = f" and asks to wait {asked_s:g} s" if asked_s > max(left, 0) else ""
            raise EngineFailed(
                f"no reply after {count} of the engine in {self._patience.retry_s:g} s, the last: {error}{wait}; "
                "--engine-retry sets a longer time"
            ) from error
        pause_s: float = min(_FIRST_PAUSE_S * 2 ** (self._errors - 1), _LONGEST_PAUSE_S)
        return min(max(pause_s * random.uniform(0.5, 1.0), asked_s), left)


def endpoint_failure(failed: EngineFailed, fault: EngineFault) -> EngineFailed:
    """A failure with a hosted endpoint's own status and message, if they concern the agent."""
    why, status = str(failed), fault.status or 500
    if status == 429:
        message = f"the endpoint is busy: {fault.reason}"
        return EngineFailed(why, status=status, agent_message=message, retry_after_s=fault.retry_after_s)
    if status in _OF_THE_OPERATOR:
        return EngineFailed(why, agent_message=_NO_ACCESS, final=True, code="invalid_api_key")
    if status >= 500 or status in _PASSING:
        return failed
    if status not in _OF_THE_REQUEST:  # no such model or path: an error of the operator
        return EngineFailed(why, agent_message=fault.reason, status=status, final=True, code=fault.code)
    if _TOO_LONG.search(f"{fault.code} {fault.reason}"):
        known = "prompt is too long"  # Claude Code (2.1) recognizes the error by these words
        message = fault.reason if known in fault.reason.lower() else f"{known}: {fault.reason}"
        return RequestRefused(why, agent_message=message, status=status, final=True, code=PromptTooLong.code)
    return RequestRefused(why, agent_message=fault.reason, status=status, final=True, code=fault.code)

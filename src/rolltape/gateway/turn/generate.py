"""Sample a reply from prompt ids, across engine failures and weight changes.

What was sampled is kept: after an interruption the reply continues from prompt and partial reply on whichever engine is
available, and no token is sampled twice.
"""

import asyncio
import logging
import random
import re
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec
import numpy as np

from rolltape.errors import (
    EngineDied,
    EngineError,
    EngineFailed,
    EngineFault,
    EngineUnreachable,
    PromptTooLong,
    RequestRefused,
)
from rolltape.gateway.engines.pool import EnginePool
from rolltape.gateway.engines.protocol import Engine, Generated, Generation
from rolltape.gateway.engines.sampled import ImplausibleReply, check_generated, describe_generated
from rolltape.gateway.settings import Patience
from rolltape.gateway.weights import Weights
from rolltape.records.turn import NO_IDS, Finish, Ids

log = logging.getLogger("rolltape.gateway")

INTERRUPTED = "not enforced after an interruption, since no engine takes up a grammar in the middle"
_REFUSALS = frozenset({400, 422})  # statuses with which engines refuse a grammar that they cannot compile

# Statuses that pass: overload, restarts, and servers that give 500 for either.
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
_OF_THE_OPERATOR = frozenset({401, 402, 403, 407})  # the gateway's own key or account
_OF_THE_REQUEST = frozenset({400, 413, 422})  # what the agent sent
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


class PartialGeneration(NamedTuple):
    """What one engine gave in one go, and the version that was announced when it began and when it ended."""

    engine: Engine
    given: Generated
    first_announced: str | None
    last_announced: str | None


class ReplySoFar:
    """A reply as engines give it, part by part, for whoever waits and may leave before it has come."""

    def __init__(self, on_sampled: Callable[[Ids], None] | None = None) -> None:
        self.parts: list[PartialGeneration] = []
        self.left = asyncio.Event()
        self.on_leave: Callable[[], object] | None = None
        self.engine_owes_since: float | None = None  # monotonic: when it was asked, or last gave; None: nothing is owed
        self.engine_errors: list[str] = []
        self.engine_failed = False  # with an error, and nothing was sampled since
        self.unconstrained: str | None = None  # why a constraint does not hold, or not to the end; None: it does
        self.waited_s = 0.0  # for engines that failed, did not answer, or were paused
        self.told = 0  # ids that somebody was told of while they were sampled
        self._on_sampled = on_sampled

    @property
    def sampled(self) -> int:
        """How many ids there are."""
        return sum(len(part.given.ids) for part in self.parts)

    @property
    def ids(self) -> Ids:
        return np.concatenate([NO_IDS, *(part.given.ids for part in self.parts)])

    def waited(self, since: float, why: str) -> None:
        """Note that no engine sampled since a time of the monotonic clock, and why."""
        self.waited_s += time.monotonic() - since
        if why not in self.engine_errors[-1:]:
            self.engine_errors.append(why)

    @property
    def gone(self) -> bool:
        return self.left.is_set()

    def leave(self) -> None:
        """Have engines stop: nobody waits any more."""
        if not self.gone:
            self.left.set()
            if self.on_leave is not None:
                self.on_leave()

    def tell(self, ids: Ids) -> None:
        """Pass on ids that an engine has just sampled."""
        self.engine_owes_since = time.monotonic()
        self.told += len(ids)
        if self._on_sampled is not None:
            self._on_sampled(ids)

    def add(self, part: PartialGeneration) -> None:
        """Keep what an engine gave, and tell of what of it was not told yet."""
        self.parts.append(part)
        untold = self.sampled - self.told
        if untold > 0:
            self.tell(part.given.ids[len(part.given.ids) - untold :])


class Retries:
    """The errors of one turn's engines since they last gave something."""

    def __init__(self, patience: Patience, now: Callable[[], float] = time.monotonic) -> None:
        self._patience = patience
        self._now = now
        self._since: float | None = None  # the first error; None: there was none
        self._errors = 0
        self._faults = 0  # of these: those that time does not heal

    def start_over(self) -> None:
        """Forget earlier errors: an engine gave something, or its weights were changed."""
        self._since, self._errors, self._faults = None, 0, 0

    def next_pause_s(self, error: EngineError, move: Callable[[], bool] = lambda: False) -> float:
        """How long to wait before the next try; raises EngineFailed where there is to be none.

        `move` has the next try made with another engine, if there is one, which did not ask to wait.
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
                "more time is given with --engine-retry"
            ) from error
        pause_s: float = min(_FIRST_PAUSE_S * 2 ** (self._errors - 1), _LONGEST_PAUSE_S)
        return min(max(pause_s * random.uniform(0.5, 1.0), asked_s), left)


class Generator:
    """Continues prompts on the engines there are."""

    def __init__(
        self,
        pool: EnginePool,
        weights: Weights,
        patience: Patience | None = None,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`now` and `sleep` are the clock by which errors are retried."""
        self._pool = pool
        self._weights = weights
        self._patience = patience or Patience()
        self._now = now
        self._sleep = sleep
        self._count = 0
        self._seen: set[str] = set()  # engines whose first reply was looked at

    async def run(self, wanted: Generation, reply: ReplySoFar) -> None:
        """Add to a reply until it has ended or nobody waits for it. What there is stays there."""
        reply.engine_owes_since = time.monotonic()
        retries = Retries(self._patience, self._now)
        try:
            while not reply.gone and _room(wanted, reply) > 0:
                if self._weights.paused:
                    since = time.monotonic()
                    await self._weights.opened(reply.left)
                    reply.waited(since, "the weights were being changed")
                    retries.start_over()
                elif await self._go_on(wanted, reply, retries):
                    return
        finally:
            reply.engine_owes_since = None

    async def _go_on(self, wanted: Generation, reply: ReplySoFar, retries: Retries) -> bool:
        """Ask an engine for what is left, or wait after its error; whether the reply has ended."""
        engine: Engine | None = None
        announced, since = self._weights.version, time.monotonic()
        try:
            engine = self._pool.pick(wanted.session)
            rest = self._rest(wanted, engine, reply)
            try:
                given = await self._ask(engine, rest, reply)
            except EngineFault as error:
                if rest.constraint is None or error.status not in _REFUSALS:
                    raise
                log.warning("%s; it is asked again without a constraint", error)
                reply.unconstrained = "the engine refused the grammar; the model is free"
                given = await self._ask(engine, msgspec.structs.replace(rest, constraint=None), reply)
        except (EngineUnreachable, EngineFault, EngineDied) as error:
            reply.engine_failed = True
            if engine is not None:
                self._note(engine, error)
            try:
                if reply.told > reply.sampled:  # a client has seen the beginning of what is void now
                    raise EngineFailed(f"no reply after an error of the engine in the middle of it: {error}") from error
                await self._wait(retries.next_pause_s(error, lambda: self._pool.move(wanted.session)), reply)
            except EngineFailed as failed:
                if engine is not None and isinstance(error, ImplausibleReply):  # the tape shows what it gave
                    reply.parts.append(PartialGeneration(engine, error.given, announced, self._weights.version))
                if engine is None or engine.token_faithful or not isinstance(error, EngineFault):
                    raise
                raise _as_the_endpoint_says(failed, error) from error
            finally:
                reply.waited(since, str(error))
            return False
        if reply.told > reply.sampled + len(given.ids) and not reply.gone:
            raise EngineFailed(
                f"{engine.name} did not end a reply that was aborted, and clients had seen its beginning"
            )
        if given.finish is Finish.ABORT and not len(given.ids):
            if reply.gone and (stall := await self._find_stall(engine)) is not None:
                reply.waited(since, stall)
            return False
        retries.start_over()
        reply.engine_failed = False
        reply.engine_owes_since = time.monotonic()
        reply.add(PartialGeneration(engine, given, announced, self._weights.version))
        return given.finish is not Finish.ABORT

    async def _find_stall(self, engine: Engine) -> str | None:
        """Why an engine is to blame that gave no token until everybody had left; None if it may have been sampling."""
        if getattr(engine, "keeps_aborted", False):  # of an aborted reply it gives what was sampled
            return f"{engine.name} had not sampled a token"
        try:
            async with asyncio.timeout(self._patience.let_go_s):
                await engine.facts()
        except (EngineUnreachable, EngineFault, TimeoutError) as error:
            return f"{engine.name} does not answer: {error}"
        return None

    def _note(self, engine: Engine, error: EngineError) -> None:
        self._pool.failed(engine, error)
        if not isinstance(error, EngineUnreachable):
            log.warning("%s: %s", engine.name, error)

    async def _wait(self, pause_s: float, reply: ReplySoFar) -> None:
        """Wait, but not where nobody waits for the reply."""
        waits = [asyncio.ensure_future(self._sleep(pause_s)), asyncio.ensure_future(reply.left.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _ask(self, engine: Engine, wanted: Generation, reply: ReplySoFar) -> Generated:
        """What an engine gives, checked; empty only where it was interrupted from here."""
        try:
            given, interrupted = await self._once(engine, wanted, reply)
        except EngineDied as error:
            if not isinstance(error.partial, Generated) or not len(error.partial.ids):
                raise
            self._note(engine, error)
            given, interrupted = error.partial, False
        self._look_at_first(engine, wanted, given)
        if given.finish is Finish.ABORT and len(given.ids) and int(given.ids[-1]) in wanted.stop_ids:
            # The abort came when the stop id had just been sampled: there is nothing to go on with.
            return msgspec.structs.replace(given, finish=Finish.STOP)
        if given.finish is Finish.ABORT and not len(given.ids) and not interrupted:
            # As a server does while its weights are changed; it passes, or the time for errors does.
            why = "it aborts the reply before the first token; pause the gateway while weights are changed"
            raise EngineFault(f"{engine.name}: {why}", status=503)
        return given

    def _look_at_first(self, engine: Engine, wanted: Generation, given: Generated) -> None:
        """Say once what an engine really gives; raises EngineFault for what cannot be a reply."""
        check_generated(engine, wanted, given)
        if engine.name not in self._seen and given.finish is not Finish.ABORT:
            self._seen.add(engine.name)
            log.warning("%s", describe_generated(engine, wanted, given))

    async def _once(self, engine: Engine, wanted: Generation, reply: ReplySoFar) -> tuple[Generated, bool]:
        """What an engine gives, and whether it was interrupted from here."""
        interrupted = False
        task = asyncio.ensure_future(engine.generate(wanted))
        letting_go: set[asyncio.Task[None]] = set()

        def interrupt() -> "asyncio.Task[None]":
            nonlocal interrupted
            interrupted = True
            ending = asyncio.ensure_future(self._let_go(engine, wanted.id, task))
            letting_go.add(ending)
            ending.add_done_callback(letting_go.discard)
            return ending

        self._weights.begin(wanted.id, interrupt)
        reply.on_leave = interrupt
        try:
            return await self._watched(engine, task, reply), interrupted
        except asyncio.CancelledError:
            if not task.cancelled() or (this := asyncio.current_task()) is None or this.cancelling():
                raise
            return _nothing(), True  # it did not end when it was aborted, and was left behind
        finally:
            reply.on_leave = None
            self._weights.end(wanted.id)
            task.cancel()

    async def _watched(self, engine: Engine, task: "asyncio.Future[Generated]", reply: ReplySoFar) -> Generated:
        """A generation's outcome; raises EngineDied for an engine that neither samples nor answers any more."""
        loop = asyncio.get_running_loop()
        began, missed, told = loop.time(), 0, reply.told
        while True:
            done, _ = await asyncio.wait({task}, timeout=self._patience.look_every_s)
            if done:
                return task.result()
            if loop.time() - began > self._patience.reply_s:
                raise EngineFault(f"no reply within {self._patience.reply_s:g} s")
            if reply.told > told:
                missed, told = 0, reply.told
                continue
            try:
                async with asyncio.timeout(self._patience.look_every_s):
                    await engine.facts()
                missed = 0
            except (EngineUnreachable, EngineFault, TimeoutError) as error:
                missed += 1
                if missed == 3 and not task.done():
                    raise EngineDied(f"it does not answer any more: {error}") from error

    async def _let_go(self, engine: Engine, generation: str, task: "asyncio.Future[Generated]") -> None:
        """Abort a generation, and leave it behind if it does not end then."""
        try:
            async with asyncio.timeout(self._patience.let_go_s):
                await engine.abort(generation)
                await asyncio.wait({task})
        except (EngineUnreachable, EngineFault, TimeoutError):
            task.cancel()

    def _rest(self, wanted: Generation, engine: Engine, reply: ReplySoFar) -> Generation:
        """What is still wanted after the parts that there are, under a name of its own."""
        self._count += 1
        name = f"{wanted.id}-{self._count}"
        so_far = reply.ids
        constraint = None
        if wanted.constraint is not None and reply.unconstrained is None:
            constraint = wanted.constraint.after(so_far)
            if constraint is None or not constraint.needs <= engine.abilities:
                constraint, reply.unconstrained = None, INTERRUPTED
        if not reply.parts:
            return msgspec.structs.replace(wanted, id=name, constraint=constraint)
        sampling = msgspec.structs.replace(wanted.sampling, max_tokens=_room(wanted, reply))
        ids = np.concatenate([wanted.prompt_ids, so_far])
        return msgspec.structs.replace(wanted, id=name, prompt_ids=ids, sampling=sampling, constraint=constraint)


def _as_the_endpoint_says(failed: EngineFailed, fault: EngineFault) -> EngineFailed:
    """A failure with a hosted endpoint's own status and message, where they concern the agent."""
    why, status = str(failed), fault.status or 500
    if status == 429:
        told = f"the endpoint is busy: {fault.reason}"
        return EngineFailed(why, status=status, told=told, retry_after_s=fault.retry_after_s)
    if status in _OF_THE_OPERATOR:
        return EngineFailed(why, told=_NO_ACCESS, final=True, code="invalid_api_key")
    if status >= 500 or status in _PASSING:
        return failed
    if status not in _OF_THE_REQUEST:  # no such model, or no such path: what the operator set up
        return EngineFailed(why, told=fault.reason, status=status, final=True, code=fault.code)
    if _TOO_LONG.search(f"{fault.code} {fault.reason}"):
        known = "prompt is too long"  # by these words Claude Code (2.1) knows the error
        told = fault.reason if known in fault.reason.lower() else f"{known}: {fault.reason}"
        return RequestRefused(why, told=told, status=status, final=True, code=PromptTooLong.code)
    return RequestRefused(why, told=fault.reason, status=status, final=True, code=fault.code)


def _room(wanted: Generation, reply: ReplySoFar) -> int:
    """How many tokens may still be sampled."""
    assert wanted.sampling.max_tokens is not None
    return wanted.sampling.max_tokens - reply.sampled


def _nothing() -> Generated:
    return Generated(ids=np.empty(0, np.int32), logprobs=None, finish=Finish.ABORT)

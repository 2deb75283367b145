"""Sample a reply from prompt ids, across engine failures and weight changes.

Sampled tokens are kept. After an interruption the reply continues from the prompt and the partial reply, on any engine
that is available.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from rolltape.errors import EngineDied, EngineError, EngineFailed, EngineFault, EngineUnreachable
from rolltape.gateway.engines.pool import EnginePool
from rolltape.gateway.engines.protocol import Engine, Generated, Generation, ImplausibleReply
from rolltape.gateway.settings import Patience
from rolltape.gateway.turn.retries import Retries, endpoint_failure
from rolltape.gateway.weights import Weights
from rolltape.records.turn import NO_IDS, Finish, Ids, implausibility

log = logging.getLogger("rolltape.gateway")

INTERRUPTED = "not enforced after an interruption, since no engine can resume a grammar in the middle"
_MAX_ID = 2**31 - 1
_NOTICED_S = 1.0  # shorter waits are not recorded with the turn
_REFUSALS = frozenset({400, 422})  # from engines that cannot compile a grammar


class PartialGeneration(NamedTuple):
    """What one engine returned for one call, and the weight versions announced when the call began and ended."""

    engine: Engine
    given: Generated
    first_announced: str | None
    last_announced: str | None


class ReplySoFar:
    """A reply while engines sample it, part by part. Its clients may leave before it has ended."""

    def __init__(self, on_sampled: Callable[[Sequence[int]], None] | None = None) -> None:
        self.parts: list[PartialGeneration] = []
        self.left = asyncio.Event()
        self.on_leave: Callable[[], object] | None = None
        self.engine_owes_since: float | None = None  # monotonic: last call or last ids; None: no call is open
        self.engine_errors: list[str] = []
        self.engine_failed = False  # with an error, and no token was sampled since
        self.retries: Retries | None = None  # after errors; None if there was none since the last token
        self.unconstrained: str | None = None  # why the constraint was not enforced to the end, or None
        self.waited_s = 0.0  # while engines failed, did not answer, or were paused
        self.passed_on = 0  # ids that were passed to `on_sampled` so far
        self.on_sampled = on_sampled

    @property
    def sampled(self) -> int:
        """How many ids have been sampled."""
        return sum(len(part.given.ids) for part in self.parts)

    @property
    def ids(self) -> Ids:
        return np.concatenate([NO_IDS, *(part.given.ids for part in self.parts)])

    def waited(self, since: float, why: str) -> None:
        """Count the time since `since` (monotonic) as time without an engine, and keep the reason."""
        self.waited_s += time.monotonic() - since
        if why not in self.engine_errors[-1:]:
            self.engine_errors.append(why)

    @property
    def gone(self) -> bool:
        return self.left.is_set()

    def leave(self) -> None:
        """Abort the engine's call, since no client waits any more."""
        if not self.gone:
            self.left.set()
            if self.on_leave is not None:
                self.on_leave()

    def pass_on(self, ids: Sequence[int]) -> None:
        """Pass ids that an engine has just sampled to `on_sampled`."""
        self.engine_owes_since = time.monotonic()
        self.passed_on += len(ids)
        if self.on_sampled is not None:
            self.on_sampled(ids)

    def add(self, part: PartialGeneration) -> None:
        """Keep what an engine returned, and pass on the ids that were not passed on while they were sampled."""
        self.parts.append(part)
        waiting = self.sampled - self.passed_on
        if waiting > 0:
            self.pass_on(part.given.ids[len(part.given.ids) - waiting :].tolist())


class Generator:
    """Continues prompts on the engines of a pool."""

    def __init__(
        self,
        pool: EnginePool,
        weights: Weights,
        patience: Patience | None = None,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`now` and `sleep` are the clock of the retries after errors."""
        self._pool = pool
        self._weights = weights
        self._patience = patience or Patience()
        self._now = now
        self._sleep = sleep
        self._count = 0
        self._seen: set[str] = set()  # engines whose first reply was looked at

    async def run(self, wanted: Generation, reply: ReplySoFar) -> None:
        """Add to a reply until it has ended or its clients have left. An error leaves the parts so far in it."""
        reply.engine_owes_since = time.monotonic()
        try:
            while not reply.gone and _tokens_left(wanted, reply) > 0:
                if self._pool.paused:
                    since = time.monotonic()
                    await self._pool.opened(reply.left)
                    reply.waited(since, "the weights were being changed")
                    reply.retries = None
                elif await self._in_turn(wanted, reply):
                    return
        finally:
            reply.engine_owes_since = None

    async def _in_turn(self, wanted: Generation, reply: ReplySoFar) -> bool:
        """Continue once the limit of requests allows it, unless the pool is paused or the clients have left by then.

        Return whether the reply has ended.
        """
        since = time.monotonic()
        async with self._pool.turn(wanted.session, reply.left) as is_awaited:
            if time.monotonic() - since > _NOTICED_S:
                reply.waited(since, "other requests came first, by the limit of requests to an engine")
            return is_awaited and not self._pool.paused and await self._call_or_wait(wanted, reply)

    async def _call_or_wait(self, wanted: Generation, reply: ReplySoFar) -> bool:
        """Ask an engine for the rest of the reply, or wait after its error. Return whether the reply has ended."""
        engine: Engine | None = None
        announced, since = self._weights.version, time.monotonic()
        try:
            engine = self._pool.pick(wanted.session)
            rest = self._remaining_request(wanted, engine, reply)
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
            reply.retries = retries = reply.retries or Retries(self._patience, self._now)
            if engine is not None:
                self._note(engine, error)
            try:
                if reply.passed_on > reply.sampled:  # clients saw ids that are lost now
                    raise EngineFailed(f"no reply after an error of the engine in the middle of it: {error}") from error
                await self._wait(retries.next_pause_s(error, lambda: self._pool.move(wanted.session)), reply)
            except EngineFailed as failed:
                if engine is not None and isinstance(error, ImplausibleReply):  # keep the reply for the tape
                    reply.parts.append(PartialGeneration(engine, error.given, announced, self._weights.version))
                if engine is None or engine.token_faithful or not isinstance(error, EngineFault):
                    raise
                raise endpoint_failure(failed, error) from error
            finally:
                reply.waited(since, str(error))
            return False
        if reply.passed_on > reply.sampled + len(given.ids) and not reply.gone:
            raise EngineFailed(
                f"{engine.name} did not end a reply after it was aborted, and a client had received the beginning"
            )
        if given.finish is Finish.ABORT and not len(given.ids):
            if reply.gone and (stall := await self._find_stall(engine)) is not None:
                reply.waited(since, stall)
            return False
        reply.retries, reply.engine_failed = None, False
        reply.engine_owes_since = time.monotonic()
        reply.add(PartialGeneration(engine, given, announced, self._weights.version))
        return given.finish is not Finish.ABORT

    async def _find_stall(self, engine: Engine) -> str | None:
        """Why no token came before all clients left, or None if the engine may have been sampling."""
        if getattr(engine, "keeps_aborted", False):  # such an engine returns the ids sampled before an abort
            return f"{engine.name} had not sampled a token"
        try:
            async with asyncio.timeout(self._patience.let_go_s):
                await engine.facts()
        except (EngineUnreachable, EngineFault, TimeoutError) as error:
            return None if _may_be_busy(engine, error) else f"{engine.name} does not answer: {error}"
        return None

    def _note(self, engine: Engine, error: EngineError) -> None:
        self._pool.failed(engine, error)
        if not isinstance(error, EngineUnreachable):
            log.warning("%s: %s", engine.name, error)

    async def _wait(self, pause_s: float, reply: ReplySoFar) -> None:
        """Wait, but only while a client waits for the reply."""
        waits = [asyncio.ensure_future(self._sleep(pause_s)), asyncio.ensure_future(reply.left.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _ask(self, engine: Engine, wanted: Generation, reply: ReplySoFar) -> Generated:
        """Call an engine and check what it returns; that is empty only if this gateway interrupted the call."""
        try:
            given, interrupted = await self._call(engine, wanted, reply)
        except EngineDied as error:
            if not isinstance(error.partial, Generated) or not len(error.partial.ids):
                raise
            self._note(engine, error)
            given, interrupted = error.partial, False
        self._look_at_first(engine, wanted, given)
        if given.finish is Finish.ABORT and len(given.ids) and int(given.ids[-1]) in wanted.stop_ids:
            # The abort came just after the stop id was sampled, so the reply is complete.
            return msgspec.structs.replace(given, finish=Finish.STOP)
        if given.finish is Finish.ABORT and not len(given.ids) and not interrupted:
            # A server does so while its weights change. It is retried for as long as other errors.
            why = "it aborts the reply before the first token; pause the gateway while weights are changed"
            raise EngineFault(f"{engine.name}: {why}", status=503)
        return given

    def _look_at_first(self, engine: Engine, wanted: Generation, given: Generated) -> None:
        """Log once per engine what it returns; raises EngineFault for an implausible reply."""
        check_generated(engine, wanted, given)
        if engine.name not in self._seen and given.finish is not Finish.ABORT:
            self._seen.add(engine.name)
            log.warning("%s", describe_generated(engine, wanted, given))

    async def _call(self, engine: Engine, wanted: Generation, reply: ReplySoFar) -> tuple[Generated, bool]:
        """Call an engine. Return its result, and whether this gateway interrupted the call."""
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

        self._pool.begin(wanted.id, interrupt)
        reply.on_leave = interrupt
        try:
            return await self._watched(engine, task, reply), interrupted
        except asyncio.CancelledError:
            if not task.cancelled() or (this := asyncio.current_task()) is None or this.cancelling():
                raise
            # It did not end after the abort, so `_let_go` canceled it.
            return Generated(ids=NO_IDS, logprobs=None, finish=Finish.ABORT), True
        finally:
            reply.on_leave = None
            self._pool.end(wanted.id)
            task.cancel()

    async def _watched(self, engine: Engine, task: "asyncio.Future[Generated]", reply: ReplySoFar) -> Generated:
        """Wait for the result of a call; raises EngineDied if the engine neither samples nor answers any more."""
        loop = asyncio.get_running_loop()
        began, missed, passed_on = loop.time(), 0, reply.passed_on
        while True:
            done, _ = await asyncio.wait({task}, timeout=self._patience.look_every_s)
            if done:
                return task.result()
            if loop.time() - began > self._patience.reply_s:
                raise EngineFault(f"no reply within {self._patience.reply_s:g} s")
            if reply.passed_on > passed_on:
                missed, passed_on = 0, reply.passed_on
                continue
            look = asyncio.ensure_future(self._pool.still_answers(engine, self._patience.look_every_s))
            try:
                either: set[asyncio.Future[Any]] = {task, look}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if not task.done():
                    await look
                missed = 0
            except (EngineUnreachable, EngineFault, TimeoutError) as error:
                if _may_be_busy(engine, error):
                    continue
                missed += 1
                if missed == 3 and not task.done():
                    raise EngineDied(f"it no longer answers: {error}") from error
            finally:
                look.cancel()

    async def _let_go(self, engine: Engine, generation: str, task: "asyncio.Future[Generated]") -> None:
        """Abort a generation, and cancel the call if it does not end then."""
        try:
            async with asyncio.timeout(self._patience.let_go_s):
                await engine.abort(generation)
                await asyncio.wait({task})
        except (EngineUnreachable, EngineFault, TimeoutError):
            task.cancel()

    def _remaining_request(self, wanted: Generation, engine: Engine, reply: ReplySoFar) -> Generation:
        """The request for the rest of a reply after its parts so far, under an id of its own."""
        self._count += 1
        name = f"{wanted.id}-{self._count}"
        so_far = reply.ids
        constraint = None
        if wanted.constraint is not None and reply.unconstrained is None:
            constraint = wanted.constraint.after(so_far)
            if constraint is None or not constraint.needs <= engine.abilities:
                constraint, reply.unconstrained = None, INTERRUPTED
        rest = msgspec.structs.replace(wanted, id=name, constraint=constraint)
        if reply.parts:
            sampling = msgspec.structs.replace(wanted.sampling, max_tokens=_tokens_left(wanted, reply))
            ids = np.concatenate([wanted.prompt_ids, so_far])
            rest = msgspec.structs.replace(rest, prompt_ids=ids, sampling=sampling)
        if rest.on_sampled is not None:
            rest = msgspec.structs.replace(rest, on_sampled=PlausibleIds(rest, rest.on_sampled).add)
        return rest


def _may_be_busy(engine: Engine, error: Exception) -> bool:
    """Whether a server that does not answer may be generating: a small one for text does one thing at a time."""
    return isinstance(error, TimeoutError) and not engine.token_faithful


def _tokens_left(wanted: Generation, reply: ReplySoFar) -> int:
    """How many tokens may still be sampled."""
    assert wanted.sampling.max_tokens is not None
    return wanted.sampling.max_tokens - reply.sampled


class PlausibleIds:
    """Passes on the ids that an engine reports as sampled, up to the first that cannot have been sampled.

    `check_generated` reports the fault when the reply has ended.
    """

    def __init__(self, wanted: Generation, on_sampled: Callable[[Sequence[int]], None]) -> None:
        assert wanted.sampling.max_tokens is not None
        self._on_sampled = on_sampled
        self._stop_ids = frozenset(wanted.stop_ids)
        self._vocabulary = _MAX_ID + 1 if wanted.vocabulary is None else wanted.vocabulary
        self._left = wanted.sampling.max_tokens  # that may still be passed on

    def add(self, ids: Sequence[int]) -> None:
        """Pass on the plausible ones of these ids, in one call."""
        ids = ids[: self._left]
        end = next((at for at, token in enumerate(ids) if not 0 <= token < self._vocabulary), None)
        stop = next((at + 1 for at, token in enumerate(ids[:end]) if token in self._stop_ids), None)
        plausible = ids[: end if stop is None else stop]
        self._left = self._left - len(ids) if end is None and stop is None else 0
        if len(plausible):
            self._on_sampled(plausible)


def check_generated(engine: Engine, wanted: Generation, generated: Generated) -> None:
    """Raise EngineFault if the arrays of a reply do not fit together, or if it cannot have been sampled."""
    count, logprobs, segments = len(generated.ids), generated.logprobs, generated.segments
    where = f"{engine.name}, generation {wanted.id}"
    if logprobs is not None and len(logprobs) != count:
        raise EngineFault(f"{where}: {count} sampled ids but {len(logprobs)} logprobs")
    if segments and segments[-1].stop != count:
        raise EngineFault(f"{where}: {count} sampled ids but segments of {segments[-1].stop}")
    sampling, stop_ids = {"max_tokens": wanted.sampling.max_tokens}, wanted.stop_ids
    why = implausibility(generated.ids, logprobs, sampling, vocabulary=wanted.vocabulary, stop_ids=stop_ids)
    if why is not None:
        hint = "no engine can have sampled it; check that the engine serves the model whose folder was given"
        raise ImplausibleReply(f"{where}: {why}; {hint}", generated)


def describe_generated(engine: Engine, wanted: Generation, generated: Generated) -> str:
    """A log line that states which data for training an engine returned: ids, logprobs, stop id, weight version."""
    if not engine.token_faithful:
        return f"{engine.name}: text only, no ids and no logprobs; its replies cannot be trained"
    ids, logprobs, version = generated.ids, generated.logprobs, generated.last_version
    parts = [f"{engine.name}: ids", "NO logprobs"]
    if logprobs is not None:
        kind = generated.logprob_kind
        parts[-1] = f"logprobs {'of unknown kind' if kind is None else kind.value.replace('_', ' ')}"
        if missing := int(np.isnan(logprobs).sum()):
            parts.append(f"MISSING for {missing}")
    if generated.finish is not Finish.STOP:
        parts.append("the stop id not seen yet")
    else:
        parts.append("the stop id kept" if len(ids) and int(ids[-1]) in wanted.stop_ids else "the stop id TRIMMED")
    parts.append("no weight version" if version is None else f"weight version {version}")
    return ", ".join([*parts, *generated.side_arrays])

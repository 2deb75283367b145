"""Sample a reply from prompt ids, across engine failures and weight changes.

What was sampled is kept: after an interruption the reply continues from prompt and partial reply on whichever engine is
available, and no token is sampled twice.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np

from rolltape.errors import EngineDied, EngineFailed, EngineFault, EngineUnreachable
from rolltape.gateway.engines.pool import EnginePool
from rolltape.gateway.engines.protocol import Engine, Generated, Generation
from rolltape.gateway.engines.sampled import check_generated, describe_generated
from rolltape.gateway.settings import Patience
from rolltape.gateway.weights import Weights
from rolltape.records.turn import Finish

log = logging.getLogger("rolltape.gateway")


class Stretch(NamedTuple):
    """What one engine gave in one go, and the version that was announced when it began and when it ended."""

    engine: Engine
    given: Generated
    first_announced: str | None
    last_announced: str | None


class Caller:
    """Whoever waits for a reply, and may leave before it has come."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.on_leave: Callable[[], object] | None = None

    @property
    def gone(self) -> bool:
        return self.left.is_set()

    def leave(self) -> None:
        if not self.gone:
            self.left.set()
            if self.on_leave is not None:
                self.on_leave()


class Generator:
    """Continues prompts on the engines there are."""

    def __init__(self, pool: EnginePool, weights: Weights, patience: Patience | None = None) -> None:
        self._pool = pool
        self._weights = weights
        self._patience = patience or Patience()
        self._count = 0
        self._seen: set[str] = set()  # engines whose first reply was looked at

    async def run(self, wanted: Generation, caller: Caller, stretches: list[Stretch]) -> None:
        """Append to `stretches` until the reply has ended or its caller has left. What there is stays there."""
        faults = 0
        while not caller.gone and _room(wanted, stretches) > 0:
            engine = await self._engine(wanted.session, caller)
            if engine is None:
                return
            given: Generated | None = None
            announced = self._weights.version
            try:
                rest = self._rest(wanted, stretches)
                given = await self._once(engine, rest, caller)
                self._look_at_first(engine, rest, given)
            except EngineUnreachable as error:
                self._pool.failed(engine, error)
                continue
            except (EngineFault, EngineDied) as error:
                self._pool.failed(engine, error)
                partial = getattr(error, "partial", None)
                given = partial if isinstance(partial, Generated) else None
                faults += 1
                log.warning("%s: %s (%d of %d)", engine.name, error, faults, self._patience.faults)
                if given is None and faults >= self._patience.faults:
                    raise EngineFailed(f"no reply after {faults} errors of the engine, the last: {error}") from error
            if given is not None and (len(given.ids) or given.finish is not Finish.ABORT):
                faults = 0 if len(given.ids) else faults
                stretches.append(Stretch(engine, given, announced, self._weights.version))
                if given.finish is not Finish.ABORT:
                    return
            elif given is not None:
                await asyncio.sleep(0.05)  # aborted before it began, and not by us: its weights are being changed

    def _look_at_first(self, engine: Engine, wanted: Generation, given: Generated) -> None:
        """Say once what an engine really gives; raises EngineFault for what cannot be a reply."""
        check_generated(engine, wanted, given)
        if engine.name not in self._seen and given.finish is not Finish.ABORT:
            self._seen.add(engine.name)
            log.warning("%s", describe_generated(engine, wanted, given))

    async def _engine(self, session: str, caller: Caller) -> Engine | None:
        """The engine of a session, when generating is allowed; None: the caller has left meanwhile."""
        deadline = asyncio.get_running_loop().time() + self._patience.no_engine_s
        while True:
            await self._weights.opened(caller.left)
            if caller.gone:
                return None
            try:
                return self._pool.pick(session)
            except EngineUnreachable as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise EngineFailed(f"no engine answers: {error}") from error
                await asyncio.sleep(min(0.5, self._patience.no_engine_s / 4))

    async def _once(self, engine: Engine, wanted: Generation, caller: Caller) -> Generated:
        task = asyncio.ensure_future(engine.generate(wanted))
        letting_go: set[asyncio.Task[None]] = set()

        def interrupt() -> "asyncio.Task[None]":
            ending = asyncio.ensure_future(self._let_go(engine, wanted.id, task))
            letting_go.add(ending)
            ending.add_done_callback(letting_go.discard)
            return ending

        self._weights.begin(wanted.id, interrupt)
        caller.on_leave = interrupt
        try:
            return await self._watched(engine, task)
        except asyncio.CancelledError:
            if not task.cancelled() or (this := asyncio.current_task()) is None or this.cancelling():
                raise
            return _nothing()  # it did not end when it was aborted, and was left behind
        finally:
            caller.on_leave = None
            self._weights.end(wanted.id)
            task.cancel()

    async def _watched(self, engine: Engine, task: "asyncio.Future[Generated]") -> Generated:
        """A generation's outcome; raises EngineDied for an engine that no longer answers meanwhile."""
        loop = asyncio.get_running_loop()
        began, missed = loop.time(), 0
        while True:
            done, _ = await asyncio.wait({task}, timeout=self._patience.look_every_s)
            if done:
                return task.result()
            if loop.time() - began > self._patience.reply_s:
                raise EngineFault(f"no reply within {self._patience.reply_s:g} s")
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

    def _rest(self, wanted: Generation, stretches: list[Stretch]) -> Generation:
        """What is still wanted after the stretches that there are, under a name of its own."""
        self._count += 1
        name = f"{wanted.id}-{self._count}"
        if not stretches:
            return msgspec.structs.replace(wanted, id=name)
        so_far = [stretch.given.ids for stretch in stretches]
        sampling = msgspec.structs.replace(wanted.sampling, max_tokens=_room(wanted, stretches))
        ids = np.concatenate([wanted.prompt_ids, *so_far])
        return msgspec.structs.replace(wanted, id=name, prompt_ids=ids, sampling=sampling)


def _room(wanted: Generation, stretches: list[Stretch]) -> int:
    """How many tokens may still be sampled."""
    assert wanted.sampling.max_tokens is not None
    return wanted.sampling.max_tokens - sum(len(stretch.given.ids) for stretch in stretches)


def _nothing() -> Generated:
    return Generated(ids=np.empty(0, np.int32), logprobs=None, finish=Finish.ABORT)

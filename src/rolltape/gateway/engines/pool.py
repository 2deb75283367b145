"""A pool of engines, and the gate that holds back generations while weights change.

Each session stays with one engine. An engine that is down is skipped until it answers. If the pool was given weights,
an engine that comes back with other weights, as after a restart, loads them before it gets turns.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

import msgspec

from rolltape.errors import EngineDied, EngineError, EngineUnreachable
from rolltape.gateway.engines.protocol import Engine, EngineFacts, TakesWeights
from rolltape.gateway.engines.request_limit import RequestLimit, RequestQueue, done_before
from rolltape.gateway.turn.constraints import Ability

log = logging.getLogger("rolltape.engines")

_FIRST_PROBE_S = 0.25
_LONGEST_PAUSE_S = 15.0
_WATCH_S = 5.0  # shorter than a restart

Interrupt = Callable[[], Awaitable[None]]


class EngineHealth(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the pool's status."""

    name: str
    up: bool
    sessions: int
    facts: EngineFacts | None  # as last reported; None if it has not answered yet
    error: str | None  # the last one, or None if there was none since it came up


class LoadedWeights(NamedTuple):
    """Weights that all engines must have."""

    folder: str
    version: str


class _Look:
    """Asks one engine whether it answers: once at a time, for all that wait."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._asking: asyncio.Task[None] | None = None
        self._waiting = 0
        self._answered = -math.inf  # by the loop's clock

    async def answered(self, every_s: float) -> None:
        """Return if the engine answers, or did so in the last `every_s`; raises its error, or TimeoutError."""
        if asyncio.get_running_loop().time() - self._answered < every_s:
            return
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._ask(every_s))
        self._waiting += 1
        try:
            await asyncio.shield(self._asking)
        finally:
            self._waiting -= 1
            if not self._waiting and self._asking is not None:
                self._asking.cancel()
                self._asking = None

    async def _ask(self, within_s: float) -> None:
        async with asyncio.timeout(within_s):
            await self._engine.facts()
        self._answered = asyncio.get_running_loop().time()


class _Member:
    def __init__(self, engine: Engine, limit: RequestLimit) -> None:
        self.engine = engine
        self.look = _Look(engine)
        self.queue = None if limit == RequestLimit() else RequestQueue(limit)
        self.up = True
        self.sessions = 0
        self.facts: EngineFacts | None = None
        self.error: str | None = None
        self.probe: asyncio.Task[None] | None = None
        self.loading = asyncio.Lock()
        self.tells_version = False  # it has reported the version of the current weights


class EnginePool:
    """Engines that serve the same model."""

    def __init__(self, engines: Sequence[Engine], limit: RequestLimit | None = None) -> None:
        """`limit` applies to each engine separately."""
        if not engines:
            raise EngineError("a pool of no engines; give at least one")
        self.engines = tuple(engines)
        self.token_faithful = all(engine.token_faithful for engine in engines)
        # The name of an engine that does not stream, or None if all do.
        self.silent_engine = next((engine.name for engine in engines if not engine.streams), None)
        self._members = [_Member(engine, limit or RequestLimit()) for engine in engines]
        self._of_session: dict[str, _Member] = {}
        self._open = asyncio.Event()
        self._open.set()
        self._in_flight: dict[str, Interrupt] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.weights: LoadedWeights | None = None  # None if none were given, or if others may have been loaded since
        self._watching: asyncio.Task[None] | None = None

    @property
    def applies(self) -> frozenset[str]:
        """The sampling parameters that all engines apply."""
        return frozenset.intersection(*(engine.applies for engine in self.engines))

    @property
    def abilities(self) -> frozenset[Ability]:
        """The abilities for constraints that all engines have."""
        return frozenset.intersection(*(engine.abilities for engine in self.engines))

    @property
    def context(self) -> int | None:
        """The smallest known context length of the engines, or None."""
        contexts = [member.facts.context for member in self._members if member.facts is not None]
        return min((context for context in contexts if context is not None), default=None)

    async def look(self) -> list[EngineHealth]:
        """Ask every engine for its facts; one that does not answer counts as down."""
        await asyncio.gather(*(self._look_at(member) for member in self._members))
        return self.health()

    async def first_facts(self) -> EngineFacts:
        """Ask every engine; the facts of the first that answers. Raises EngineUnreachable if none does."""
        health = await self.look()
        facts = next((one.facts for one in health if one.facts is not None), None)
        if facts is None:
            raise EngineUnreachable(f"no engine answers: {'; '.join(str(one.error) for one in health)}")
        return facts

    def pick(self, session: str) -> Engine:
        """The session's engine, else the one with the fewest sessions; raises EngineUnreachable if all are down."""
        member = self._of_session.get(session)
        if member is not None and member.up:
            return member.engine
        up = [one for one in self._members if one.up]
        if not up:
            reasons = "; ".join(str(one.error) for one in self._members)
            raise EngineUnreachable(f"none of {len(self._members)} engines is up: {reasons}")
        return self._give(session, up)

    def move(self, session: str) -> bool:
        """Assign a session to another engine, since its own refuses. Return False if no other one is up."""
        others = [one for one in self._members if one.up and one is not self._of_session.get(session)]
        return bool(others) and self._give(session, others) is not None

    def _give(self, session: str, members: Sequence[_Member]) -> Engine:
        self.release(session)
        chosen = min(members, key=lambda one: one.sessions)
        chosen.sessions += 1
        self._of_session[session] = chosen
        return chosen.engine

    def release(self, session: str) -> None:
        """Forget which engine a session had."""
        member = self._of_session.pop(session, None)
        if member is not None:
            member.sessions -= 1

    @asynccontextmanager
    async def turn(self, session: str, left: asyncio.Event) -> AsyncIterator[bool]:
        """Wait until the session's engine may be called inside the block. Yields False if the clients have left."""
        with suppress(EngineUnreachable):  # raised again when the engine is called
            self.pick(session)
        member = self._of_session.get(session)
        if member is None or member.queue is None:
            yield True
            return
        async with member.queue.turn(left) as is_awaited:
            yield is_awaited

    def failed(self, engine: Engine, error: EngineError) -> None:
        """Record an engine's error. An unreachable engine counts as down at once; after another error it is probed."""
        member = next(one for one in self._members if one.engine is engine)
        member.error = str(error)
        if isinstance(error, EngineUnreachable | EngineDied):
            self._put_aside(member)
        elif member.probe is None:
            member.probe = asyncio.get_running_loop().create_task(self._probe(member))

    async def still_answers(self, engine: Engine, every_s: float) -> None:
        """Ask a generating engine whether it answers, at most every `every_s`; raises its error, or TimeoutError."""
        await next(one for one in self._members if one.engine is engine).look.answered(every_s)

    @property
    def paused(self) -> bool:
        return not self._open.is_set()

    @property
    def in_flight(self) -> int:
        """The number of running generations."""
        return len(self._in_flight)

    async def opened(self, left: asyncio.Event) -> None:
        """Wait until generating is allowed, or until the clients have left."""
        while self.paused and not left.is_set():
            await done_before(self._open.wait(), left)

    def begin(self, generation: str, interrupt: Interrupt) -> None:
        """Register a running generation; `interrupt` ends it with the ids sampled so far."""
        self._in_flight[generation] = interrupt
        self._idle.clear()

    def end(self, generation: str) -> None:
        self._in_flight.pop(generation, None)
        if not self._in_flight:
            self._idle.set()

    async def pause(self) -> int:
        """Hold new generations and interrupt running ones. Return their number, once the engines have ended them."""
        self._open.clear()
        interrupts = list(self._in_flight.values())
        await asyncio.gather(*(interrupt() for interrupt in interrupts))
        await self._idle.wait()
        return len(interrupts)

    def resume(self) -> None:
        """Allow generations again."""
        self._open.set()

    async def load(self, weights: LoadedWeights) -> list[EngineError]:
        """Have all engines load weights. Return the errors of those that could not.

        An engine that is down loads them when it answers again; if all are down, their errors are returned.
        """
        self.keep(weights)
        errors = [error for error in await asyncio.gather(*map(self._load_noting, self._members)) if error is not None]
        if len(errors) == len(self._members):
            return errors
        return [error for error in errors if not isinstance(error, EngineUnreachable)]

    def keep(self, weights: LoadedWeights) -> None:
        """Set the weights that engines have now; an engine that comes back without them loads them."""
        self.weights = weights
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def _load_noting(self, member: _Member) -> EngineError | None:
        try:
            await self._load(member)
        except EngineError as error:
            if isinstance(error, EngineUnreachable):
                member.error = str(error)
                self._put_aside(member)
            return error
        return None

    async def _load(self, member: _Member) -> None:
        async with member.loading:
            if self.weights is not None:
                assert isinstance(member.engine, TakesWeights)
                member.tells_version = False
                await member.engine.load_weights(*self.weights)

    async def forget_weights(self) -> None:
        """Stop loading the weights given before, since another program may change weights from now on."""
        self.weights = None
        for member in self._members:
            async with member.loading:
                pass

    def health(self) -> list[EngineHealth]:
        return [
            EngineHealth(name=one.engine.name, up=one.up, sessions=one.sessions, facts=one.facts, error=one.error)
            for one in self._members
        ]

    async def close(self) -> None:
        """Stop probing and close every engine."""
        probes = [probe for probe in (self._watching, *(one.probe for one in self._members)) if probe is not None]
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)
        for member in self._members:
            await member.engine.close()

    def _put_aside(self, member: _Member) -> None:
        if member.up:
            log.warning("%s gets no requests: %s", member.engine.name, member.error)
        member.up = False
        if member.probe is None:
            member.probe = asyncio.get_running_loop().create_task(self._probe(member))

    async def _probe(self, member: _Member) -> None:
        """Ask an engine until it answers, at growing intervals."""
        pause = _FIRST_PROBE_S
        try:
            while not await self._answers(member):
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE_S)
        finally:
            member.probe = None

    async def _watch(self) -> None:
        """Check engines every few seconds, to notice a restart of an idle one."""
        while True:
            await asyncio.sleep(_WATCH_S)
            if self.weights is not None and not self.paused:
                await asyncio.gather(*(self._look_at(member) for member in self._members if member.probe is None))

    async def _look_at(self, member: _Member) -> None:
        if not await self._answers(member):
            self._put_aside(member)

    async def _answers(self, member: _Member) -> bool:
        try:
            member.facts = await member.engine.facts()
            if self._has_other_weights(member, member.facts):
                assert self.weights is not None
                log.warning("%s has come back with other weights; it loads %s", member.engine.name, self.weights.folder)
                member.up = False
                await self._load(member)
                member.facts = await member.engine.facts()
        except EngineError as error:
            member.up, member.error = False, str(error)
            return False
        if not member.up:
            log.warning("%s is back", member.engine.name)
        member.up, member.error = True, None
        member.tells_version = self.weights is not None and member.facts.version == self.weights.version
        return True

    def _has_other_weights(self, member: _Member, facts: EngineFacts) -> bool:
        """Whether an engine may have restarted since it loaded weights: it was down, or reports another version."""
        if self.weights is None or facts.version == self.weights.version:
            return False
        return not member.up or member.tells_version

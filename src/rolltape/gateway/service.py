"""The gateway without its HTTP server: open sessions, take turns, change weights, end sessions."""

import asyncio
import contextlib
import logging
import time
from typing import Any

import msgspec

from rolltape.errors import BadRequest, PolicyError, RecordError, SessionEnded, TapeError
from rolltape.gateway.engines.pool import EnginePool
from rolltape.gateway.finished import Ending, Finished, rollout_of
from rolltape.gateway.identity import Attempts
from rolltape.gateway.metrics import Metrics
from rolltape.gateway.open_sessions import OpenSessions
from rolltape.gateway.other_sessions import OtherSessions, head_extra, mint_key
from rolltape.gateway.prompts import ChatPrompts
from rolltape.gateway.sessions import OF_ROLLOUT, OpenSession, Sessions, SessionSpec, key_digest
from rolltape.gateway.settings import GatewaySettings
from rolltape.gateway.turn.generate import Generator
from rolltape.gateway.turn.turn import Turns
from rolltape.gateway.weights import Weights
from rolltape.records.policy import cut_policy
from rolltape.records.rollout import EventKind
from rolltape.samples import linearize
from rolltape.tape.recording.rollout import RolloutRecorder, score_data
from rolltape.tape.recording.tape import Tape

log = logging.getLogger("rolltape.gateway")

_MOST_REFUSALS = 32  # recorded per session
_REASON = 2000  # characters
_MOST_IGNORED = 20  # parameters that the status lists


class Service:
    """Sessions and their turns, on one tape, through one pool of engines."""

    def __init__(
        self,
        tape: Tape,
        pool: EnginePool,
        prompts: ChatPrompts,
        settings: GatewaySettings,
        *,
        model_name: str,
        context: int | None,
        version: str | None,
    ) -> None:
        self.tape = tape
        self.pool = pool
        self.prompts = prompts
        self.settings = settings
        self.model_name = model_name
        self.sessions = Sessions()
        self.metrics = Metrics()
        self.weights = Weights(pool, tape.announce_version)
        if version is not None:
            self.weights.announce(version)
        generator = Generator(pool, self.weights, settings.patience)
        self.turns = Turns(prompts, pool, generator, self.metrics, settings, context)
        self.metrics.gauge("open_sessions", "Sessions open now", lambda: len(self.sessions))
        self.metrics.gauge("in_flight", "Generations in flight", lambda: self.pool.in_flight)
        self.metrics.gauge("engines_up", "Engines that answer", lambda: sum(one.up for one in pool.health()))
        self.metrics.gauge("paused", "1 while weights are changed", lambda: float(self.pool.paused))
        self.draining = False
        self._hurried = False
        attempts = Attempts(tape, model_name)
        self._others = OtherSessions(tape, prompts.fingerprint, self.sessions, self.metrics)
        self.open_sessions = OpenSessions(self.turns, self.open_session, self._others.by_name, attempts)
        self._rewarded: dict[str, Ending] = {}  # by rollout: the ending with a reward of a session before the last one

    def open_session(self, spec: SessionSpec, *found_by: str) -> OpenSession:
        """Open a session with a new rollout, or in an open rollout.

        A later gateway finds it by its key, and by the digests in `found_by`.
        """
        if self.draining:
            raise SessionEnded("the gateway is ending: it opens no more sessions")
        rollout = self._open_rollout(spec)
        key = mint_key(self.tape.writer)
        recorder = rollout.session(
            stop_ids=self.prompts.stop_ids,
            vocabulary=self.prompts.vocabulary,
            tokenizer=self.prompts.folder,
            model=self.model_name,
            renderer=self.prompts.renderer,
            fingerprint=self.prompts.fingerprint,
            tool_ids_matter=self.prompts.tool_ids_matter,
            extra=head_extra(spec, key_digest(key), *found_by),
        )
        beside = self.sessions.of_rollout(rollout.id)
        session = OpenSession(spec, rollout, recorder, beside[0].deliveries if beside else {}, key=key)
        self.sessions.add(session)
        self.metrics.count("sessions")
        return session

    def _open_rollout(self, spec: SessionSpec) -> RolloutRecorder:
        if spec.rollout is not None:
            beside = self.sessions.of_rollout(spec.rollout)
            if not beside:
                raise BadRequest(f"rollout {spec.rollout} has no open session; leave `rollout` out to start one")
            return beside[0].rollout
        if spec.task_id is None and spec.task is None:
            raise BadRequest("a session needs a task_id, a task, or the rollout that it belongs to")
        try:
            given = {name: getattr(spec, name) for name in OF_ROLLOUT}
            return self.tape.rollout(model=self.model_name, **given)
        except RecordError as error:
            raise BadRequest(str(error)) from error

    async def take_over(self, key: str) -> OpenSession | None:
        """Take over the session that a key opens from a gateway that has died; None if the key opens no session.

        Raises SessionEnded if it is closed, ServedElsewhere if another gateway serves it.
        """
        return None if self.draining else await self._others.by_key(key)

    async def session_of_id(self, session_id: str) -> OpenSession:
        """The session with this id, taken over in the same way; raises NoSuchSession."""
        return self.sessions.find(session_id) or await self._others.by_id(session_id)

    async def rollout_here(self, rollout: str) -> None:
        """Take over an open rollout of a dead gateway; raises ServedElsewhere if another gateway serves it."""
        if not self.sessions.of_rollout(rollout):
            await self._others.by_rollout(rollout)

    async def finish(self, session_id: str, ending: Ending) -> Finished:
        """End a session, and its rollout with the last one. Turns in flight are waited for, then interrupted."""
        session = self.sessions.of_id(session_id)
        rollout = session.rollout
        try:
            cut_policy(ending.policy)
            score_data(ending.reward, ending.reward_terms, f"rollout {rollout.id}")
        except (PolicyError, RecordError) as error:
            raise BadRequest(str(error)) from error
        interrupted = await session.close("finished", ending.drain_s)
        self.sessions.of_id(session_id)  # another request may have ended it meanwhile
        last = self.sessions.of_rollout(rollout.id) == [session]
        earlier = self._rewarded.get(rollout.id)
        if ending.reward is None and earlier is not None:
            ending = msgspec.structs.replace(ending, reward=earlier.reward, reward_terms=earlier.reward_terms)
        if not last and ending.reward is not None:
            self._rewarded[rollout.id] = ending
        if last:
            rollout.finish(
                reward=ending.reward,
                reward_terms=ending.reward_terms,
                stop_reason=ending.stop_reason,
                reason=ending.reason,
            )
            self._rewarded.pop(rollout.id, None)
        self._leave(session)  # only now: if the write failed, the session can be finished again
        whole = rollout_of(rollout, session.deliveries, ending) if ending.samples and last else None
        made = None if whole is None else await asyncio.to_thread(linearize, whole, ending.policy)
        return Finished(
            session=session.id,
            rollout=rollout.id,
            try_index=rollout.try_index,
            group=rollout.group,
            rollout_ended=last,
            turns=session.recorder.turn_count,
            interrupted=interrupted,
            linearized=made,
        )

    async def drop(self, session_id: str, reason: str) -> None:
        """End a session at once; its rollout fails with this reason."""
        if not reason:
            raise BadRequest("reason: say in words why the session is dropped")
        session = self.sessions.of_id(session_id)
        await session.close("dropped", 0)
        self.sessions.of_id(session_id)
        if self.sessions.of_rollout(session.rollout.id) == [session]:
            session.rollout.fail(reason)
            self._rewarded.pop(session.rollout.id, None)
        self._leave(session)

    def _leave(self, session: OpenSession) -> None:
        """Remove a session; raises NoSuchSession if it was ended meanwhile."""
        self.sessions.remove(session)
        self.pool.release(session.id)
        session.recent.clear()
        session.history.close()
        self.open_sessions.forget(session)

    def status(self) -> dict[str, Any]:
        """The figures of `rolltape status`, as JSON."""
        tally, metrics = self.metrics.tally, self.metrics
        return {
            "run": self.tape.name,
            "model": self.model_name,
            "renderer": self.prompts.renderer,
            "streams": "live" if self.turns.buffered is None else f"buffered: {self.turns.buffered}",
            "up_s": time.time() - metrics.began_at,
            "sessions": len(self.sessions),
            "in_flight": sum(session.in_flight for session in self.sessions),
            "version": self.weights.version,
            "weights_folder": None if self.pool.weights is None else self.pool.weights.folder,
            "paused": self.pool.paused,
            "counts": dict(tally),
            "unbridged": dict(metrics.unbridged),
            "ignored_params": dict(metrics.ignored_params.most_common(_MOST_IGNORED)),
            "rates": metrics.rates(),
            "forks_per_session": tally["forks"] / max(tally["sessions"], 1),
            "engines": msgspec.to_builtins(self.pool.health()),
            "draining": self.draining,
        }

    def refused(self, session_id: str, status: int, why: str) -> None:
        """Record that a request was refused, which may be why an agent gave up. Only the first ones are kept."""
        session = self.sessions.find(session_id)
        if session is None or session.ended is not None or session.refusals >= _MOST_REFUSALS:
            return
        session.refusals += 1
        data = {"session": session_id, "status": status, "reason": why[:_REASON]}
        with contextlib.suppress(TapeError):  # the client must get the refusal, not this error
            session.rollout.append_event(session.rollout.encode_event(EventKind.REFUSAL, data))

    async def drain(self) -> None:
        """Take no more turns, and wait for those in flight as long as the settings allow."""
        self.draining = True
        drain_s = 0.0 if self._hurried else self.settings.drain_s
        await asyncio.gather(*(one.close("ended with the gateway", drain_s) for one in self.sessions))

    def hurry(self) -> None:
        """End turns in flight now, so that a waiting `drain` returns."""
        self._hurried = True
        for session in self.sessions:
            session.interrupt()

    async def close(self) -> None:
        """End every open session. Rollouts that were not finished fail."""
        await self.drain()
        for session in self.sessions:
            is_open = session in self.open_sessions
            self._leave(session)
            if session.rollout.is_open and not self.sessions.of_rollout(session.rollout.id):
                if is_open:
                    session.rollout.finish(reason="ended with the gateway")
                else:
                    session.rollout.fail("the gateway ended before it was finished")

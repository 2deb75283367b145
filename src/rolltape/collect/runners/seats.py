"""The seats of one attempt: a session each, its trace, and exactly one record of how it ended."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from rolltape.collect.agents import Connection, Outcome, StepRecord
from rolltape.collect.environments.protocol import AGENT, Ended, Score
from rolltape.collect.plan import Identity, Planned, seat_name
from rolltape.collect.result import Result
from rolltape.collect.results import Record, record_of
from rolltape.collect.runners.snapshot import ended_rollout
from rolltape.collect.settings import CollectSettings
from rolltape.collect.tasks import Task, seed_of
from rolltape.gateway.finished import Ending
from rolltape.gateway.gateway import Gateway
from rolltape.gateway.sessions import OpenSession, SessionSpec
from rolltape.records.rollout import EventKind, Rollout, Status, StopReason
from rolltape.samples import linearize
from rolltape.traces import TraceWriter

_SEEDS = 2**31  # engines take no larger seed than this


class _End(NamedTuple):
    """How a seat ended."""

    status: Status
    reason: str | None
    agent: Mapping[str, Any]  # how the agent itself did: exit code, signal, time-out; what of it is compared
    stop_reason: StopReason | None = None
    reward: float | None = None
    terms: Mapping[str, float] = {}
    ended: Ended | None = None

    def to_compare(self) -> Ended | None:
        """Without its working directory, which is gone by then."""
        if self.ended is None:
            return None
        text = self.agent.get("compared", self.ended.text)
        return msgspec.structs.replace(self.ended, text=text, folder=None)


class Seats:
    """The sessions of one attempt, and the traces of their rollouts."""

    def __init__(
        self,
        gateway: Gateway,
        settings: CollectSettings,
        identity: Identity,
        task: Task,
        planned: Planned,
        tries: Mapping[str, int],
    ) -> None:
        self._gateway = gateway
        self._service = gateway.service
        self._settings = settings
        self._identity = identity
        self._tries = tries
        self._task = task
        self._planned = planned
        self._sessions: dict[str, OpenSession] = {}  # that have not ended
        self._traces: dict[str, TraceWriter] = {}
        self.results: list[Result] = []  # of those that have

    def open(self, seat: str) -> None:
        """Begin a seat's rollout."""
        how = self._settings
        session = self._sessions[seat] = self._service.open_session(self._spec(seat))
        self._traces[seat] = TraceWriter(
            session.rollout, how.capture, fraction=how.trace_fraction, keep=how.with_records
        )

    def _spec(self, seat: str) -> SessionSpec:
        task, how, attempt = self._task, self._settings, self._planned.attempt
        forced = how.sampling
        if forced.seed is None and "seed" in self._service.pool.applies:
            own = seed_of(self._identity.of(task, attempt, seat)) % _SEEDS
            forced = msgspec.structs.replace(forced, seed=own)
        return SessionSpec(
            task_id=task.id,
            task=task.data,
            step=how.step,
            attempt=attempt,
            source=task.source,
            agent=seat_name(self._identity.agent, seat),
            new_try=self._planned.again,
            try_index=self._tries.get(seat),
            forced=forced,
            thinking=how.thinking,
            max_turns=how.max_turns,
            context_budget=how.context_budget,
            allowed_tools=how.allowed_tools,
            denied_tools=how.denied_tools,
        )

    def rollout(self, seat: str) -> str:
        return self._sessions[seat].rollout.id

    def connection(self, seat: str) -> Connection:
        key, url = self._sessions[seat].key, self._gateway.public_url
        return Connection(
            openai_base_url=f"{url}/s/{key}/v1",
            anthropic_base_url=f"{url}/s/{key}",
            key=key,
            model=self._service.model_name,
        )

    def on_step(self, seat: str, step: StepRecord) -> None:
        """A step of the chat agent, into its seat's trace."""
        answer = step.answer
        self._traces[seat].step(
            turn=step.turn,
            reward=None if answer is None else answer.reward,
            done=step.stop_reason is not None,
            stop_reason=step.stop_reason,
            reward_data=None if answer is None else answer.reward_data,
            env_state=None if answer is None else answer.env_state,
            metrics=None if answer is None else answer.metrics,
            # No later prompt holds them.
            extra={"tool_results": list(step.tool_results)} if step.tool_results and step.stop_reason else None,
        )

    def never_asked(self, outcome: Outcome) -> str | None:
        """Why a program that failed before the model was asked is nothing of the model's doing; None: it is."""
        if outcome.timed_out or (not outcome.exit_code and outcome.signal is None):
            return None
        if any(session.recorder.turn_count for session in self._sessions.values()):
            return None
        how = f"exit code {outcome.exit_code}" if outcome.signal is None else f"signal {outcome.signal}"
        return f"the agent ended with {how} before it had asked the model anything; its logs say why"

    def at_limit(self, seat: str, ended: Ended) -> Ended:
        """How a seat ended, the gateway's own limits included, of which a program says nothing."""
        session = self._sessions[seat]
        if ended.stop_reason is not StopReason.COMPLETED:
            return ended
        if session.refused_turns:
            return msgspec.structs.replace(ended, stop_reason=StopReason.MAX_TURNS)
        # A prompt above the budget that it got over, by summing up its history, is not what ended it.
        last = next((turn for turn in reversed(session.recorder.turns) if turn.facts.auxiliary is None), None)
        if last is not None and last.facts.extra.get("over_budget"):
            return msgspec.structs.replace(ended, stop_reason=StopReason.CONTEXT_OVERFLOW)
        return ended

    async def finish(self, seat: str, ended: Ended, score: Score, outcome: Outcome) -> None:
        """An outcome of the policy's own, limits included: what its environment says it is worth."""
        session, agent = self._sessions[seat], _agent_end(outcome)
        if score.compared is not None:
            agent |= {"compared": score.compared}
        total = self._final(seat, agent, reward=score.reward, reward_data=score.reward_data)
        reward = None if score.reward is None or score.ungraded is not None else total
        reason = None if score.ungraded is None else f"ungraded: {score.ungraded}"
        terms = dict(score.terms) if reward is not None else {}
        ending = Ending(reward=reward, reward_terms=terms, stop_reason=ended.stop_reason, reason=reason, samples=False)
        await self._service.finish(session.id, ending)
        self._ended(seat, _End(Status.FINISHED, reason, agent, ended.stop_reason, reward, terms, ended))

    async def drop(self, why: str, outcome: Outcome | None = None) -> list[Result]:
        """What the infrastructure broke: no reward, and to be run again. All results of the attempt."""
        agent = {} if outcome is None else _agent_end(outcome)
        for seat, session in list(self._sessions.items()):
            if agent:
                self._final(seat, agent)
            await self._service.drop(session.id, why)
            self._ended(seat, _End(Status.FAILED, why, agent))
        return self.results

    def _final(self, seat: str, agent: Mapping[str, Any], **said: Any) -> float | None:
        """The end of a seat's trace; how a program ended is recorded even where traces are not."""
        trace, rollout = self._traces[seat], self._sessions[seat].rollout
        if agent and not trace.captures:
            rollout.say(rollout.statement(EventKind.TRACE, {"step": None, "extra": dict(agent)}))
        return trace.final(**said, extra=agent or None)

    def _ended(self, seat: str, end: _End) -> None:
        session = self._sessions.pop(seat)
        settings = self._settings
        rollout = self._rollout(seat, session, end) if settings.with_records or settings.with_fates else None
        result = Result(
            rollout=session.rollout.id,
            try_index=session.rollout.try_index,
            place=self._planned.place,
            task=self._task.id or session.rollout.group[:8],
            attempt=self._planned.attempt,
            seat=seat,
            status=end.status,
            reward=end.reward,
            stop_reason=end.stop_reason,
            reason=end.reason,
            turns=session.recorder.turn_count,
            sampled_tokens=session.recorder.sampled_tokens,
            ended=end.to_compare(),
            record=self._record(seat, rollout, end) if rollout is not None and settings.with_records else None,
            fates=_fates(rollout) if rollout is not None and settings.with_fates else None,
        )
        self.results.append(result)

    def _rollout(self, seat: str, session: OpenSession, end: _End) -> Rollout:
        return ended_rollout(
            session,
            self._traces[seat].said,
            status=end.status,
            stop_reason=end.stop_reason,
            reason=end.reason,
            reward=end.reward,
            terms=end.terms,
        )

    def _record(self, seat: str, rollout: Rollout, end: _End) -> Record:
        return record_of(
            rollout,
            task_index=self._planned.place,
            seat=None if seat == AGENT else seat,
            ended=end.ended,
            agent_end=end.agent,
            traced=self._traces[seat].captures,
        )


def _fates(rollout: Rollout) -> dict[str, int]:
    return {fate.value: tokens for fate, tokens in linearize(rollout).ledger.totals().items()}


def _agent_end(outcome: Outcome) -> dict[str, Any]:
    """How an agent ended, as far as there is something to say."""
    said = {"exit_code": outcome.exit_code, "signal": outcome.signal, "timed_out": outcome.timed_out or None}
    return {name: value for name, value in said.items() if value is not None}

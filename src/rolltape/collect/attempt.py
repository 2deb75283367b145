"""One attempt: a session a seat, an agent at work in an episode, its score, and exactly one record of how it ended."""

import asyncio
import logging
from pathlib import Path
from typing import NamedTuple

import msgspec

from rolltape.capture.finished import Ending
from rolltape.capture.gateway import Gateway
from rolltape.capture.sessions import OpenSession, SessionSpec
from rolltape.collect.agents import Agent, Assignment, Connection, Outcome, StepRecord, discard
from rolltape.collect.environments.protocol import Ended, Environment, Episode, Score
from rolltape.collect.plan import Identity, Planned, seat_name
from rolltape.collect.settings import CollectSettings
from rolltape.collect.tasks import Task, seed_of
from rolltape.records.jsonable import as_float
from rolltape.records.rollout import Status, StopReason
from rolltape.traces import TraceWriter

log = logging.getLogger("rolltape.collect")

_SEEDS = 2**31  # engines take no larger seed than this


class Result(NamedTuple):
    """What became of one seat of one attempt."""

    rollout: str
    try_index: int
    place: int  # of the task in its source
    task: str
    attempt: int
    seat: str
    status: Status
    reward: float | None
    stop_reason: StopReason | None
    reason: str | None
    turns: int
    sampled_tokens: int
    ended: Ended | None  # None: it was broken


class Attempts:
    """Runs attempts through one gateway."""

    def __init__(
        self, gateway: Gateway, agent: Agent, settings: CollectSettings, identity: Identity, scratch: Path
    ) -> None:
        self._gateway = gateway
        self._agent = agent
        self._settings = settings
        self._identity = identity
        self._logs = Path(gateway.service.tape.directory.path) / "logs"
        self._scratch = scratch

    async def run(self, task: Task, environment: Environment, planned: Planned) -> list[Result]:
        """Attempt a task; a result a seat. What fails here is that attempt's failure alone."""
        seed = seed_of(self._identity.of(task, planned.attempt))
        seats = _Seats(self, task, planned)
        try:
            episode = environment.begin(task, seed)
        except Exception as error:
            log.warning("%s, attempt %d: its environment could not begin", task.where, planned.attempt, exc_info=error)
            for seat in planned.seats:
                seats.open(seat)
            return await seats.drop(f"the environment could not begin: {told(error)}")
        try:
            for seat in episode.seats:
                seats.open(seat)
            logs = self._logs / seats.rollout(episode.seats[0])
            assignment = Assignment(
                rollout=seats.rollout(episode.seats[0]),
                task=task.data,
                episode=episode,
                connections={seat: seats.connection(seat) for seat in episode.seats},
                max_turns=self._settings.max_turns,
                timeout_s=self._settings.timeout_s,
                allowed_tools=self._settings.allowed_tools,
                denied_tools=self._settings.denied_tools,
                seed=seed,
                logs=logs,
                scratch=self._scratch,
                on_step=seats.on_step,
            )
            outcome = await self._agent.run(assignment)
            try:
                return await self._ended(seats, episode, outcome)
            finally:
                await discard(outcome)
        except asyncio.CancelledError:
            await seats.drop("cancelled before it had ended")
            raise
        except Exception as error:
            log.warning("%s, attempt %d", task.where, planned.attempt, exc_info=error)
            return await seats.drop(told(error))

    async def _ended(self, seats: "_Seats", episode: Episode, outcome: Outcome) -> list[Result]:
        broken = outcome.broken or seats.never_asked(outcome)
        if broken:
            return await seats.drop(broken)
        ended = {seat: seats.at_limit(seat, outcome.ended[seat]) for seat in episode.seats}
        # All are scored before one is finished: a score that fails breaks the attempt for every seat of it.
        scores = {seat: _checked(await episode.score(seat, ended[seat])) for seat in episode.seats}
        return [await seats.finish(seat, ended[seat], scores[seat], outcome) for seat in episode.seats]

    @property
    def gateway(self) -> Gateway:
        return self._gateway

    def spec(self, task: Task, attempt: int, seat: str, *, again: bool) -> SessionSpec:
        """The session of a seat."""
        forced = self._settings.sampling
        if forced.seed is None and "seed" in self._gateway.service.pool.applies:
            own = seed_of(self._identity.of(task, attempt, seat)) % _SEEDS
            forced = msgspec.structs.replace(forced, seed=own)
        return SessionSpec(
            task_id=task.id,
            task=task.data,
            step=self._settings.step,
            attempt=attempt,
            source=task.source,
            agent=seat_name(self._agent.name, seat),
            new_try=again,
            forced=forced,
            thinking=self._settings.thinking,
            max_turns=self._settings.max_turns,
            context_budget=self._settings.context_budget,
            allowed_tools=self._settings.allowed_tools,
            denied_tools=self._settings.denied_tools,
        )

    def traced(self, session: OpenSession) -> TraceWriter:
        return TraceWriter(session.rollout, self._settings.capture)


class _Seats:
    """The sessions of one attempt, and the traces of their rollouts."""

    def __init__(self, attempts: Attempts, task: Task, planned: Planned) -> None:
        self._attempts = attempts
        self._service = attempts.gateway.service
        self._task = task
        self._planned = planned
        self._sessions: dict[str, OpenSession] = {}
        self._traces: dict[str, TraceWriter] = {}

    def open(self, seat: str) -> None:
        spec = self._attempts.spec(self._task, self._planned.attempt, seat, again=self._planned.again)
        session = self._service.open_session(spec)
        self._sessions[seat] = session
        self._traces[seat] = self._attempts.traced(session)

    def rollout(self, seat: str) -> str:
        return self._sessions[seat].rollout.id

    def connection(self, seat: str) -> Connection:
        key, url = self._sessions[seat].key, self._attempts.gateway.public_url
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
        """How a seat ended, the gateway's turn cap included, of which a program says nothing."""
        if ended.stop_reason is StopReason.COMPLETED and self._sessions[seat].refused_turns:
            return msgspec.structs.replace(ended, stop_reason=StopReason.MAX_TURNS)
        return ended

    async def finish(self, seat: str, ended: Ended, score: Score, outcome: Outcome) -> Result:
        """An outcome of the policy's own, limits included: what its environment says it is worth."""
        session = self._sessions.pop(seat)
        trace = self._traces[seat]
        agent = {"exit_code": outcome.exit_code, "signal": outcome.signal, "timed_out": outcome.timed_out}
        extra = {name: value for name, value in agent.items() if value is not None and value is not False}
        total = trace.final(reward=score.reward, reward_data=score.reward_data, extra=extra or None)
        reward = None if score.reward is None or score.ungraded is not None else total
        reason = None if score.ungraded is None else f"ungraded: {score.ungraded}"
        ending = Ending(
            reward=reward,
            reward_terms=dict(score.terms) if reward is not None else {},
            stop_reason=ended.stop_reason,
            reason=reason,
            samples=False,
        )
        await self._service.finish(session.id, ending)
        return self._result(seat, session, Status.FINISHED, reward, ended.stop_reason, reason, ended)

    async def drop(self, why: str) -> list[Result]:
        """What the infrastructure broke: no reward, and to be run again."""
        results = []
        for seat, session in list(self._sessions.items()):
            del self._sessions[seat]
            await self._service.drop(session.id, why)
            results.append(self._result(seat, session, Status.FAILED, None, None, why, None))
        return results

    def _result(
        self,
        seat: str,
        session: OpenSession,
        status: Status,
        reward: float | None,
        stop_reason: StopReason | None,
        reason: str | None,
        ended: Ended | None,
    ) -> Result:
        return Result(
            rollout=session.rollout.id,
            try_index=session.rollout.try_index,
            place=self._planned.place,
            task=self._task.id or session.rollout.group[:8],
            attempt=self._planned.attempt,
            seat=seat,
            status=status,
            reward=reward,
            stop_reason=stop_reason,
            reason=reason,
            turns=session.recorder.turn_count,
            sampled_tokens=session.recorder.sampled_tokens,
            ended=ended,
        )


def _checked(score: Score) -> Score:
    if score.reward is not None:
        as_float(score.reward, "the score's reward")
    return score


def told(error: BaseException) -> str:
    """An error as a reason in a record."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__

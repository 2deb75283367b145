"""The seats of one attempt. Each has a session of the gateway, a trace, and exactly one record of how it ended."""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rolltape.collect.agents import AgentOutcome, Connection, StepRecord, is_program
from rolltape.collect.environments.protocol import AGENT, Ended, Score
from rolltape.collect.grading.grades import keep_folder
from rolltape.collect.plan import PlannedAttempt, RolloutIdentity, seat_agent
from rolltape.collect.records import LAUNCH
from rolltape.collect.results import RolloutResult, ended_result, usage_of
from rolltape.collect.sandboxes import SandboxNetwork
from rolltape.collect.settings import CollectSettings
from rolltape.collect.tasks import Task, seed_of
from rolltape.gateway.finished import Ending, as_delivered
from rolltape.gateway.gateway import Gateway
from rolltape.gateway.sessions import OpenSession, SessionSpec
from rolltape.gateway.wire import base_urls
from rolltape.records.rollout import Event, EventKind, Rollout, Session, Status, StopReason
from rolltape.samples import linearize
from rolltape.traces import Capture, TraceWriter
from rolltape.traces.writer import is_captured

_SEEDS = 2**31  # engines accept smaller seeds only


class SeatSessions:
    """The sessions of one attempt, and the traces of their rollouts."""

    def __init__(
        self,
        gateway: Gateway,
        settings: CollectSettings,
        identity: RolloutIdentity,
        task: Task,
        planned: PlannedAttempt,
        tries: Mapping[str, int],
    ) -> None:
        self._gateway = gateway
        self._service = gateway.service
        self._settings = settings
        self._identity = identity
        self._tries = tries
        self._task = task
        self._planned = planned
        self._sessions: dict[str, OpenSession] = {}  # of seats that have not ended
        self._traces: dict[str, TraceWriter] = {}
        self.results: list[RolloutResult] = []  # of seats that have

    def open(self, seat: str) -> None:
        """Start a seat's rollout."""
        how = self._settings
        session = self._sessions[seat] = self._service.open_session(self._spec(seat))
        self._traces[seat] = TraceWriter(
            session.rollout, how.capture, fraction=how.trace_fraction, keep=how.with_records
        )

    def _spec(self, seat: str) -> SessionSpec:
        task, how, attempt = self._task, self._settings, self._planned.attempt
        forced = how.sampling
        if forced.seed is None and "seed" in self._service.pool.applies:
            own = seed_of(self._identity.rollout_id(task, attempt, seat)) % _SEEDS
            forced = msgspec.structs.replace(forced, seed=own)
        return SessionSpec(
            task_id=task.id,
            task=task.data,
            extra={LAUNCH: self._launch_facts(seat)},
            step=how.step,
            attempt=attempt,
            source=task.source,
            agent=seat_agent(self._identity.agent, seat),
            new_try=self._planned.again,
            try_index=self._tries.get(seat),
            forced=forced,
            thinking=how.thinking,
            max_turns=how.max_turns,
            context_budget=how.context_budget,
            allowed_tools=how.allowed_tools,
            denied_tools=how.denied_tools,
        )

    def _launch_facts(self, seat: str) -> dict[str, Any]:
        """The facts of a rollout that records and grading need and that are nowhere else on the tape."""
        how = self._settings
        traced = how.capture is Capture.ALL or is_captured(
            self._identity.rollout_id(self._task, self._planned.attempt, seat), how.capture, how.trace_fraction
        )
        facts = {
            "task_index": self._planned.task_index,
            "environment": self._task.environment or how.environment,
            "seat": None if seat == AGENT else seat,
            "untraced": None if traced else True,
            "image": self._image(),
        }
        return {name: value for name, value in facts.items() if value is not None}

    def _image(self) -> str | None:
        """The image in which the attempt runs, or None."""
        how = self._settings
        if not how.has_images or not is_program(how.agent):
            return None
        container = how.container.for_task(self._task.data.get("sandbox"), SandboxNetwork(how.sandbox_network))
        return container.image or container.build

    def rollout(self, seat: str) -> str:
        """The id of a seat's rollout."""
        return self._sessions[seat].rollout.id

    def connection(self, seat: str) -> Connection:
        """How an agent reaches a seat's session."""
        key = self._sessions[seat].key
        urls = base_urls(self._gateway.public_url, key)
        return Connection(base_urls=urls, key=key, model=self._service.model_name)

    def on_step(self, seat: str, step: StepRecord) -> None:
        """Write a step of the chat agent into its seat's trace."""
        answer = step.answer
        self._traces[seat].step(
            turn=step.turn,
            reward=None if answer is None else answer.reward,
            done=step.stop_reason is not None,
            stop_reason=step.stop_reason,
            reward_data=None if answer is None else answer.reward_data,
            env_state=None if answer is None else answer.env_state,
            metrics=None if answer is None else answer.metrics,
            # No later prompt contains them.
            extra={"tool_results": list(step.tool_results)} if step.tool_results and step.stop_reason else None,
        )

    async def close(self) -> list[OpenSession]:
        """Take no more turns, end those in flight, and return the sessions."""
        sessions = list(self._sessions.values())
        await asyncio.gather(*(session.close("ended", 0) for session in sessions))
        return sessions

    def apply_limits(self, seat: str, ended: Ended) -> Ended:
        """How a seat ended, including the gateway's own limits, which a program does not report."""
        session = self._sessions[seat]
        if ended.stop_reason is not StopReason.COMPLETED:
            return ended
        if session.refused_turns:
            return msgspec.structs.replace(ended, stop_reason=StopReason.MAX_TURNS)
        # After a prompt above the budget, an agent may summarize its history and continue: only the last turn counts.
        last = next((turn for turn in reversed(session.recorder.turns) if turn.facts.auxiliary is None), None)
        if session.overflowed or (last is not None and last.facts.extra.get("over_budget")):
            return msgspec.structs.replace(ended, stop_reason=StopReason.CONTEXT_OVERFLOW)
        return ended

    async def finish(self, seat: str, ended: Ended, score: Score, outcome: AgentOutcome) -> None:
        """Finish a seat with the policy's own outcome, which may be a limit, and with its score."""
        session, trace = self._sessions[seat], self._traces[seat]
        agent = _agent_end(outcome) | self._own_text(seat, ended)
        if score.compared is not None:
            agent |= {"compared": score.compared}
        if score.ungraded is not None:
            agent |= await self._keep_for_grading(session, ended, trace.total_reward)
        total = self._end_trace(seat, agent, reward=score.reward, reward_data=score.reward_data)
        reward = None if score.reward is None or score.ungraded is not None else total
        terms = dict(score.terms) if reward is not None else {}
        stop, reason = ended.stop_reason, score.reason
        ending = Ending(reward=reward, reward_terms=terms, stop_reason=stop, reason=reason, samples=False)
        await self._service.finish(session.id, ending)
        # For a comparison, without the working directory, which is removed by then.
        text = ended.text if score.compared is None else score.compared
        compared = msgspec.structs.replace(ended, text=text, folder=None, checks=None)
        end = {"status": Status.FINISHED, "stop_reason": stop, "reason": reason}
        self._add_result(seat, agent, end, None if reward is None else {"reward": reward, "terms": terms}, compared)

    def _own_text(self, seat: str, ended: Ended) -> dict[str, str]:
        """The agent's last text, unless it is that of the last reply on the tape."""
        turns = self._sessions[seat].recorder.turns
        last = next((turn.reply for turn in reversed(turns) if turn.reply and turn.facts.auxiliary is None), None)
        return {} if ended.text == ("" if last is None else last.text) else {"text": ended.text}

    async def _keep_for_grading(self, session: OpenSession, ended: Ended, step_reward: float | None) -> dict[str, Any]:
        """Keep what grading needs and the tape does not have: the working directory, and the steps' rewards."""
        kept: dict[str, Any] = {} if step_reward is None else {"step_reward": step_reward}
        if ended.folder is not None:
            name = f"logs/{session.rollout.id}/ungraded-{session.rollout.try_index}.tar"
            await asyncio.to_thread(keep_folder, ended.folder, Path(self._service.tape.directory.path) / name)
            kept["folder"] = name
        return kept

    async def fail(self, why: str, outcome: AgentOutcome | None = None) -> list[RolloutResult]:
        """Fail the seats that are open: the infrastructure broke the attempt. Return all results of the attempt."""
        for seat, session in list(self._sessions.items()):
            agent = {} if outcome is None else _agent_end(outcome)
            if outcome is not None and seat in outcome.ended:
                agent |= self._own_text(seat, outcome.ended[seat])
            if agent:
                self._end_trace(seat, agent)
            # The agent's error does not say which engine failed, or how. The record does.
            error = session.engine_wait().error
            reason = why if error is None or error in why else f"{why} ({error})"
            await self._service.drop(session.id, reason)
            self._add_result(seat, agent, {"status": Status.FAILED, "stop_reason": None, "reason": reason})
        return self.results

    def _end_trace(self, seat: str, agent: Mapping[str, Any], **final: Any) -> float | None:
        """Write the end of a seat's trace. The end of a program is recorded even if traces are off."""
        trace, rollout = self._traces[seat], self._sessions[seat].rollout
        if agent and not trace.captures:
            rollout.append_event(rollout.encode_event(EventKind.TRACE, {"step": None, "extra": dict(agent)}))
        return trace.final(**final, extra=agent or None)

    def _add_result(
        self,
        seat: str,
        agent: Mapping[str, Any],
        end: dict[str, Any],
        score: dict[str, Any] | None = None,
        ended: Ended | None = None,
    ) -> None:
        """Add the result of a seat that has ended. `end` and `score` are the events that the tape has of it."""
        settings, session = self._settings, self._sessions.pop(seat)
        rollout = self._build_rollout(seat, session, agent, end, score)
        result = ended_result(
            rollout,
            self._planned.task_index,
            seat,
            with_record=settings.with_records,
            usage=usage_of(session.recorder.turns, settings),
            ended=ended,
            fates=_count_fates(rollout) if settings.with_fates else None,
        )
        self.results.append(result)

    def _build_rollout(
        self,
        seat: str,
        session: OpenSession,
        agent: Mapping[str, Any],
        end: dict[str, Any],
        score: dict[str, Any] | None,
    ) -> Rollout:
        """Build the rollout without reading the tape, equal to what a reader would get."""
        head = session.rollout.head

        def event(kind: EventKind, data: dict[str, Any]) -> Event:
            return Event("", 0, time.time_ns(), kind.value, head.id, head.try_index, None, None, data)

        trace = self._traces[seat]
        events = [*trace.events, event(EventKind.FINISH, end)]
        if agent and not trace.captures:
            events.append(event(EventKind.TRACE, {"step": None, "extra": dict(agent)}))
        if score is not None:
            events.append(event(EventKind.SCORE, score))
        turns = [as_delivered(turn, session.deliveries) for turn in session.recorder.turns]
        return Rollout(head, [Session(session.recorder.head, turns)], events, writer_alive=True)


def _count_fates(rollout: Rollout) -> dict[str, int]:
    return {fate.value: tokens for fate, tokens in linearize(rollout).ledger.totals().items()}


def _agent_end(outcome: AgentOutcome) -> dict[str, Any]:
    """How an agent ended, without fields that have no value."""
    fields = {"exit_code": outcome.exit_code, "signal": outcome.signal, "timed_out": outcome.timed_out or None}
    return {name: value for name, value in fields.items() if value is not None}

"""Runs one attempt: the agent works in an episode, and the environment scores how it ended."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

from rolltape.collect.agents import (
    Agent,
    AgentOutcome,
    Assignment,
    FunctionAgent,
    ProgramAgent,
    discard,
    scratch_folder,
)
from rolltape.collect.environments import Environments, opened
from rolltape.collect.environments.protocol import Environment, check_episode
from rolltape.collect.functions import call_environment, describe_error, time_limit
from rolltape.collect.grading.faults import find_fault
from rolltape.collect.grading.grades import score_seats
from rolltape.collect.loops import ATTEMPT_BLOCKED, BlockedTime, WatchedLoop, watching_loop
from rolltape.collect.plan import PlannedAttempt, RolloutIdentity
from rolltape.collect.results import RolloutResult
from rolltape.collect.runners.gateway import make_gateway
from rolltape.collect.runners.protocol import RunnerFacts
from rolltape.collect.runners.seats import SeatSessions
from rolltape.collect.sandboxes import Confinement, ContainerOwner, Sandboxes, Unconfined, open_sandbox, time_limit_of
from rolltape.collect.settings import CollectSettings
from rolltape.collect.tasks import Task, seed_of
from rolltape.errors import TapeWriteError
from rolltape.gateway.gateway import Gateway
from rolltape.tape.recording.tape import Tape

log = logging.getLogger("rolltape.collect")


class AttemptRunner:
    """Runs attempts through one gateway."""

    def __init__(
        self,
        gateway: Gateway,
        agent: Agent,
        settings: CollectSettings,
        environments: Environments,
        scratch: Path,
        sandboxes: Sandboxes,
        confinement: Confinement,
        loop: WatchedLoop,
    ) -> None:
        self.facts = RunnerFacts(gateway.service.model_name, agent.name, confinement)
        self._gateway = gateway
        self._agent = agent
        self._settings = settings
        self._environments = environments
        self._logs = Path(gateway.service.tape.directory.path) / "logs"
        self._scratch = scratch
        self._sandboxes = sandboxes
        self._loop = loop
        self.cancelled: list[RolloutResult] = []  # of attempts whose `run` was cancelled

    async def run(
        self, task: Task, planned: PlannedAttempt, identity: RolloutIdentity, tries: Mapping[str, int] | None = None
    ) -> list[RolloutResult]:
        """Attempt a task, and return a result for each seat. An error fails only this attempt.

        `tries` has the number of the try for each seat, if the caller counts them; otherwise the tape does.
        """
        seed = seed_of(identity.rollout_id(task, planned.attempt))
        environment = self._environments.of(task)
        seats = SeatSessions(self._gateway, self._settings, identity, task, planned, tries or {})
        blocked = BlockedTime(self._loop)
        ATTEMPT_BLOCKED.set(blocked)  # each attempt has its own asyncio task, or the next attempt sets it again
        try:
            with time_limit(self._settings.score_timeout_s):
                episode = check_episode(await call_environment(environment.name, environment.begin, task, seed))
        except Exception as error:
            log.warning("%s, attempt %d: its environment could not begin", task.where, planned.attempt, exc_info=error)
            for seat in planned.seats:
                seats.open(seat)
            return await seats.fail(f"the environment could not begin: {describe_error(error)}")
        try:
            for seat in episode.seats:
                seats.open(seat)
            rollout = seats.rollout(episode.seats[0])
            assignment = make_assignment(
                self._settings,
                task,
                environment=environment.name,
                episode=episode,
                rollout=rollout,
                connections={seat: seats.connection(seat) for seat in episode.seats},
                seed=seed,
                logs=self._logs / rollout,
                scratch=self._scratch,
                sandboxes=self._sandboxes,
                on_step=seats.on_step,
            )
            async with opened(environment, episode):
                outcome = await self._agent.run(assignment)
                try:
                    return await self._finish(seats, environment, assignment, outcome, blocked)
                finally:
                    await discard(outcome)
        except asyncio.CancelledError:
            self.cancelled += await seats.fail("cancelled before it had ended")
            raise
        except Exception as error:
            log.warning("%s, attempt %d", task.where, planned.attempt, exc_info=error)
            results = await seats.fail(describe_error(error))
            if not results and isinstance(error, TapeWriteError):
                raise  # it could not begin, and has no record; later ones could not begin either
            return results

    async def _finish(
        self,
        seats: SeatSessions,
        environment: Environment,
        assignment: Assignment,
        outcome: AgentOutcome,
        blocked: BlockedTime,
    ) -> list[RolloutResult]:
        episode = assignment.episode
        fault = find_fault(outcome, await seats.close(), blocked, assignment.timeout_s)
        if fault is not None:
            return await seats.fail(fault, outcome)
        ended = {seat: seats.apply_limits(seat, outcome.ended[seat]) for seat in episode.seats}
        # All seats are scored before one is finished: if one cannot be graded, none is.
        scores = await score_seats(environment, episode, ended, self._settings.score_timeout_s)
        for seat in episode.seats:
            await seats.finish(seat, ended[seat], scores[seat], outcome)
        return seats.results


def make_assignment(settings: CollectSettings, task: Task, **fields: Any) -> Assignment:
    """The assignment of an agent, with the limits of the collection and of the task. `fields` are the attempt's own."""
    return Assignment(
        task=task.data,
        max_turns=settings.max_turns,
        timeout_s=time_limit_of(task.data.get("sandbox")) or settings.timeout_s,
        allowed_tools=settings.allowed_tools,
        denied_tools=settings.denied_tools,
        **fields,
    )


@asynccontextmanager
async def open_attempts(
    settings: CollectSettings,
    tape: Tape,
    environments: Environments,
    agent: Agent,
    gateway: Gateway | None = None,
    *,
    keep_admin_key: bool = False,
) -> AsyncIterator[AttemptRunner]:
    """Run attempts within the block, through a running gateway or through a new one."""
    with scratch_folder(tape.directory.path) as scratch:
        own = make_gateway(settings, tape, keep_admin_key=keep_admin_key) if gateway is None else nullcontext(gateway)
        async with own as used:
            sandboxes, confinement = await _open_sandbox(settings, agent, used, tape, scratch)
            with watching_loop("the collector") as loop:
                try:
                    yield AttemptRunner(used, agent, settings, environments, scratch, sandboxes, confinement, loop)
                finally:
                    await environments.close()


async def _open_sandbox(
    settings: CollectSettings, agent: Agent, gateway: Gateway, tape: Tape, scratch: Path
) -> tuple[Sandboxes, Confinement]:
    """The sandbox of an agent that is a program. Other agents run in this process, without a sandbox."""
    if isinstance(agent, FunctionAgent):
        return Unconfined(), Confinement("none", f"{agent.name} runs in the collector's own process: it is trusted")
    if not isinstance(agent, ProgramAgent):
        return Unconfined(), Confinement(None, None)
    sandboxes = await open_collection_sandbox(settings, tape, gateway, scratch=scratch)
    return sandboxes, sandboxes.confinement


async def open_collection_sandbox(
    settings: CollectSettings, tape: Tape, gateway: Gateway | None, *, scratch: Path
) -> Sandboxes:
    """The sandbox by the settings of a collection. Without a gateway it is only for checks."""
    return await open_sandbox(
        settings.sandbox,
        gateway,
        scratch=scratch,
        owner=ContainerOwner(tape.directory.path, tape.writer),
        network=settings.sandbox_network,
        reads=settings.sandbox_read,
        passed=settings.pass_env,
        container=settings.container,
    )

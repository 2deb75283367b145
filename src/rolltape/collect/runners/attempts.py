"""One attempt: an agent at work in an episode, and what its environment says that it is worth."""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

from rolltape.collect.agents import Agent, Assignment, Outcome, discard
from rolltape.collect.environments.protocol import Environment, Episode, Score
from rolltape.collect.plan import Identity, Planned
from rolltape.collect.result import Result, told
from rolltape.collect.runners.seats import Seats
from rolltape.collect.settings import CollectSettings
from rolltape.collect.tasks import Task, seed_of
from rolltape.errors import TapeWriteError
from rolltape.gateway.gateway import Gateway
from rolltape.records.jsonable import as_float

log = logging.getLogger("rolltape.collect")


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
        self.cancelled: list[Result] = []  # of attempts whose `run` was cancelled

    async def run(
        self, task: Task, environment: Environment, planned: Planned, tries: Mapping[str, int] | None = None
    ) -> list[Result]:
        """Attempt a task; a result a seat. What fails here is that attempt's failure alone.

        `tries` says which try it is for each seat, where somebody else counts them; else the tape does.
        """
        seed = seed_of(self._identity.of(task, planned.attempt))
        seats = Seats(self._gateway, self._settings, self._identity, task, planned, tries or {})
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
            self.cancelled += await seats.drop("cancelled before it had ended")
            raise
        except Exception as error:
            log.warning("%s, attempt %d", task.where, planned.attempt, exc_info=error)
            results = await seats.drop(told(error))
            if not results and isinstance(error, TapeWriteError):
                raise  # it could not even begin, and no record says so: nor could those that come after it
            return results

    async def _ended(self, seats: Seats, episode: Episode, outcome: Outcome) -> list[Result]:
        broken = outcome.broken or seats.never_asked(outcome)
        if broken:
            return await seats.drop(broken, outcome)
        ended = {seat: seats.at_limit(seat, outcome.ended[seat]) for seat in episode.seats}
        # All are scored before one is finished: a score that fails breaks the attempt for every seat of it.
        scores = {seat: _checked(await episode.score(seat, ended[seat])) for seat in episode.seats}
        for seat in episode.seats:
            await seats.finish(seat, ended[seat], scores[seat], outcome)
        return seats.results


def _checked(score: Score) -> Score:
    if score.reward is not None:
        as_float(score.reward, "the score's reward")
    return score

"""Runs attempts in this process, through one gateway that records on the run's own tape."""

import asyncio
from contextlib import AsyncExitStack
from typing import Self

from rolltape.collect.agents import agent_named
from rolltape.collect.environments import Environments
from rolltape.collect.plan import RolloutIdentity
from rolltape.collect.results import RolloutResult
from rolltape.collect.runners.attempts import open_attempts
from rolltape.collect.runners.protocol import NO_ROOM_S, AttemptQueue, OnEnded, RunnerFacts, run_with_grace
from rolltape.collect.settings import CollectSettings
from rolltape.gateway.gateway import Gateway
from rolltape.tape.recording.tape import Tape


class LocalRunner:
    """Runs up to `max_concurrent` attempts at once."""

    def __init__(
        self,
        settings: CollectSettings,
        tape: Tape,
        environments: Environments,
        *,
        gateway: Gateway | None = None,
        keep_admin_key: bool = False,
    ) -> None:
        """Without a running `gateway` it starts its own; with `keep_admin_key` the key of that is kept in the run."""
        self._settings = settings
        agent = agent_named(settings.agent, in_image=settings.has_images)
        self._opening = open_attempts(settings, tape, environments, agent, gateway, keep_admin_key=keep_admin_key)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._attempts = await self._stack.enter_async_context(self._opening)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def facts(self) -> RunnerFacts:
        return self._attempts.facts

    @property
    def cancelled(self) -> list[RolloutResult]:
        return self._attempts.cancelled

    async def run(
        self, queue: AttemptQueue, identity: RolloutIdentity, on_ended: OnEnded, stopping: asyncio.Event
    ) -> None:
        async def work() -> None:
            while not stopping.is_set() and not queue.is_exhausted:
                if (one := await queue.next()) is not None:
                    planned, task = one
                    await on_ended(planned, await self._attempts.run(task, planned, identity))
                elif not queue.is_exhausted:
                    await asyncio.sleep(NO_ROOM_S)

        await run_with_grace([work() for _ in range(self._settings.max_concurrent)], stopping, self._settings.grace_s)

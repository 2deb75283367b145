"""Runs attempts in this process, through one gateway that records on the run's own tape."""

import asyncio
from contextlib import AsyncExitStack
from typing import Self

from rolltape.collect.agents import agent_named, scratch_folder
from rolltape.collect.environments import Environments
from rolltape.collect.plan import RolloutIdentity
from rolltape.collect.results import RolloutResult
from rolltape.collect.runners.attempts import AttemptRunner
from rolltape.collect.runners.gateway import make_gateway
from rolltape.collect.runners.protocol import NO_ROOM_S, AttemptQueue, OnEnded, run_with_grace
from rolltape.collect.settings import CollectSettings
from rolltape.gateway.gateway import Gateway
from rolltape.tape.recording.tape import Tape


class LocalRunner:
    """Runs up to `max_concurrent` attempts at once."""

    def __init__(
        self, settings: CollectSettings, tape: Tape, environments: Environments, *, gateway: Gateway | None = None
    ) -> None:
        """Without a `gateway` that runs already, it starts one of its own."""
        self._given_gateway = gateway
        self._settings = settings
        self._tape = tape
        self._environments = environments
        self._agent = agent_named(settings.agent)
        self._stack = AsyncExitStack()
        self.cancelled: list[RolloutResult] = []

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self._scratch = stack.enter_context(scratch_folder(self._tape.directory.path))
            if self._given_gateway is None:
                self._gateway = await stack.enter_async_context(make_gateway(self._settings, self._tape))
            else:
                self._gateway = self._given_gateway
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def model_name(self) -> str:
        return self._gateway.service.model_name

    @property
    def agent_name(self) -> str:
        return self._agent.name

    async def run(
        self, queue: AttemptQueue, identity: RolloutIdentity, on_ended: OnEnded, stopping: asyncio.Event
    ) -> None:
        attempts = AttemptRunner(self._gateway, self._agent, self._settings, identity, self._scratch)
        self.cancelled = attempts.cancelled

        async def work() -> None:
            while not stopping.is_set() and not queue.is_exhausted:
                if (one := await queue.next()) is not None:
                    planned, task = one
                    await on_ended(planned, await attempts.run(task, self._environments.of(task), planned))
                elif not queue.is_exhausted:
                    await asyncio.sleep(NO_ROOM_S)

        await run_with_grace([work() for _ in range(self._settings.max_concurrent)], stopping, self._settings.grace_s)

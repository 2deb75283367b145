"""Attempts in this process: one gateway on the run's own tape, as many at once as may be."""

import asyncio
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from rolltape.collect.agents import agent_named
from rolltape.collect.agents.scratch import Scratch
from rolltape.collect.environments import Environments
from rolltape.collect.plan import Identity
from rolltape.collect.result import Result
from rolltape.collect.runners.attempts import Attempts
from rolltape.collect.runners.models import model_of
from rolltape.collect.runners.protocol import NO_ROOM_S, OnEnded, Work, within_grace
from rolltape.collect.settings import CollectSettings
from rolltape.gateway.engines.opening import open_engines
from rolltape.gateway.gateway import Gateway
from rolltape.gateway.settings import GatewaySettings
from rolltape.tape.recording.tape import Tape


class LocalRunner:
    """Runs attempts here."""

    def __init__(
        self, settings: CollectSettings, tape: Tape, environments: Environments, *, gateway: Gateway | None = None
    ) -> None:
        """Through a gateway of its own, by the settings, or through one that runs already."""
        self._given_gateway = gateway
        self._settings = settings
        self._tape = tape
        self._environments = environments
        self._agent = agent_named(settings.agent)
        self._stack = AsyncExitStack()
        self.cancelled: list[Result] = []

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self._scratch = stack.enter_context(Scratch(self._tape.directory.path))
            if self._given_gateway is None:
                own = gateway_of(self._settings, self._tape)
                self._gateway = await stack.enter_async_context(own)
            else:
                self._gateway = self._given_gateway
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @property
    def model_name(self) -> str:
        return self._gateway.service.model_name

    @property
    def agent_name(self) -> str:
        return self._agent.name

    async def run(self, work: Work, identity: Identity, on_ended: OnEnded, told_to_end: asyncio.Event) -> None:
        attempts = Attempts(self._gateway, self._agent, self._settings, identity, self._scratch.path)
        self.cancelled = attempts.cancelled

        async def one_after_another() -> None:
            while not told_to_end.is_set() and not work.is_exhausted:
                if (one := await work.next()) is not None:
                    planned, task = one
                    await on_ended(planned, await attempts.run(task, self._environments.of(task), planned))
                elif not work.is_exhausted:
                    await asyncio.sleep(NO_ROOM_S)

        await within_grace(
            [one_after_another() for _ in range(self._settings.max_concurrent)], told_to_end, self._settings.grace_s
        )


def gateway_of(settings: CollectSettings, tape: Tape) -> Gateway:
    """The gateway that a collection's agents talk to."""
    model = model_of(settings.model, settings.model_name, settings.engines)
    how = GatewaySettings(
        model_name=model.name, renderer=settings.renderer, thinking_retention=settings.thinking_retention
    )
    engines = open_engines(
        model.engines,
        api_key=settings.engine_key,
        model=model.asked,
        logprob_kind=settings.logprob_kind,
        routed_experts=settings.routed_experts,
    )
    return Gateway(engine=engines, tape=tape, model=model.folder, settings=how)

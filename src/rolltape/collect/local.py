"""The collector on one machine: attempts kept in flight, groups compared when they are whole, all of it on a tape."""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from rolltape.capture.gateway import Gateway
from rolltape.capture.settings import GatewaySettings
from rolltape.collect.agents import agent_named
from rolltape.collect.attempt import Attempts, Result
from rolltape.collect.environments import environment_named
from rolltape.collect.environments.protocol import AGENT, Environment
from rolltape.collect.groups import Groups
from rolltape.collect.plan import Identity, Planned, check_model, check_resumable, known_of, planned
from rolltape.collect.scratch import Scratch
from rolltape.collect.settings import CollectSettings
from rolltape.collect.sources import open_source
from rolltape.collect.tasks import Task
from rolltape.records.rollout import EventKind
from rolltape.tape.tape import Tape


class Launch(NamedTuple):
    """What a collection is about to do."""

    tasks: int
    attempts: int  # all there are
    done_before: int
    running_elsewhere: int


class Collector:
    """Collects one step of one run."""

    def __init__(self, settings: CollectSettings, tape: Tape, *, resume: bool = False) -> None:
        """Read and check the source and all that is named; nothing runs yet."""
        self.settings = settings
        self._tape = tape
        self._environments: dict[str, Environment] = {}
        self._agent = agent_named(settings.agent)
        self._source = open_source(
            settings.source,
            split=settings.split,
            limit=settings.limit,
            shuffle_seed=settings.seed,
            name=settings.source_name,
            check=lambda task: self.environment_of(task).check(task),
        )
        self._run = tape.run()
        check_resumable(tape, self._run, settings, self._source.name, resume=resume)
        self._resume = resume
        self._told_to_end = asyncio.Event()

    def end(self) -> None:
        """Begin no more attempts; those that run have their grace time."""
        self._told_to_end.set()

    async def run(self, on_launch: Callable[[Launch], None], on_results: Callable[[list[Result]], None]) -> None:
        """Collect, and tell of attempts as they end, or where they are compared once that is done.

        Cancelling it ends what runs; the tape is whole either way.
        """
        settings = self.settings
        how = GatewaySettings(model_name=settings.model_name, thinking_retention=settings.thinking_retention)
        gateway = Gateway(engine=list(settings.engines), tape=self._tape, model=settings.model, settings=how)
        with self._source, Scratch(self._tape.directory.path) as scratch:
            async with gateway:
                identity = Identity(self._tape.name, settings.step, gateway.service.model_name, self._agent.name)
                known = known_of(self._run, self._source.name, settings.step)
                check_model(self._tape, known, identity.model, settings.step)
                if not self._resume:
                    self._tape.note(EventKind.COLLECT, {"settings": settings.to_be_kept(self._source.name)})
                total = len(self._source) * settings.group_size
                on_launch(Launch(len(self._source), total, known.attempts, known.running))
                work = planned(self._source, settings, identity, known, self._seats)
                attempts = Attempts(gateway, self._agent, settings, identity, scratch.path)
                groups = Groups(self._tape, self._source, identity, settings.group_size)
                groups.take_up(known, self.environment_of)
                try:
                    await self._kept_busy(work, attempts, groups, on_results)
                    if not self._told_to_end.is_set():
                        on_results(await groups.compare_rest(self.environment_of))
                finally:
                    on_results(groups.left())

    async def _kept_busy(
        self, work: Iterator[Planned], attempts: Attempts, groups: Groups, on_results: Callable[[list[Result]], None]
    ) -> None:
        """As many attempts at once as may be, none prepared before its time."""
        running: set[asyncio.Task[list[Result]]] = set()
        told = asyncio.ensure_future(self._told_to_end.wait())
        deadline: float | None = None  # once it is told to end
        try:
            while True:
                while len(running) < self.settings.max_concurrent and not told.done():
                    one = next(work, None)
                    if one is None:
                        break
                    running.add(asyncio.ensure_future(self._attempted(one, attempts, groups)))
                if not running:
                    return
                if told.done() and deadline is None:
                    deadline = time.monotonic() + self.settings.grace_s
                limit = None if deadline is None else max(deadline - time.monotonic(), 0.0)
                waiting: set[asyncio.Future[Any]] = {*running} if told.done() else {*running, told}
                await asyncio.wait(waiting, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
                done = {task for task in running if task.done()}
                if limit is not None and not done:
                    return  # the grace time is over
                for task in done:
                    running.discard(task)
                    on_results(task.result())
        finally:
            told.cancel()
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _attempted(self, one: Planned, attempts: Attempts, groups: Groups) -> list[Result]:
        task = self._source[one.place]
        environment = self.environment_of(task)
        return await groups.add(one.place, environment, await attempts.run(task, environment, one))

    def environment_of(self, task: Task) -> Environment:
        name = task.environment or self.settings.environment
        if name not in self._environments:
            self._environments[name] = environment_named(name)
        return self._environments[name]

    def _seats(self, task: Task) -> tuple[str, ...]:
        try:
            return tuple(self.environment_of(task).begin(task, 0).seats)
        except Exception:  # noqa: BLE001 - anybody's environment; its attempts fail for it, each with the reason
            return (AGENT,)

"""Collections for a trainer: a collector for each step, split and group size that it requests."""

import asyncio

import msgspec

from rolltape.collect.collector import Collector
from rolltape.collect.settings import CollectSettings
from rolltape.collect.tasks import Task
from rolltape.errors import CollectError
from rolltape.gateway.gateway import Gateway
from rolltape.tape.recording.tape import Tape


class StepCollection:
    """A running collector, and how many requests wait for it."""

    def __init__(self, collector: Collector) -> None:
        self.collector = collector
        self.requests = 0
        self.running = asyncio.ensure_future(collector.run())
        self._attempts: dict[bytes, tuple[Task, asyncio.Future[None]]] = {}

    async def attempt(self, task: Task) -> None:
        """Return when all attempts at a task have ended. If the collection ended before that, raise its error.

        A task that was requested before, for example by a cancelled request, is not attempted again.
        """
        known, attempts = self._attempts.get(task.key, (None, None))
        if attempts is None or known != task:
            attempts = asyncio.ensure_future(self.collector.attempt(task))
            attempts.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # perhaps no request waits
            self._attempts.setdefault(task.key, (task, attempts))
        try:
            await asyncio.shield(attempts)
        except CollectError:
            await asyncio.wait({self.running})
            self.running.result()
            raise

    async def end(self) -> None:
        """End it when its attempts have ended, or at once if a request still waits for some."""
        if self.requests:
            self.running.cancel()
        self.collector.close()
        await asyncio.wait({self.running})


class StepCollections:
    """The running collections, through one gateway."""

    def __init__(self, settings: CollectSettings, tape: Tape, gateway: Gateway) -> None:
        self._settings = settings
        self._tape = tape
        self._gateway = gateway
        self._open: dict[tuple[int, str | None, int], StepCollection] = {}

    async def open(self, step: int, split: str | None, group_size: int) -> StepCollection:
        """The collection that a request belongs to. Other collections of the split without requests are ended."""
        key = (step, split, group_size)
        if key in self._open and self._open[key].running.done():
            del self._open[key]
        if key not in self._open:
            for other in [one for one in self._open if one[1] == split and not self._open[one].requests]:
                await self._open.pop(other).end()
            settings = msgspec.structs.replace(self._settings, step=step, split=split, group_size=group_size)
            collector = Collector(settings, self._tape, resume=None, gateway=self._gateway, is_open=True)
            self._open[key] = StepCollection(collector)
        return self._open[key]

    async def end(self) -> None:
        """End all collections."""
        while self._open:
            _, collection = self._open.popitem()
            await collection.end()

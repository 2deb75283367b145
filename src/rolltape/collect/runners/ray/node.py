"""One machine of a cluster: a gateway and a journal of its own, and what ended there published for everybody."""

import asyncio
import hashlib
import json
import os
import re
import socket
import sys
import tempfile
from contextlib import AsyncExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from rolltape.collect.agents import agent_named
from rolltape.collect.agents.scratch import Scratch
from rolltape.collect.environments import Environments
from rolltape.collect.plan import Identity, Planned
from rolltape.collect.result import Result
from rolltape.collect.runners.attempts import Attempts
from rolltape.collect.runners.local import gateway_of
from rolltape.collect.settings import CollectSettings
from rolltape.collect.tasks import Task
from rolltape.errors import CollectError
from rolltape.tape.recording.tape import open_tape
from rolltape.tape.shards.places import Place
from rolltape.tape.shards.publish import Publisher, publish_left
from rolltape.tape.stored import Key


class NodeSettings(NamedTuple):
    """What a node is told of the run it works for."""

    collect: CollectSettings
    about: dict[str, Any]  # the content of the run's run.json
    place: str  # where what has ended is published: a path or URL that all nodes see
    folder: str | None  # for journals, on the node's own disk; None: in its folder for temporary files
    search: tuple[str, ...]  # where the modules are that tasks and agents name
    judging: dict[str, str]  # variables by which judges are found, and their keys
    rolltape: str  # the version of those who ask


class Started(NamedTuple):
    """A node that is ready."""

    host: str
    model_name: str
    agent_name: str
    left: frozenset[Key]  # rollouts that had ended here before, and are published now


class Node:
    """Runs attempts on the machine it is made on."""

    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self._stack = AsyncExitStack()
        self._attempts: Attempts | None = None
        self._running: set[asyncio.Task[list[Result]]] = set()
        self._publishing = asyncio.Lock()

    async def start(self) -> Started:
        """Publish what earlier processes left here, and get ready."""
        settings, host = self._settings, socket.gethostname()
        if (own := version("rolltape")) != settings.rolltape:
            raise CollectError(f"node {host} has rolltape {own}, the collector {settings.rolltape}; install the same")
        self._place = Place(settings.place)
        raw = self._place.about()
        if raw is None or json.loads(raw) != settings.about:
            raise CollectError(
                f"node {host} does not see the run at {settings.place}; give --publish a place that all nodes see"
            )
        os.environ.update(settings.judging)
        sys.path.extend(one for one in settings.search if one not in sys.path and Path(one).is_dir())
        self._agent = agent_named(settings.collect.agent)
        self._environments = Environments(settings.collect.environment, settings.collect.judge)
        tape = open_tape(node_folder(settings), settings.about["name"])
        self._directory = tape.directory
        async with AsyncExitStack() as stack:
            stack.callback(tape.close)
            left = await asyncio.to_thread(publish_left, self._directory, self._place)
            await asyncio.to_thread(self._publish_logs, left)
            self._publisher = Publisher(tape, self._place)
            self._scratch = stack.enter_context(Scratch(self._directory.path))
            self._gateway = await stack.enter_async_context(gateway_of(settings.collect, tape))
            self._stack = stack.pop_all()
        return Started(host, self._gateway.service.model_name, self._agent.name, left)

    async def attempt(
        self, task: Task, planned: Planned, identity: Identity, tries: dict[str, int]
    ) -> list[Result] | None:
        """Attempt a task; its results are on this machine alone until `publish` names them. None: it was cancelled."""
        if self._attempts is None:
            settings = self._settings.collect
            self._attempts = Attempts(self._gateway, self._agent, settings, identity, self._scratch.path)
        running = asyncio.ensure_future(self._attempts.run(task, self._environments.of(task), planned, tries))
        self._running.add(running)
        try:
            await asyncio.wait({running})
            return None if running.cancelled() else running.result()
        finally:
            self._running.discard(running)

    async def publish(self) -> frozenset[Key]:
        """Publish what has ended since the last time; those rollouts."""
        async with self._publishing:
            published = await asyncio.to_thread(self._publisher.publish)
            await asyncio.to_thread(self._publish_logs, published)
            return published

    async def cancel(self) -> list[Result]:
        """Cancel all that runs; what became of it."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        return [] if self._attempts is None else self._attempts.cancelled

    async def close(self) -> None:
        """End in order: nothing is left here that is not published."""
        await self.cancel()
        await self.publish()
        await self._stack.aclose()
        await asyncio.to_thread(publish_left, self._directory, self._place)

    def _publish_logs(self, rollouts: frozenset[Key]) -> None:
        for rollout, _ in rollouts:
            folder = self._directory.path / "logs" / rollout
            if folder.is_dir():
                self._place.put(folder, "logs", rollout)


def node_folder(settings: NodeSettings) -> Path:
    """Where a node journals: the same folder for the same run, so that what a dead process left is found again."""
    place = hashlib.blake2b(settings.place.encode(), digest_size=6).hexdigest()
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", settings.about["name"])
    return Path(settings.folder or Path(tempfile.gettempdir()) / "rolltape") / f"{name}-{place}"

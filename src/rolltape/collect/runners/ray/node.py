"""One node of a cluster: it has its own gateway and journal, and publishes ended rollouts."""

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
from rolltape.collect.environments import Environments
from rolltape.collect.plan import PlannedAttempt, RolloutIdentity
from rolltape.collect.results import RolloutResult
from rolltape.collect.runners.attempts import open_attempts
from rolltape.collect.runners.protocol import RunnerFacts
from rolltape.collect.settings import CollectSettings
from rolltape.collect.tasks import Task
from rolltape.errors import CollectError
from rolltape.samples.summary import open_for_recording
from rolltape.serving import raise_file_limit
from rolltape.tape.rundir import Place
from rolltape.tape.shards.publish import Publisher, publish_left
from rolltape.tape.stored import Key


class NodeSettings(NamedTuple):
    """The facts of a run that its nodes need."""

    collect: CollectSettings
    about: dict[str, Any]  # the content of the run's run.json
    place: str  # where rollouts are published: a path or URL that all nodes see
    folder: str | None  # for journals, on the node's own disk; None for its folder for temporary files
    search: tuple[str, ...]  # folders of modules that tasks and agents name
    variables: dict[str, str]  # environment variables: address, model and key of judges, and those for programs
    rolltape: str  # the collector's version


class NodeReady(NamedTuple):
    host: str
    facts: RunnerFacts
    left: frozenset[Key]  # rollouts of earlier processes here, published at the start


class ClusterNode:
    """Runs attempts on its machine. It is a Ray actor."""

    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self._stack = AsyncExitStack()
        self._running: set[asyncio.Task[list[RolloutResult]]] = set()
        self._publishing = asyncio.Lock()

    async def start(self) -> NodeReady:
        """Publish the rollouts that earlier processes left on this machine, and start the gateway."""
        settings, host = self._settings, socket.gethostname()
        if (own := version("rolltape")) != settings.rolltape:
            raise CollectError(f"node {host} has rolltape {own}, the collector {settings.rolltape}; install the same")
        self._place = Place(settings.place)
        raw = self._place.about()
        if raw is None or json.loads(raw) != settings.about:
            raise CollectError(
                f"node {host} cannot find the run at {settings.place}; give --publish a place that all nodes see"
            )
        raise_file_limit()
        os.environ.update(settings.variables)
        sys.path.extend(one for one in settings.search if one not in sys.path and Path(one).is_dir())
        agent = agent_named(settings.collect.agent, in_image=settings.collect.has_images)
        environments = Environments(settings.collect.environment, settings.collect.judge)
        tape = open_for_recording(node_folder(settings), settings.about["name"])
        self._directory = tape.directory
        async with AsyncExitStack() as stack:
            stack.callback(tape.close)
            left = await asyncio.to_thread(publish_left, self._directory, self._place)
            await asyncio.to_thread(self._publish_logs, left)
            self._publisher = Publisher(tape, self._place)
            opening = open_attempts(settings.collect, tape, environments, agent)
            self._attempts = await stack.enter_async_context(opening)
            self._stack = stack.pop_all()
        return NodeReady(host, self._attempts.facts, left)

    async def attempt(
        self, task: Task, planned: PlannedAttempt, identity: RolloutIdentity, tries: dict[str, int]
    ) -> list[RolloutResult] | None:
        """Attempt a task; None if it was cancelled. Until `publish` returns their keys, only this machine has them."""
        running = asyncio.ensure_future(self._attempts.run(task, planned, identity, tries))
        self._running.add(running)
        try:
            await asyncio.wait({running})
            return None if running.cancelled() else running.result()
        finally:
            self._running.discard(running)

    async def publish(self) -> frozenset[Key]:
        """Publish the rollouts that ended since the last call, and return their keys."""
        async with self._publishing:
            published = await asyncio.to_thread(self._publisher.publish)
            await asyncio.to_thread(self._publish_logs, published)
            return published

    async def cancel(self) -> list[RolloutResult]:
        """Cancel all attempts that run, and return their results."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        return self._attempts.cancelled

    async def close(self) -> None:
        """Cancel running attempts, publish everything, and close."""
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
    """The folder of a node's journals. It is the same for the same run, so the journals of a dead process are found."""
    place = hashlib.blake2b(settings.place.encode(), digest_size=6).hexdigest()
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", settings.about["name"])
    return Path(settings.folder or Path(tempfile.gettempdir()) / "rolltape") / f"{name}-{place}"

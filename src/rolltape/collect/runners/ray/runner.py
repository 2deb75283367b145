"""`RayRunner`: gives attempts to the nodes of a Ray cluster, and reports them once they are published."""

import asyncio
import contextlib
import logging
import socket
import time
from collections import deque
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec

from rolltape.collect.environments.judge import KEY_VARIABLE, MODEL_VARIABLE, URL_VARIABLE
from rolltape.collect.plan import PlannedAttempt, RolloutIdentity, seat_agent
from rolltape.collect.records import LAUNCH
from rolltape.collect.results import RolloutResult
from rolltape.collect.runners.protocol import NO_ROOM_S, AttemptQueue, OnEnded, RunnerFacts, run_with_grace
from rolltape.collect.runners.ray.engines import PlacedEngines
from rolltape.collect.runners.ray.members import ClusterMember, ClusterMembers, MemberLost
from rolltape.collect.runners.ray.node import NodeSettings
from rolltape.collect.runners.ray.room import AttemptRoom
from rolltape.collect.runners.ray.settings import ClusterSettings, PlacedEngine
from rolltape.collect.sandboxes.running import collector_variables
from rolltape.collect.settings import CollectSettings
from rolltape.collect.tasks import Task
from rolltape.errors import CollectError, MissingExtra
from rolltape.extras import import_extra
from rolltape.records.rollout import Status
from rolltape.tape.recording.tape import Tape
from rolltape.tape.rundir import Place
from rolltape.tape.shards.seal import make_run
from rolltape.tape.stored import Key

log = logging.getLogger("rolltape.collect")

_FIRST_NODES_S = 15.0  # how long to wait for other nodes once one is ready
_SUCCESSOR_S = 60.0  # for the next actor on a node to publish what a lost one left
_PUBLISH_S = 5.0  # between publications of a node
_PUBLISH_ATTEMPTS = 64  # so many ended attempts make a node publish at once
_TICK_S = 0.1
_MAX_MISSING = 20  # publications of a node that lack an attempt which it has ended
_NO_USE_S = 1.0  # before room is requested again
_MAX_LOSSES = 3  # of nodes with an attempt, before the attempt is given up


class RayConnection(NamedTuple):
    """Ray, connected to a cluster."""

    ray: Any
    is_own: bool  # whether the program had no connection before; such a connection is closed at the end


class _Job(NamedTuple):
    planned: PlannedAttempt
    task: Task
    tries: dict[str, int]  # by seat: the number of the try
    lost: int = 0  # how many nodes were lost while they ran it

    def next_try(self) -> "_Job":
        return self._replace(tries={seat: index + 1 for seat, index in self.tries.items()}, lost=self.lost + 1)


class _EndedJob(NamedTuple):
    job: _Job
    results: list[RolloutResult]
    at_s: float
    missing: int = 0  # how often its node has published without it

    @property
    def keys(self) -> set[Key]:
        return {(result.rollout, result.try_index) for result in self.results}


class RayRunner:
    """Runs attempts on the nodes of a cluster that is already running.

    Pass it to a `Collector` as `runner`. docs/how-to/collect/cluster.md explains what happens when nodes are lost.
    """

    def __init__(
        self,
        settings: CollectSettings,
        tape: Tape,
        cluster: ClusterSettings,
        connection: RayConnection | None = None,
    ) -> None:
        """Connect to the cluster, unless a `connection` to it is given."""
        self._settings = settings = _with_absolute_paths(settings)
        self._tape = tape
        self._ray, self._is_own_connection = connection or connect_to_cluster(cluster)
        self._room = AttemptRoom(cluster.cpus, cluster.memory)
        self._placed = cluster.engine
        self._engines: PlacedEngines | None = None
        self._place = Place(cluster.publish or tape.directory.path)
        if self._place.url != str(tape.directory.path):
            make_run(self._place, tape.directory)
            tape.directory.add_published(self._place.url)
        self._members = ClusterMembers(
            self._ray,
            NodeSettings(
                collect=settings,
                about=tape.directory.about,
                place=self._place.url,
                folder=cluster.folder,
                search=(str(Path.cwd()),),
                variables=_variables(settings),
                rolltape=version("rolltape"),
            ),
            takes_cpu=not self._room.is_limited,
        )
        self.cancelled: list[RolloutResult] = []
        self._again: deque[_Job] = deque()  # attempts of lost nodes
        self._outstanding = 0  # jobs that were given out and neither reported nor queued again
        self._attempting = 0
        self._unpublished: dict[ClusterMember, list[_EndedJob]] = {}
        self._publishing: dict[ClusterMember, asyncio.Task[None]] = {}

    @property
    def facts(self) -> RunnerFacts:
        return self._members.first.facts

    async def __aenter__(self) -> Self:
        if self._placed is not None:
            await self._start_engines(self._placed)
        self._watching = asyncio.ensure_future(self._members.watch())
        self._watching.add_done_callback(lambda _: asyncio.ensure_future(self._members.notify()))
        try:
            ready = asyncio.ensure_future(self._until(lambda: bool(self._members.ready)))
            await asyncio.wait({ready}, timeout=_FIRST_NODES_S)
            if not ready.done():
                log.warning("no node of the cluster is ready yet; waiting for one with a free CPU")
            await ready
            settled = asyncio.ensure_future(self._until(lambda: self._members.is_settled))
            await asyncio.wait({settled}, timeout=_FIRST_NODES_S)
            settled.cancel()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watching.cancel()
        await self._members.close()
        if self._engines is not None:
            await self._engines.close()
        if self._is_own_connection:
            self._ray.shutdown()

    async def _start_engines(self, engine: PlacedEngine) -> None:
        self._engines = PlacedEngines(self._ray, engine, self._settings.engine_key)
        try:
            specs = await self._engines.start()
        except BaseException:
            await self._engines.close()
            raise
        self._settings = msgspec.structs.replace(self._settings, engines=specs)
        self._members.settings = self._members.settings._replace(collect=self._settings)

    async def run(
        self, queue: AttemptQueue, identity: RolloutIdentity, on_ended: OnEnded, stopping: asyncio.Event
    ) -> None:
        self._queue, self._identity, self._on_ended, self._stopping = queue, identity, on_ended, stopping
        workers = [self._run_jobs() for _ in range(self._settings.max_concurrent)]
        try:
            await run_with_grace([*workers, self._publish_when_due()], stopping, self._settings.grace_s)
        finally:
            await self._settle()

    async def _run_jobs(self) -> None:
        while (job := await self._next_job()) is not None:
            self._outstanding += 1
            self._attempting += 1
            try:
                await self._attempt(job)
            finally:
                self._attempting -= 1
                await self._members.notify()

    async def _next_job(self) -> _Job | None:
        """The next job; None if none is left and no running one could come back."""
        while not self._stopping.is_set():
            if self._again:
                return self._again.popleft()
            if (one := await self._queue.next()) is not None:
                return self._make_job(*one)
            if not self._queue.is_exhausted:
                await asyncio.sleep(NO_ROOM_S)
                continue
            if not self._outstanding:
                break
            await self._until(lambda: bool(self._again) or not self._outstanding or self._stopping.is_set())
        return None

    def _make_job(self, planned: PlannedAttempt, task: Task) -> _Job:
        ids = {seat: self._identity.rollout_id(task, planned.attempt, seat) for seat in planned.seats}
        # Nodes do not see each other's journals, so the number of the try is counted here.
        return _Job(planned, task, {seat: self._tape.next_try(ids[seat]) if planned.again else 0 for seat in ids})

    async def _attempt(self, job: _Job) -> None:
        """Run a job on the node where Ray has reserved room, or else on the node with the fewest attempts."""
        while True:
            async with self._room.reserve() as node_id:
                await self._until(lambda: node_id is None or self._members.is_decided(node_id))
                await self._until(lambda: bool(self._members.ready))
                member = (
                    min(self._members.ready.values(), key=lambda one: one.running)
                    if node_id is None
                    else self._members.ready.get(node_id)
                )
                if member is not None:
                    return await self._attempt_on(member, job)
            await asyncio.sleep(_NO_USE_S)  # Ray made room on a node that is not used

    async def _attempt_on(self, member: ClusterMember, job: _Job) -> None:
        try:
            results = await member.attempt(job.task, job.planned, self._identity, job.tries)
        except MemberLost as error:
            await self._members.drop(member, error)
            await self._queue_again(job)
            return
        if results is None:
            self._outstanding -= 1  # it is recorded as cancelled
            return
        if not results:
            # It could not begin: an earlier process on that node is still alive and has that try in its journal.
            await self._queue_again(job)
            return
        ended = _EndedJob(job, results, time.monotonic())
        self._unpublished.setdefault(member, []).append(ended)

    async def _queue_again(self, job: _Job) -> None:
        """Run a lost attempt again as another try, unless the attempt itself may be the reason why nodes are lost."""
        if job.lost + 1 < _MAX_LOSSES:
            self._again.append(job.next_try())
        else:
            await self._on_ended(job.planned, [self._give_up(job.next_try(), seat) for seat in job.tries])
        self._outstanding -= 1

    def _give_up(self, job: _Job, seat: str) -> RolloutResult:
        """Record a failure for an attempt that lost its node each time."""
        task, identity, reason = job.task, self._identity, f"{_MAX_LOSSES} nodes were lost while they ran it"
        rollout = self._tape.rollout(
            task_id=task.id,
            task=task.data,
            step=identity.step,
            attempt=job.planned.attempt,
            source=task.source,
            model=identity.model,
            agent=seat_agent(identity.agent, seat),
            try_index=job.tries[seat],
            extra={LAUNCH: {"task_index": job.planned.task_index}},
        )
        rollout.fail(reason)
        return RolloutResult.of(rollout.head, job.planned.task_index, seat, status=Status.FAILED, reason=reason)

    async def _publish_when_due(self) -> None:
        """Have nodes publish ended attempts, at intervals and at the end."""
        while True:
            for member, task in list(self._publishing.items()):
                if task.done():
                    del self._publishing[member]
                    task.result()
            for member in [one for one in self._unpublished if one not in self._publishing and self._is_due(one)]:
                ended = self._unpublished.pop(member)
                self._publishing[member] = asyncio.ensure_future(self._publish(member, ended))
            stopping = self._stopping.is_set()
            if not self._outstanding and (stopping or (self._queue.is_exhausted and not self._again)):
                return
            if stopping:
                await self._members.notify()
            await asyncio.sleep(_TICK_S)

    def _is_due(self, member: ClusterMember) -> bool:
        ended = self._unpublished[member]
        waited_s = time.monotonic() - ended[0].at_s
        return member.is_lost or not self._attempting or len(ended) >= _PUBLISH_ATTEMPTS or waited_s > _PUBLISH_S

    async def _publish(self, member: ClusterMember, ended: list[_EndedJob]) -> None:
        """Have a node publish, and report what it published. A node that fails is lost; its attempts run again."""
        try:
            member.published |= await member.publish()
        except MemberLost as error:
            await self._members.drop(member, error)
            member.published |= await self._published_by_successor(member)
        else:
            self._members.forgive(member)
        self._tape.look_again()
        for one in ended:
            # A node may name an attempt that ends while it publishes, before its end is known here.
            if one.keys <= member.published:
                member.published -= one.keys
                await self._on_ended(one.job.planned, one.results)
                self._outstanding -= 1
            elif member.is_lost:
                await self._queue_again(one.job)
            elif one.missing < _MAX_MISSING:
                later = one._replace(at_s=time.monotonic(), missing=one.missing + 1)
                self._unpublished.setdefault(member, []).append(later)
            else:
                log.warning("node %s: the end of %s is not on its tape", member.host, one.job.task.where)
                await self._queue_again(one.job)
        await self._members.notify()

    async def _published_by_successor(self, member: ClusterMember) -> frozenset[Key]:
        """The rollouts that the next actor on a lost actor's node has found there and published."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SUCCESSOR_S):
                await self._until(lambda: self._members.is_decided(member.node_id))
        return frozenset(self._members.left)

    async def _settle(self) -> None:
        """Cancel running attempts on the nodes, publish, and report ended attempts."""
        members = list(self._members.ready.values())
        for cancelled in await asyncio.gather(*(member.cancel() for member in members), return_exceptions=True):
            self.cancelled += [] if isinstance(cancelled, BaseException) else cancelled
        await asyncio.gather(*self._publishing.values(), return_exceptions=True)
        for member in list(self._unpublished):
            await self._publish(member, self._unpublished.pop(member))

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds. It is checked after every change among nodes or jobs."""
        async with self._members.changed:
            while not condition():
                if self._watching.done():
                    self._watching.result()
                await self._members.changed.wait()


def _with_absolute_paths(settings: CollectSettings) -> CollectSettings:
    """The settings with absolute paths, for nodes with another working directory."""
    if settings.model is None or not Path(settings.model).is_dir():
        return settings
    return msgspec.structs.replace(settings, model=str(Path(settings.model).absolute()))


def _variables(settings: CollectSettings) -> dict[str, str]:
    """Environment variables of the collector that judges and programs on the nodes need."""
    own = None if settings.judge is None else settings.judge.key_env
    names = (URL_VARIABLE, MODEL_VARIABLE, KEY_VARIABLE, *([own] if own else []), *settings.pass_env)
    return collector_variables(names)


def connect_to_cluster(cluster: ClusterSettings) -> RayConnection:
    """Connect to a cluster. A connection that the program already has is used."""
    address, runtime_env = cluster.address, cluster.runtime_env
    try:
        ray = import_extra("ray", "ray")
    except MissingExtra as error:
        raise CollectError(f"--runner ray: {error}, here and on the nodes") from None
    if ray.is_initialized():
        if runtime_env is not None:
            raise CollectError("the program is connected to Ray already; give the runtime_env to its own ray.init")
        return RayConnection(ray, is_own=False)
    try:
        _check_listening(address)
        # The nodes' output is in Ray's logs, and reasons are recorded.
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, runtime_env=runtime_env)
    except (OSError, ValueError, RuntimeError, TypeError) as error:
        if runtime_env is not None and "Could not find" not in str(error) and not isinstance(error, ConnectionError):
            raise CollectError(f"Ray rejects the runtime_env: {str(error).splitlines()[0]}") from None
        raise CollectError(
            f"no Ray cluster at {address!r}: {str(error).splitlines()[0]}; "
            "start one with `ray start --head`, or give --ray-address"
        ) from None
    return RayConnection(ray, is_own=True)


def _check_listening(address: str) -> None:
    """Raise OSError if nothing listens at this address. Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and "/" not in address:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()

"""Gives attempts out to the nodes of a Ray cluster, and tells of them once what they left is published."""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec

from rolltape.collect.environments.judge import KEY_VARIABLE, MODEL_VARIABLE, URL_VARIABLE
from rolltape.collect.plan import Identity, Planned, seat_name
from rolltape.collect.result import Result
from rolltape.collect.runners.protocol import NO_ROOM_S, OnEnded, Work, within_grace
from rolltape.collect.runners.ray.members import Member, MemberLost, Members
from rolltape.collect.runners.ray.node import NodeSettings
from rolltape.collect.settings import CollectSettings
from rolltape.collect.tasks import Task
from rolltape.errors import CollectError
from rolltape.records.rollout import Status
from rolltape.tape.recording.tape import Tape
from rolltape.tape.shards.places import Place
from rolltape.tape.shards.seal import make_run
from rolltape.tape.stored import Key

log = logging.getLogger("rolltape.collect")

_FIRST_NODES_S = 15.0  # that other nodes are waited for once one is ready
_SUCCESSOR_S = 60.0  # that a lost actor's node may take to publish what it left
_PUBLISH_S = 5.0
_TICK_S = 0.1
_ASKED = 20
_LOSSES = 3  # of nodes that an attempt ran on, before it is given up
_PUBLISH_ATTEMPTS = 64


class ClusterSettings(NamedTuple):
    """How the cluster is found, and where its nodes write."""

    address: str = "auto"  # of Ray's head
    publish: str | None = None  # a path or URL that all nodes see; None: the run's own folder
    folder: str | None = None  # for journals, on each node's own disk; None: in its folder for temporary files


class _Job(NamedTuple):
    planned: Planned
    task: Task
    tries: dict[str, int]  # by seat: which try it is
    lost: int = 0  # how many nodes were lost with it

    def again(self) -> "_Job":
        return self._replace(tries={seat: index + 1 for seat, index in self.tries.items()}, lost=self.lost + 1)


class _Ended(NamedTuple):
    job: _Job
    results: list[Result]
    at_s: float
    asked: int = 0  # how often its node has published without it

    @property
    def keys(self) -> set[Key]:
        return {(result.rollout, result.try_index) for result in self.results}


class RayRunner:
    """Runs attempts on a cluster that is there already."""

    def __init__(self, settings: CollectSettings, tape: Tape, cluster: ClusterSettings) -> None:
        """Connect to the cluster; it must be there."""
        self._settings = settings = _with_whole_paths(settings)
        self._tape = tape
        self._ray, self._is_own_connection = _connected(cluster.address)
        self._place = Place(cluster.publish or tape.directory.path)
        if self._place.url != str(tape.directory.path):
            make_run(self._place, tape.directory)
            tape.directory.add_published(self._place.url)
        self._members = Members(
            self._ray,
            NodeSettings(
                collect=settings,
                about=tape.directory.about,
                place=self._place.url,
                folder=cluster.folder,
                search=(str(Path.cwd()),),
                judging=_judging(settings),
                rolltape=version("rolltape"),
            ),
        )
        self.cancelled: list[Result] = []
        self._again: deque[_Job] = deque()  # of lost nodes
        self._outstanding = 0  # jobs that were given out and are neither told of nor to be given out again
        self._attempting = 0
        self._unpublished: dict[Member, list[_Ended]] = {}
        self._publishing: dict[Member, asyncio.Task[None]] = {}

    @property
    def model_name(self) -> str:
        return self._members.first.model_name

    @property
    def agent_name(self) -> str:
        return self._members.first.agent_name

    async def __aenter__(self) -> Self:
        self._watching = asyncio.ensure_future(self._members.watch())
        self._watching.add_done_callback(lambda _: asyncio.ensure_future(self._members.tell()))
        try:
            ready = asyncio.ensure_future(self._until(lambda: bool(self._members.ready)))
            await asyncio.wait({ready}, timeout=_FIRST_NODES_S)
            if not ready.done():
                log.warning("no node of the cluster is ready so far: one with a free CPU is waited for")
            await ready
            settled = asyncio.ensure_future(self._until(lambda: self._members.is_settled))
            await asyncio.wait({settled}, timeout=_FIRST_NODES_S)
            settled.cancel()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watching.cancel()
        await self._members.close()
        if self._is_own_connection:
            self._ray.shutdown()

    async def run(self, work: Work, identity: Identity, on_ended: OnEnded, told_to_end: asyncio.Event) -> None:
        collection = _Collection(work, identity, on_ended, told_to_end)
        workers = [self._one_after_another(collection) for _ in range(self._settings.max_concurrent)]
        try:
            await within_grace([*workers, self._publish_as_due(collection)], told_to_end, self._settings.grace_s)
        finally:
            await self._settle(collection)

    async def _one_after_another(self, collection: "_Collection") -> None:
        while (job := await self._next_job(collection)) is not None:
            self._outstanding += 1
            self._attempting += 1
            try:
                await self._attempt(job, collection)
            finally:
                self._attempting -= 1
                await self._members.tell()

    async def _next_job(self, collection: "_Collection") -> _Job | None:
        """The next thing to do; None: there is nothing left, and nothing out that could come back."""
        while not collection.told_to_end.is_set():
            if self._again:
                return self._again.popleft()
            if (one := await collection.work.next()) is not None:
                return self._job(*one, collection.identity)
            if not collection.work.is_exhausted:
                await asyncio.sleep(NO_ROOM_S)
                continue
            if not self._outstanding:
                break
            await self._until(lambda: bool(self._again) or not self._outstanding or collection.told_to_end.is_set())
        return None

    def _job(self, planned: Planned, task: Task, identity: Identity) -> _Job:
        ids = {seat: identity.of(task, planned.attempt, seat) for seat in planned.seats}
        # Nodes do not see each other's journals: which try it is has to be said.
        return _Job(planned, task, {seat: self._tape.next_try(ids[seat]) if planned.again else 0 for seat in ids})

    async def _attempt(self, job: _Job, collection: "_Collection") -> None:
        """Have a node attempt it, the one that has least to do."""
        await self._until(lambda: bool(self._members.ready))
        member = min(self._members.ready.values(), key=lambda one: one.running)
        try:
            results = await member.attempt(job.task, job.planned, collection.identity, job.tries)
        except MemberLost as error:
            await self._members.give_up(member, error)
            await self._give_out_again(job, collection)
            return
        if results is None:
            self._outstanding -= 1  # cancelled, and on record as that
            return
        if not results:
            # It could not begin: an earlier process, not dead yet, has that try in its journal there.
            await self._give_out_again(job, collection)
            return
        ended = _Ended(job, results, time.monotonic())
        self._unpublished.setdefault(member, []).append(ended)

    async def _give_out_again(self, job: _Job, collection: "_Collection") -> None:
        """Have an attempt that was lost run as another try, unless it may itself be what nodes are lost by."""
        if job.lost + 1 < _LOSSES:
            self._again.append(job.again())
        else:
            await collection.on_ended(
                job.planned, [self._given_up(job.again(), seat, collection) for seat in job.tries]
            )
        self._outstanding -= 1

    def _given_up(self, job: _Job, seat: str, collection: "_Collection") -> Result:
        """Put on record that an attempt lost its node each time."""
        task, identity, reason = job.task, collection.identity, f"{_LOSSES} nodes were lost as they ran it"
        rollout = self._tape.rollout(
            task_id=task.id,
            task=task.data,
            step=identity.step,
            attempt=job.planned.attempt,
            source=task.source,
            model=identity.model,
            agent=seat_name(identity.agent, seat),
            try_index=job.tries[seat],
        )
        rollout.fail(reason)
        return Result(
            rollout=rollout.id,
            try_index=rollout.try_index,
            place=job.planned.place,
            task=task.id or rollout.group[:8],
            attempt=job.planned.attempt,
            seat=seat,
            status=Status.FAILED,
            reward=None,
            stop_reason=None,
            reason=reason,
            turns=0,
            sampled_tokens=0,
            ended=None,
        )

    async def _publish_as_due(self, collection: "_Collection") -> None:
        """Have nodes publish what has ended there, now and then and at the end."""
        while True:
            for member, task in list(self._publishing.items()):
                if task.done():
                    del self._publishing[member]
                    task.result()
            for member in [one for one in self._unpublished if one not in self._publishing and self._is_due(one)]:
                ended = self._unpublished.pop(member)
                self._publishing[member] = asyncio.ensure_future(self._publish(member, ended, collection))
            told = collection.told_to_end.is_set()
            if not self._outstanding and (told or (collection.work.is_exhausted and not self._again)):
                return
            if told:
                await self._members.tell()
            await asyncio.sleep(_TICK_S)

    def _is_due(self, member: Member) -> bool:
        ended = self._unpublished[member]
        waited_s = time.monotonic() - ended[0].at_s
        return member.is_lost or not self._attempting or len(ended) >= _PUBLISH_ATTEMPTS or waited_s > _PUBLISH_S

    async def _publish(self, member: Member, ended: list[_Ended], collection: "_Collection") -> None:
        """Publish, and tell of those that are; a node that cannot is lost, and its attempts are given out again."""
        try:
            member.published |= await member.publish()
        except MemberLost as error:
            await self._members.give_up(member, error)
            member.published |= await self._left_by(member)
        else:
            self._members.works(member)
        self._tape.look_again()
        for one in ended:
            # What ends as a node publishes may be among what it names before its end is heard of here.
            if one.keys <= member.published:
                member.published -= one.keys
                await collection.on_ended(one.job.planned, one.results)
                self._outstanding -= 1
            elif member.is_lost:
                await self._give_out_again(one.job, collection)
            elif one.asked < _ASKED:
                asked = one._replace(at_s=time.monotonic(), asked=one.asked + 1)
                self._unpublished.setdefault(member, []).append(asked)
            else:
                log.warning("node %s: the end of %s is not on its tape", member.host, one.job.task.where)
                await self._give_out_again(one.job, collection)
        await self._members.tell()

    async def _left_by(self, member: Member) -> frozenset[Key]:
        """What the successor of a lost node's actor found there and has published."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SUCCESSOR_S):
                await self._until(lambda: self._members.is_decided(member.node_id))
        return frozenset(self._members.left)

    async def _settle(self, collection: "_Collection") -> None:
        """After a grace time or a cancellation: cancel what runs on the nodes, publish, and tell of what had ended."""
        members = list(self._members.ready.values())
        for cancelled in await asyncio.gather(*(member.cancel() for member in members), return_exceptions=True):
            self.cancelled += [] if isinstance(cancelled, BaseException) else cancelled
        await asyncio.gather(*self._publishing.values(), return_exceptions=True)
        for member in list(self._unpublished):
            await self._publish(member, self._unpublished.pop(member), collection)

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that comes about with a change among nodes or jobs."""
        async with self._members.changed:
            while not condition():
                if self._watching.done():
                    self._watching.result()
                await self._members.changed.wait()


class _Collection:
    """What a run is asked for."""

    def __init__(self, work: Work, identity: Identity, on_ended: OnEnded, told_to_end: asyncio.Event) -> None:
        self.identity = identity
        self.on_ended = on_ended
        self.told_to_end = told_to_end
        self.work = work


def _with_whole_paths(settings: CollectSettings) -> CollectSettings:
    """The same where another folder is the current one."""
    if settings.model is None or not Path(settings.model).is_dir():
        return settings
    return msgspec.structs.replace(settings, model=str(Path(settings.model).absolute()))


def _judging(settings: CollectSettings) -> dict[str, str]:
    """The variables by which judges are found here: nodes have their environment from whoever started them."""
    own = None if settings.judge is None else settings.judge.key_env
    names = (URL_VARIABLE, MODEL_VARIABLE, KEY_VARIABLE, *([own] if own else []))
    return {name: os.environ[name] for name in names if name in os.environ}


def _connected(address: str) -> tuple[Any, bool]:
    """Ray, and whether the connection was made here; one that a program has already is its own to end."""
    try:
        import ray
    except ImportError:
        raise CollectError("--runner ray needs Ray; install rolltape[ray], here and on the nodes") from None
    if ray.is_initialized():
        return ray, False
    try:
        _check_answers(address)
        # Nodes' own words are in Ray's logs; reasons are on record.
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        raise CollectError(
            f"no Ray cluster at {address!r}: {str(error).splitlines()[0]}; "
            "start one with `ray start --head`, or give --ray-address"
        ) from None
    return ray, True


def _check_answers(address: str) -> None:
    """Raise OSError where nobody listens: Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and "/" not in address:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()

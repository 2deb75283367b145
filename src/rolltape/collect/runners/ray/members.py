"""The nodes of a Ray cluster that work for a collection: found as they join, started, dropped when they are lost."""

import asyncio
import logging
from collections import Counter
from typing import Any

from rolltape.collect.results import RolloutResult
from rolltape.collect.runners.ray.node import ClusterNode, NodeReady, NodeSettings
from rolltape.errors import CollectError
from rolltape.tape.stored import Key

log = logging.getLogger("rolltape.collect")

_LOOK_S = 2.0  # between checks for nodes that have joined
_MAX_DEATHS = 3  # of a node's actor, after which the node is no longer used
_CLOSING_S = 60.0


class MemberLost(Exception):
    """A node, or the actor on it, is gone. Its unpublished rollouts are lost, unless the node comes back."""


class ClusterMember:
    """A node that is ready for attempts, and the actor on it."""

    def __init__(self, actor: Any, node_id: str, started: NodeReady) -> None:
        self.node_id = node_id
        self.host = started.host
        self.running = 0
        self.published: set[Key] = set()  # but not reported yet
        self.is_lost = False
        self._actor = actor

    async def attempt(self, *arguments: Any) -> list[RolloutResult] | None:
        """As `ClusterNode.attempt`."""
        self.running += 1
        try:
            return await self._call("attempt", *arguments)  # type: ignore[no-any-return]
        finally:
            self.running -= 1

    async def publish(self) -> frozenset[Key]:
        """As `ClusterNode.publish`."""
        return await self._call("publish")  # type: ignore[no-any-return]

    async def cancel(self) -> list[RolloutResult]:
        """As `ClusterNode.cancel`."""
        return await self._call("cancel")  # type: ignore[no-any-return]

    async def close(self) -> None:
        """As `ClusterNode.close`; TimeoutError if the node does not answer in time."""
        async with asyncio.timeout(_CLOSING_S):
            await self._call("close")

    async def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the actor; MemberLost if it fails."""
        if self.is_lost:
            raise MemberLost(f"node {self.host} is lost")
        try:
            return await getattr(self._actor, method).remote(*arguments)
        except Exception as error:  # any error there fails only that node
            self.is_lost = True
            raise MemberLost(f"node {self.host}: {describe_ray_error(error)}") from error


class ClusterMembers:
    """The nodes that are ready. `watch` keeps the list current."""

    def __init__(self, ray: Any, settings: NodeSettings, *, takes_cpu: bool = True) -> None:
        """`takes_cpu`: each node reserves a CPU for its gateway. If attempts reserve CPUs, none might be left."""
        self.ready: dict[str, ClusterMember] = {}
        self.left: set[Key] = set()  # rollouts that had ended, and were published by the successor of a lost actor
        self.changed = asyncio.Condition()
        self.settings = settings
        self._ray = ray
        self._takes_cpu = takes_cpu
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._actors: dict[str, Any] = {}
        self._deaths: Counter[str] = Counter()
        self._refused: dict[str, str] = {}
        self._gone: set[str] = set()
        self._first: NodeReady | None = None

    @property
    def first(self) -> NodeReady:
        """The first node that was ready. All others have the same model and agent."""
        assert self._first is not None
        return self._first

    async def watch(self) -> None:
        """Start actors on nodes as they join; raises an error when no usable node is left."""
        while True:
            for node in await asyncio.to_thread(self._ray.nodes):
                node_id = node["NodeID"]
                if not node["Alive"] or node["Resources"].get("CPU", 0) < 1:
                    await self._forget(node_id)
                elif node_id not in self._starting and node_id not in self.ready and node_id not in self._refused:
                    self._starting[node_id] = asyncio.ensure_future(self._start(node_id, node["NodeManagerHostname"]))
            if not self.ready and not self._starting:
                raise CollectError(
                    "no node of the cluster can run attempts: "
                    + ("; ".join(self._refused.values()) or "none has a CPU to give")
                )
            await asyncio.sleep(_LOOK_S)

    def is_decided(self, node_id: str) -> bool:
        """Whether a node is ready, or will never be."""
        return node_id in self.ready or node_id in self._refused or node_id in self._gone

    @property
    def is_settled(self) -> bool:
        """Whether every node that was found is ready or refused."""
        return not self._starting

    async def drop(self, member: ClusterMember, error: MemberLost) -> None:
        """Remove a lost node from the list. The next check starts another actor on it, if it is still there."""
        if self.ready.get(member.node_id) is not member:
            return
        log.warning("%s; its attempts run elsewhere", error)
        del self.ready[member.node_id]
        self._kill(member.node_id)
        self._count_death(member.node_id, str(error))
        await self.notify()

    def forgive(self, member: ClusterMember) -> None:
        """Reset the deaths of a node that has completed something."""
        self._deaths.pop(member.node_id, None)

    async def notify(self) -> None:
        """Wake all tasks that wait for a change."""
        async with self.changed:
            self.changed.notify_all()

    async def close(self) -> None:
        """Close all actors. Those that do not answer are killed."""
        for task in self._starting.values():
            task.cancel()
        ended = await asyncio.gather(*(member.close() for member in self.ready.values()), return_exceptions=True)
        for member, error in zip(self.ready.values(), ended, strict=True):
            if error is not None:
                log.warning("node %s did not close (%s); --resume publishes what it holds", member.host, error)
        for node_id in list(self._actors):
            self._kill(node_id)

    async def _start(self, node_id: str, host: str) -> None:
        try:
            self._actors[node_id] = actor = self._make_actor(node_id)
            started: NodeReady = await actor.start.remote()
            self._check_same(started)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is that node's; if all have it, `watch` raises
            self._kill(node_id)
            self._count_death(
                node_id, f"node {host}: {describe_ray_error(error)}", for_good=not isinstance(error, _actor_error())
            )
        else:
            if started.facts.confinement != self.first.facts.confinement:
                log.warning("node %s: %s", started.host, started.facts.confinement.says)
            self.left |= started.left
            self.ready[node_id] = ClusterMember(actor, node_id, started)
        finally:
            self._starting.pop(node_id, None)
            await self.notify()

    def _make_actor(self, node_id: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actor_class = self._ray.remote(ClusterNode).options(
            num_cpus=int(self._takes_cpu),
            max_restarts=0,
            max_concurrency=100_000,  # every attempt in flight is a call in flight
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
        )
        return actor_class.remote(self.settings)

    def _check_same(self, started: NodeReady) -> None:
        first = self._first = self._first or started
        for what in ("model_name", "agent_name"):
            own, wanted = getattr(started.facts, what), getattr(first.facts, what)
            if own != wanted:
                raise CollectError(
                    f"its {what} is {own!r}, that of node {first.host} {wanted!r}; all nodes must have the same"
                )

    def _count_death(self, node_id: str, reason: str, *, for_good: bool = False) -> None:
        self._deaths[node_id] += 1
        if for_good or self._deaths[node_id] >= _MAX_DEATHS:
            log.warning("%s; it is not used any more", reason)
            self._refused[node_id] = reason

    async def _forget(self, node_id: str) -> None:
        self._gone.add(node_id)
        if node_id in self._starting:
            self._starting.pop(node_id).cancel()
        if node_id in self.ready:
            member = self.ready[node_id]
            member.is_lost = True
            await self.drop(member, MemberLost(f"node {member.host} has left the cluster"))

    def _kill(self, node_id: str) -> None:
        actor = self._actors.pop(node_id, None)
        if actor is not None:
            self._ray.kill(actor, no_restart=True)


def describe_ray_error(error: BaseException) -> str:
    cause = getattr(error, "cause", None)
    text = str(cause if isinstance(cause, Exception) else error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _actor_error() -> type[Exception]:
    from ray.exceptions import RayActorError

    kind: type[Exception] = RayActorError
    return kind

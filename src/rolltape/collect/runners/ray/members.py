"""The nodes of a Ray cluster that work for a collection: found as they come, started, given up when they are lost."""

import asyncio
import logging
from collections import Counter
from typing import Any

from rolltape.collect.plan import Identity, Planned
from rolltape.collect.result import Result
from rolltape.collect.runners.ray.node import Node, NodeSettings, Started
from rolltape.collect.tasks import Task
from rolltape.errors import CollectError
from rolltape.tape.stored import Key

log = logging.getLogger("rolltape.collect")

_LOOK_S = 2.0  # between looks for nodes that have come
_DEATHS = 3  # of a node's actor before the node is left alone
_CLOSING_S = 60.0


class MemberLost(Exception):
    """A node, or our actor on it, is gone; what it had not published is lost with it, or comes back with it."""


class Member:
    """A node that is ready for attempts."""

    def __init__(self, actor: Any, node_id: str, started: Started) -> None:
        self.node_id = node_id
        self.host = started.host
        self.running = 0
        self.published: set[Key] = set()  # and not told of so far
        self.is_lost = False
        self._actor = actor

    async def attempt(
        self, task: Task, planned: Planned, identity: Identity, tries: dict[str, int]
    ) -> list[Result] | None:
        """As `Node.attempt`."""
        self.running += 1
        try:
            results: list[Result] | None = await self._asked(self._actor.attempt.remote(task, planned, identity, tries))
            return results
        finally:
            self.running -= 1

    async def publish(self) -> frozenset[Key]:
        """As `Node.publish`."""
        published: frozenset[Key] = await self._asked(self._actor.publish.remote())
        return published

    async def cancel(self) -> list[Result]:
        """As `Node.cancel`."""
        cancelled: list[Result] = await self._asked(self._actor.cancel.remote())
        return cancelled

    async def close(self) -> None:
        """As `Node.close`, as far as the node answers in time."""
        async with asyncio.timeout(_CLOSING_S):
            await self._asked(self._actor.close.remote())

    async def _asked(self, reference: Any) -> Any:
        if self.is_lost:
            raise MemberLost(f"node {self.host} is lost")
        try:
            return await reference
        except Exception as error:  # whatever fails there fails for that node alone: others go on
            self.is_lost = True
            raise MemberLost(f"node {self.host}: {why(error)}") from error


class Members:
    """Those that are ready, kept up to date by `watch`."""

    def __init__(self, ray: Any, settings: NodeSettings) -> None:
        self.ready: dict[str, Member] = {}
        self.left: set[Key] = set()  # rollouts that had ended, and were published by the successor of a lost actor
        self.changed = asyncio.Condition()
        self._ray = ray
        self._settings = settings
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._actors: dict[str, Any] = {}
        self._deaths: Counter[str] = Counter()
        self._refused: dict[str, str] = {}
        self._gone: set[str] = set()
        self._first: Started | None = None

    @property
    def first(self) -> Started:
        """What the first node that was ready said of itself: the others say the same."""
        assert self._first is not None
        return self._first

    async def watch(self) -> None:
        """Start actors on nodes as they come; raise when none is left that could work."""
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
        """Whether a node is ready, or will not be."""
        return node_id in self.ready or node_id in self._refused or node_id in self._gone

    @property
    def is_settled(self) -> bool:
        """Whether every node that was found is ready or refused."""
        return not self._starting

    async def give_up(self, member: Member, error: MemberLost) -> None:
        """Take a node off the list; the next look starts another actor on it, if it is still there."""
        if self.ready.get(member.node_id) is not member:
            return
        log.warning("%s; its attempts run elsewhere", error)
        del self.ready[member.node_id]
        self._kill(member.node_id)
        self._died(member.node_id, str(error))
        await self.tell()

    def works(self, member: Member) -> None:
        """Take note that a node has brought something to its end: what went wrong there before is forgiven."""
        self._deaths.pop(member.node_id, None)

    async def tell(self) -> None:
        """Wake whoever waits for a change."""
        async with self.changed:
            self.changed.notify_all()

    async def close(self) -> None:
        """End all actors in order; those that do not answer are killed."""
        for task in self._starting.values():
            task.cancel()
        ended = await asyncio.gather(*(member.close() for member in self.ready.values()), return_exceptions=True)
        for member, error in zip(self.ready.values(), ended, strict=True):
            if error is not None:
                log.warning("node %s did not end in order (%s); --resume publishes what it holds", member.host, error)
        for node_id in list(self._actors):
            self._kill(node_id)

    async def _start(self, node_id: str, host: str) -> None:
        try:
            self._actors[node_id] = actor = self._made(node_id)
            started: Started = await actor.start.remote()
            self._check_same(started)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is that node's; if all have it, `watch` raises
            self._kill(node_id)
            self._died(node_id, f"node {host}: {why(error)}", for_good=not isinstance(error, _actor_error()))
        else:
            self.left |= started.left
            self.ready[node_id] = Member(actor, node_id, started)
        finally:
            self._starting.pop(node_id, None)
            await self.tell()

    def _made(self, node_id: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        made = self._ray.remote(Node).options(
            num_cpus=1,
            max_restarts=0,
            max_concurrency=100_000,  # every attempt in flight is a call in flight
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
        )
        return made.remote(self._settings)

    def _check_same(self, started: Started) -> None:
        first = self._first = self._first or started
        for what in ("model_name", "agent_name"):
            if getattr(started, what) != getattr(first, what):
                raise CollectError(
                    f"its {what} is {getattr(started, what)!r}, that of node {first.host} {getattr(first, what)!r}; "
                    "all nodes must have the same"
                )

    def _died(self, node_id: str, reason: str, *, for_good: bool = False) -> None:
        self._deaths[node_id] += 1
        if for_good or self._deaths[node_id] >= _DEATHS:
            log.warning("%s; it is left alone", reason)
            self._refused[node_id] = reason

    async def _forget(self, node_id: str) -> None:
        self._gone.add(node_id)
        if node_id in self._starting:
            self._starting.pop(node_id).cancel()
        if node_id in self.ready:
            member = self.ready[node_id]
            member.is_lost = True
            await self.give_up(member, MemberLost(f"node {member.host} has left the cluster"))

    def _kill(self, node_id: str) -> None:
        actor = self._actors.pop(node_id, None)
        if actor is not None:
            self._ray.kill(actor, no_restart=True)


def why(error: BaseException) -> str:
    """What an error of Ray's is about, in a line."""
    cause = getattr(error, "cause", None)
    text = str(cause if isinstance(cause, Exception) else error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _actor_error() -> type[Exception]:
    from ray.exceptions import RayActorError

    kind: type[Exception] = RayActorError
    return kind

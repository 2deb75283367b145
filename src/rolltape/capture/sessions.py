"""Sessions: one agent's connection each, opened with a key of its own and closed with what it came to."""

import asyncio
import hmac
import secrets
import time
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import msgspec

from rolltape.capture.attempts import Attempts
from rolltape.capture.exchange import SamplingParams
from rolltape.capture.generate import Caller
from rolltape.capture.history import History
from rolltape.errors import NoSuchSession, SessionEnded, TurnCapReached
from rolltape.records.turn import Delivery
from rolltape.tape.recorder import RolloutRecorder, SessionRecorder


class SessionSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a session is opened for, and its limits."""

    task_id: str | None = None
    task: Any = None
    step: int = 0
    attempt: int = 0
    source: str | None = None
    agent: str | None = None
    rollout: str | None = None  # another session of this open rollout; then none of those above is given
    new_try: bool = False
    tags: tuple[str, ...] = ()
    extra: dict[str, Any] = {}
    sampling: SamplingParams = SamplingParams()  # where the agent says nothing
    forced: SamplingParams = SamplingParams()  # whatever the agent says
    thinking: bool | None = None  # None: as the agent asks, or as the gateway is set
    max_turns: int | None = None
    context_budget: int | None = None  # tokens of prompt and reply together
    allowed_tools: tuple[str, ...] | None = None  # None: all that are not denied
    denied_tools: tuple[str, ...] = ()

    def allows(self, tool: str) -> bool:
        return tool not in self.denied_tools and (self.allowed_tools is None or tool in self.allowed_tools)


class OpenSession:
    """A session that takes turns, until it is closed."""

    def __init__(
        self,
        spec: SessionSpec,
        rollout: RolloutRecorder,
        recorder: SessionRecorder,
        deliveries: dict[str, Delivery],
    ) -> None:
        self.spec = spec
        self.rollout = rollout
        self.recorder = recorder
        self.key = f"rts-{secrets.token_urlsafe(24)}"
        self.history = History()
        self.opened_at = time.time()
        self.turns = 0  # begun, auxiliary ones aside
        self.attempts = Attempts()
        self.deliveries = deliveries  # by turn, of all sessions of the rollout
        self.ended: str | None = None  # why it takes no more turns; None: it does
        self._callers: set[Caller] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def id(self) -> str:
        return self.recorder.id

    @property
    def in_flight(self) -> int:
        return len(self._callers)

    def begin(self, caller: Caller, *, auxiliary: bool) -> None:
        """Let a turn begin; raises for one that comes after the close, or above the cap."""
        if self.ended is not None:
            raise SessionEnded(f"session {self.id} is {self.ended}: it takes no more turns")
        if not auxiliary:
            if self.spec.max_turns is not None and self.turns >= self.spec.max_turns:
                raise TurnCapReached(f"session {self.id} has had its {self.spec.max_turns} turns")
            self.turns += 1
        self._callers.add(caller)
        self._idle.clear()

    def end(self, caller: Caller) -> None:
        """A turn has ended and its reply was handed over, or could not be."""
        self._callers.discard(caller)
        if not self._callers:
            self._idle.set()

    async def close(self, why: str, drain_s: float) -> int:
        """Take no more turns, wait for those in flight, and interrupt what takes longer; how many those were."""
        self.ended = self.ended or why
        try:
            async with asyncio.timeout(drain_s):
                await self._idle.wait()
        except TimeoutError:
            late = list(self._callers)
            for caller in late:
                caller.leave()
            await self._idle.wait()
            return len(late)
        return 0


class Sessions:
    """The open ones, by id and by key."""

    def __init__(self) -> None:
        self._by_id: dict[str, OpenSession] = {}
        self._by_key: dict[str, OpenSession] = {}
        self._ended: dict[str, str] = {}  # keys of closed ones and why, so that a late agent is told

    def add(self, session: OpenSession) -> None:
        self._by_id[session.id] = session
        self._by_key[_lookup(session.key)] = session

    def remove(self, session: OpenSession) -> None:
        self._by_id.pop(session.id, None)
        if self._by_key.pop(_lookup(session.key), None) is not None:
            self._ended[_lookup(session.key)] = f"session {session.id} is {session.ended or 'closed'}"
            while len(self._ended) > 100_000:
                del self._ended[next(iter(self._ended))]

    def of_key(self, key: str) -> OpenSession | None:
        """The session that a key opens; raises SessionEnded for the key of one that is closed."""
        found = self._by_key.get(_lookup(key))
        if found is not None and hmac.compare_digest(found.key.encode(), key.encode("utf-8", "surrogatepass")):
            return found
        if (ended := self._ended.get(_lookup(key))) is not None:
            raise SessionEnded(f"{ended}: it takes no more turns")
        return None

    def of_id(self, session_id: str) -> OpenSession:
        found = self._by_id.get(session_id)
        if found is None:
            raise NoSuchSession(f"no open session {session_id}; GET /sessions lists those there are")
        return found

    def of_rollout(self, rollout_id: str) -> list[OpenSession]:
        return [session for session in self if session.rollout.id == rollout_id]

    def __iter__(self) -> Iterator[OpenSession]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)


def _lookup(key: str) -> str:
    """Under which a key is kept: a digest, so that how long the look-up takes says nothing of the key."""
    return blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

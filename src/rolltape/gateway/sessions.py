"""Sessions: each is one agent's connection, with its own key, limits and turns."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from rolltape.errors import EngineFailed, NoSuchSession, PromptTooLong, RequestRefused, SessionEnded, TurnCapReached
from rolltape.gateway.engines.protocol import IdsAsJson
from rolltape.gateway.request import ChatRequest, SamplingParams
from rolltape.gateway.turn.endpoint_replies import EndpointReplies
from rolltape.gateway.turn.gateway_turn import GatewayTurn
from rolltape.gateway.turn.history import History
from rolltape.records.turn import Delivery, Turn
from rolltape.tape.recording.rollout import RolloutRecorder
from rolltape.tape.recording.session import SessionRecorder

T = TypeVar("T")

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]

_BODIES = 8
_REMEMBERED = 16  # latest requests of a session for which a retry is recognized
_REMEMBERED_KEYS = 20_000  # of ended sessions: 6 MB

# The fields of SessionSpec that a rollout is opened with.
OF_ROLLOUT = [
    *("task_id", "task", "step", "attempt", "source", "split", "agent", "new_try", "try_index"),
    *("tags", "foreign_ids", "extra"),
]


class SessionSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rollout and the limits with which a session is opened."""

    task_id: str | None = None
    task: Any = None
    step: _Count = 0
    attempt: _Count = 0
    source: str | None = None
    split: str | None = None  # of the source
    agent: str | None = None
    new_try: bool = False
    try_index: _Count | None = None  # the number of the try; None for the next one on the tape
    tags: tuple[str, ...] = ()
    foreign_ids: tuple[str, ...] = ()  # ids of the rollout in the agent's framework
    extra: dict[str, Any] = {}
    rollout: str | None = None  # open another session of this rollout; the fields above must then be unset
    sampling: SamplingParams = SamplingParams()  # defaults for the agent
    forced: SamplingParams = SamplingParams()  # override the agent
    thinking: bool | None = None  # None for the agent's setting, else the gateway's
    max_turns: _Count | None = None
    context_budget: _Count | None = None  # tokens of prompt and reply together
    allowed_tools: tuple[str, ...] | None = None  # None for all that are not denied
    denied_tools: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rollout is None:
            return
        default = SessionSpec()
        given = [name for name in OF_ROLLOUT if getattr(self, name) != getattr(default, name)]
        if given:
            raise ValueError(f"{', '.join(given)} given beside a rollout, which has its own; leave out one of them")

    def allows(self, tool: str) -> bool:
        return tool not in self.denied_tools and (self.allowed_tools is None or tool in self.allowed_tools)


class EngineWait(NamedTuple):
    """How a session's turns wait for engines now, and the engines' latest error."""

    turns: int  # number of turns whose engine has not returned the whole reply; 0 if none waits
    longest_s: float  # since the engine's call of the oldest one began, or its last ids came
    error: str | None  # an engine's latest, in a waiting turn or the last ended one, or None


class SessionWork:
    """Runs the long work of one session off the event loop, one piece at a time, so that it delays no other session."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self.bodies = asyncio.Semaphore(_BODIES)  # bodies read and parsed at once; others wait in their sockets

    async def run(self, work: Callable[..., T], *args: Any, inline: bool = False) -> T:
        """Run `work` when all earlier work is done; `inline` for work that takes less time than a thread costs."""
        await self._lock.acquire()
        if inline:
            try:
                return work(*args)
            finally:
                self._lock.release()
        done = asyncio.get_running_loop().run_in_executor(None, work, *args)
        done.add_done_callback(self._release)
        try:
            return await asyncio.shield(done)  # a client that leaves does not end the work
        finally:
            del done  # else an error's traceback would keep the work's data alive

    def _release(self, done: "asyncio.Future[Any]") -> None:
        self._lock.release()
        if not done.cancelled():
            done.exception()  # retrieved, so that asyncio does not log it


class RecentTurns:
    """The latest turns of a session, by the digests of their requests. Those of an earlier gateway are as recorded."""

    def __init__(self) -> None:
        self._latest: dict[bytes, dict[int, GatewayTurn | Turn]] = {}  # by request, and by the number of the reply

    def find(self, digest: bytes, choice: int) -> GatewayTurn | Turn | None:
        return self._latest.get(digest, {}).get(choice)

    def add(self, digest: bytes, choice: int, turn: GatewayTurn | Turn) -> None:
        self._latest[digest] = self._latest.pop(digest, {}) | {choice: turn}
        while len(self._latest) > _REMEMBERED:
            del self._latest[next(iter(self._latest))]

    def forget(self, turn: GatewayTurn) -> None:
        """Remove a turn, so that no retry finds it."""
        rest = {
            digest: {choice: one for choice, one in turns.items() if one is not turn}
            for digest, turns in self._latest.items()
        }
        self._latest = {digest: turns for digest, turns in rest.items() if turns}

    def clear(self) -> None:
        """Remove all turns, which breaks a reference cycle with the session."""
        self._latest.clear()


class OpenSession:
    """A session that takes turns, until it is closed."""

    def __init__(
        self,
        spec: SessionSpec,
        rollout: RolloutRecorder,
        recorder: SessionRecorder,
        deliveries: dict[str, Delivery],
        *,
        key: str | None = None,
        digest: str | None = None,
    ) -> None:
        """Pass the key, or its digest if another gateway opened the session."""
        self.spec = spec
        self.rollout = rollout
        self.recorder = recorder
        self._key = key
        self.digest = key_digest(key) if key is not None else digest or ""  # of its key
        self.history = History(tool_ids_matter=recorder.head.tool_ids_matter, deliveries=deliveries)
        self.work = SessionWork()
        self.opened_at = time.time()
        self.used_at = time.monotonic()  # when a turn last began or ended
        self.turns = 0  # begun ones, without auxiliary turns
        self.task_instructions: str | None = None  # system messages of the first one; None before it
        self.refused_turns = 0  # above the cap
        self.refusals = 0  # recorded refusals of requests
        self.overflowed = False  # the last request was refused because of its long prompt
        self.recent = RecentTurns()
        self.ids_json = IdsAsJson()
        self.endpoint_replies = EndpointReplies()
        self.deliveries = deliveries  # by turn, of all sessions of the rollout
        self.ended: str | None = None  # why it takes no more turns, or None
        self.waited_s = 0.0  # for engines that failed or did not answer, over all ended turns
        self.trouble: str | None = None  # the latest error of an engine that a turn waited for
        self.failure: str | None = None  # why the latest turn has no reply, if the engine or the gateway caused it
        self._in_flight: set[GatewayTurn] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def id(self) -> str:
        return self.recorder.id

    @property
    def key(self) -> str:
        """The key that opens this session. Only the gateway that opened it knows the key."""
        assert self._key is not None
        return self._key

    @property
    def is_busy(self) -> bool:
        """Whether a turn is being made; a client that does not read its reply does not count."""
        return any(not turn.done for turn in self._in_flight)

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def begin(self, turn: GatewayTurn, *, counts: bool) -> None:
        """Begin a turn; raises SessionEnded after the close, and TurnCapReached above the maximum of turns."""
        if self.ended is not None:
            raise SessionEnded(f"session {self.id} is {self.ended}: it takes no more turns")
        if counts:
            if self.spec.max_turns is not None and self.turns >= self.spec.max_turns:
                self.refused_turns += 1
                raise TurnCapReached(f"session {self.id} has reached its maximum of turns ({self.spec.max_turns})")
            self.turns += 1
        self._in_flight.add(turn)
        self._idle.clear()
        self.used_at = time.monotonic()

    def end(self, turn: GatewayTurn) -> None:
        """Remove a turn that has ended, and whose reply was delivered or could not be."""
        self._in_flight.discard(turn)
        self.used_at = time.monotonic()
        if not self._in_flight:
            self._idle.set()

    async def settle_left(self, request: ChatRequest) -> bool:
        """Wait for turns that all clients have left and of whose reply a request may have a part: they end soon.

        Return whether there was one.
        """
        keys = request.message_keys
        left = [
            turn
            for turn in self._in_flight
            if turn.reply.gone and not turn.done and len(turn.request.message_keys) < len(keys)
        ]
        before = [turn for turn in left if turn.request.message_keys == keys[: len(turn.request.message_keys)]]
        for turn in before:
            await turn.settled()
        return bool(before)

    def note_failure(self, error: Exception) -> None:
        """Record why a turn has no reply: an error of the engine or the gateway, or of the request."""
        if isinstance(error, RequestRefused):
            self.failure = None
            self.overflowed = error.code == PromptTooLong.code
        elif isinstance(error, EngineFailed) or getattr(error, "status", 500) >= 500:
            self.failure = f"{type(error).__name__}: {error}"

    def engine_wait(self) -> EngineWait:
        """Whether engines keep this session waiting."""
        waiting = [turn.reply for turn in self._in_flight if turn.reply.engine_owes_since is not None]
        since = min((reply.engine_owes_since or 0.0 for reply in waiting), default=None)
        errors = [reply.engine_errors[-1] for reply in waiting if reply.engine_errors]
        longest_s = 0.0 if since is None else time.monotonic() - since
        return EngineWait(len(waiting), longest_s, errors[-1] if errors else self.failure)

    async def close(self, why: str, drain_s: float) -> int:
        """Take no more turns, wait for those in flight, and interrupt those that take longer. Return their number."""
        self.ended = self.ended or why
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await self._idle.wait()
        self.interrupt()
        turns = [turn for turn in self._in_flight if not turn.done]
        await asyncio.gather(*(turn.settled() for turn in turns))  # until they are on the tape; clients may still read
        return len(turns)

    def interrupt(self) -> None:
        """End the turns in flight with the ids sampled so far."""
        for turn in self._in_flight:
            turn.reply.leave()


class Sessions:
    """The open sessions, by id and by key."""

    def __init__(self) -> None:
        self._by_id: dict[str, OpenSession] = {}
        self._by_rollout: dict[str, list[OpenSession]] = {}
        self._by_key: dict[str, OpenSession] = {}
        self._ended: dict[str, str] = {}  # digests of the keys of closed sessions, with the message for late agents

    def add(self, session: OpenSession) -> None:
        self._by_id[session.id] = session
        self._by_rollout.setdefault(session.rollout.id, []).append(session)
        self._by_key[session.digest] = session

    def remove(self, session: OpenSession) -> None:
        """Remove a session, but keep its key's digest; raises NoSuchSession if it was removed already."""
        self.of_id(session.id)
        del self._by_id[session.id], self._by_key[session.digest]
        self._by_rollout[session.rollout.id].remove(session)
        if not self._by_rollout[session.rollout.id]:
            del self._by_rollout[session.rollout.id]
        self._ended[session.digest] = f"session {session.id} is {session.ended or 'closed'}"
        while len(self._ended) > _REMEMBERED_KEYS:
            del self._ended[next(iter(self._ended))]

    def find(self, session_id: str) -> OpenSession | None:
        """The open session with this id, or None."""
        return self._by_id.get(session_id)

    def of_key(self, key: str) -> OpenSession | None:
        """The session that a key opens; raises SessionEnded if it is closed."""
        digest = key_digest(key)
        found = self._by_key.get(digest)
        if found is None and (ended := self._ended.get(digest)) is not None:
            raise SessionEnded(f"{ended}: it takes no more turns")
        return found

    def of_id(self, session_id: str) -> OpenSession:
        found = self._by_id.get(session_id)
        if found is None:
            raise NoSuchSession(f"no open session {session_id}; GET /sessions lists the open ones")
        return found

    def of_rollout(self, rollout_id: str) -> list[OpenSession]:
        return list(self._by_rollout.get(rollout_id, ()))

    def __iter__(self) -> Iterator[OpenSession]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)


def key_digest(key: str) -> str:
    """The digest by which a key is looked up and recorded, so that neither timing nor the tape reveals the key."""
    return blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

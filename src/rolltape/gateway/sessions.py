"""Sessions: one agent's connection each, with its own key, limits and turns."""

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
from rolltape.gateway.turn.gateway_turn import GatewayTurn
from rolltape.gateway.turn.history import History
from rolltape.records.turn import Delivery, Turn
from rolltape.tape.recording.rollout import RolloutRecorder
from rolltape.tape.recording.session import SessionRecorder

T = TypeVar("T")

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]

_BODIES = 8
_REMEMBERED = 16  # requests of a session that a retry may still come for
_REMEMBERED_KEYS = 20_000  # of ended sessions: 6 MB

# The fields of SessionSpec that a rollout is opened with.
OF_ROLLOUT = [
    *("task_id", "task", "step", "attempt", "source", "split", "agent", "new_try", "try_index"),
    *("tags", "foreign_ids", "extra"),
]


class SessionSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a session is opened for, and its limits."""

    task_id: str | None = None
    task: Any = None
    step: _Count = 0
    attempt: _Count = 0
    source: str | None = None
    split: str | None = None  # of the source
    agent: str | None = None
    new_try: bool = False
    try_index: _Count | None = None  # which try it is, where somebody else counts them; None: the next one on the tape
    tags: tuple[str, ...] = ()
    foreign_ids: tuple[str, ...] = ()  # what the agent's framework calls the rollout
    extra: dict[str, Any] = {}
    rollout: str | None = None  # another session of this open rollout; then none of those above is given
    sampling: SamplingParams = SamplingParams()  # defaults for the agent
    forced: SamplingParams = SamplingParams()  # override the agent
    thinking: bool | None = None  # None: as the agent asks, or as the gateway is set
    max_turns: _Count | None = None
    context_budget: _Count | None = None  # tokens of prompt and reply together
    allowed_tools: tuple[str, ...] | None = None  # None: all that are not denied
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
    """What a session's turns wait for from the engines now, and what went wrong there last."""

    turns: int  # whose reply no engine has given in full; 0: nobody waits for an engine
    longest_s: float  # since the oldest of them was asked, or an engine last gave a part of it
    error: str | None  # an engine's latest, in a turn that waits or the last one to end; None: that went well


class SessionWork:
    """The long work of one session, off the event loop and one piece at a time, so that it delays no other session."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self.bodies = asyncio.Semaphore(_BODIES)  # that are read and parsed at once; others wait in their sockets

    async def run(self, work: Callable[..., T], *args: Any, inline: bool = False) -> T:
        """Do a piece of work when all before it is done; `inline` for what takes less time than a thread costs."""
        await self._lock.acquire()
        if inline:
            try:
                return work(*args)
            finally:
                self._lock.release()
        done = asyncio.get_running_loop().run_in_executor(None, work, *args)
        done.add_done_callback(self._release)
        try:
            return await asyncio.shield(done)  # a client that leaves does not end it, and is not done with it
        finally:
            del done  # an error holds its frames, and with them what was worked on, until nobody holds the error

    def _release(self, done: "asyncio.Future[Any]") -> None:
        self._lock.release()
        if not done.cancelled():
            done.exception()  # looked at, whether or not somebody waits


class RecentTurns:
    """The latest turns of a session, by what they were asked."""

    def __init__(self) -> None:
        self._latest: dict[bytes, dict[int, GatewayTurn]] = {}  # by request, and by which of its replies
        self._recorded: dict[tuple[bytes, int], Turn] = {}  # by an earlier gateway, likewise

    def find(self, digest: bytes, choice: int) -> GatewayTurn | None:
        return self._latest.get(digest, {}).get(choice)

    def add(self, digest: bytes, choice: int, turn: GatewayTurn) -> None:
        self._latest[digest] = self._latest.pop(digest, {}) | {choice: turn}
        while len(self._latest) > _REMEMBERED:
            del self._latest[next(iter(self._latest))]

    def add_recorded(self, digest: bytes, choice: int, turn: Turn) -> None:
        """Remember a turn that an earlier gateway recorded."""
        self._recorded.pop((digest, choice), None)
        self._recorded[digest, choice] = turn
        while len(self._recorded) > _REMEMBERED:
            del self._recorded[next(iter(self._recorded))]

    def take_recorded(self, digest: bytes, choice: int) -> Turn | None:
        """Such a turn, once: whoever takes it adds what he makes of it."""
        return self._recorded.pop((digest, choice), None)

    def forget(self, turn: GatewayTurn) -> None:
        """Let nobody ask for this one again."""
        rest = {
            digest: {choice: one for choice, one in turns.items() if one is not turn}
            for digest, turns in self._latest.items()
        }
        self._latest = {digest: turns for digest, turns in rest.items() if turns}

    def clear(self) -> None:
        """Forget all: they hold their session, and it holds them."""
        self._latest.clear()
        self._recorded.clear()


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
        """Its key is given, or, for one that another gateway opened, the digest of it."""
        self.spec = spec
        self.rollout = rollout
        self.recorder = recorder
        self._key = key
        self.digest = key_digest(key) if key is not None else digest or ""  # of its key
        self.history = History(tool_ids_matter=recorder.head.tool_ids_matter, deliveries=deliveries)
        self.work = SessionWork()
        self.opened_at = time.time()
        self.used_at = time.monotonic()  # when a turn last began or ended
        self.turns = 0  # begun, auxiliary ones aside
        self.task_instructions: str | None = None  # system messages of the first of them; None: there is none yet
        self.refused_turns = 0  # above the cap
        self.refusals = 0  # of requests, as far as they are recorded
        self.overflowed = False  # the last request was refused: its prompt was far longer than the context
        self.recent = RecentTurns()
        self.ids_json = IdsAsJson()
        self.deliveries = deliveries  # by turn, of all sessions of the rollout
        self.ended: str | None = None  # why it takes no more turns; None: it does
        self.waited_s = 0.0  # for engines that failed or did not answer, over all turns that have ended
        self.trouble: str | None = None  # of an engine, the latest that was waited for
        self.failure: str | None = None  # why the latest turn has no reply, where the engine or the gateway is to blame
        self._in_flight: set[GatewayTurn] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def id(self) -> str:
        return self.recorder.id

    @property
    def key(self) -> str:
        """Opens this session. It is known where the session was opened, and nowhere else."""
        assert self._key is not None
        return self._key

    @property
    def is_busy(self) -> bool:
        """Whether a turn is in the making; a client that does not take its reply makes nobody busy."""
        return any(not turn.done for turn in self._in_flight)

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def begin(self, turn: GatewayTurn, *, counts: bool) -> None:
        """Let a turn begin; raises for one that comes after the close, or above the cap."""
        if self.ended is not None:
            raise SessionEnded(f"session {self.id} is {self.ended}: it takes no more turns")
        if counts:
            if self.spec.max_turns is not None and self.turns >= self.spec.max_turns:
                self.refused_turns += 1
                raise TurnCapReached(f"session {self.id} has had its {self.spec.max_turns} turns")
            self.turns += 1
        self._in_flight.add(turn)
        self._idle.clear()
        self.used_at = time.monotonic()

    def end(self, turn: GatewayTurn) -> None:
        """Note that a turn has ended, and that its reply was delivered or could not be."""
        self._in_flight.discard(turn)
        self.used_at = time.monotonic()
        if not self._in_flight:
            self._idle.set()

    async def settle_left(self, request: ChatRequest) -> bool:
        """Wait for turns that all clients have left, and that a request may have a part of: they end soon.

        Whether there was one.
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
        """Note why a turn has no reply: the engine or the gateway is to blame, or what the agent asked for."""
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
        """Take no more turns, wait for those in flight, and interrupt what takes longer; how many those were."""
        self.ended = self.ended or why
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await self._idle.wait()
        self.interrupt()
        turns = [turn for turn in self._in_flight if not turn.done]
        await asyncio.gather(*(turn.settled() for turn in turns))  # on the tape; not for clients to take their replies
        return len(turns)

    def interrupt(self) -> None:
        """End the turns in flight with what was sampled so far."""
        for turn in self._in_flight:
            turn.reply.leave()


class Sessions:
    """The open sessions, by id and by key."""

    def __init__(self) -> None:
        self._by_id: dict[str, OpenSession] = {}
        self._by_rollout: dict[str, list[OpenSession]] = {}
        self._by_key: dict[str, OpenSession] = {}
        self._ended: dict[str, str] = {}  # keys of closed ones and why, so that a late agent is told

    def add(self, session: OpenSession) -> None:
        self._by_id[session.id] = session
        self._by_rollout.setdefault(session.rollout.id, []).append(session)
        self._by_key[session.digest] = session

    def remove(self, session: OpenSession) -> None:
        """Forget a session but for its key; raises NoSuchSession if that was done already."""
        self.of_id(session.id)
        del self._by_id[session.id], self._by_key[session.digest]
        self._by_rollout[session.rollout.id].remove(session)
        if not self._by_rollout[session.rollout.id]:
            del self._by_rollout[session.rollout.id]
        self._ended[session.digest] = f"session {session.id} is {session.ended or 'closed'}"
        while len(self._ended) > _REMEMBERED_KEYS:
            del self._ended[next(iter(self._ended))]

    def find(self, session_id: str) -> OpenSession | None:
        """An open session; None: there is none of that id."""
        return self._by_id.get(session_id)

    def of_key(self, key: str) -> OpenSession | None:
        """The session that a key opens; raises SessionEnded for the key of one that is closed."""
        digest = key_digest(key)
        found = self._by_key.get(digest)
        if found is None and (ended := self._ended.get(digest)) is not None:
            raise SessionEnded(f"{ended}: it takes no more turns")
        return found

    def of_id(self, session_id: str) -> OpenSession:
        found = self._by_id.get(session_id)
        if found is None:
            raise NoSuchSession(f"no open session {session_id}; GET /sessions lists those there are")
        return found

    def of_rollout(self, rollout_id: str) -> list[OpenSession]:
        return list(self._by_rollout.get(rollout_id, ()))

    def __iter__(self) -> Iterator[OpenSession]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)


def key_digest(key: str) -> str:
    """A digest under which a key is looked up and recorded: neither the time that takes nor the tape tells the key."""
    return blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

"""Sessions that another gateway of the run opened. If that gateway has died, they are taken over here.

A key names the writer that made it, and the session's head on the tape has the key's digest. So an unknown key costs
one listing of the run's journals, and at most one reading of a dead writer's journal.
"""

import asyncio
import contextlib
import logging
import re
import secrets
from pathlib import Path
from typing import Any

import msgspec

from rolltape.errors import NoSuchSession, RecordError, SessionEnded
from rolltape.gateway.metrics import Metrics
from rolltape.gateway.peers import ServedElsewhere, find_peer, forget_peer
from rolltape.gateway.request import instructions_of
from rolltape.gateway.sessions import OF_ROLLOUT, OpenSession, Sessions, SessionSpec, key_digest
from rolltape.records.ids import session_id
from rolltape.records.turn import Delivery, Finish
from rolltape.tape.journal.file import described, is_alive
from rolltape.tape.journal.left_open import FOUND_BY, LeftSession, OtherWriters, writer_tag
from rolltape.tape.recording.rollout import RolloutRecorder
from rolltape.tape.recording.session import SessionRecorder
from rolltape.tape.recording.tape import Tape
from rolltape.tape.stored import Key

log = logging.getLogger("rolltape.gateway")

_SPEC = "spec"
_KEY = re.compile(r"rts-([0-9a-f]{8})[\w-]{32}")
_SESSION_ID = re.compile(r"([0-9a-f]{32})\.([0-9]{1,18})\.([0-9]{1,18})")
_TRIES = 3  # another gateway may be faster, and then die too


def head_extra(spec: SessionSpec, *found_by: str) -> dict[str, Any]:
    """The entries in a session's head for a gateway that takes it over."""
    default = SessionSpec()
    given = [name for name in spec.__struct_fields__ if name not in (*OF_ROLLOUT, "rollout")]
    changed = {name: getattr(spec, name) for name in given if getattr(spec, name) != getattr(default, name)}
    return {FOUND_BY: list(found_by), _SPEC: msgspec.to_builtins(changed)}


class OtherSessions:
    """Finds sessions of other gateways by key, id or name, and takes them over if their gateway has died."""

    def __init__(self, tape: Tape, fingerprint: str | None, sessions: Sessions, metrics: Metrics) -> None:
        """Sessions that are taken over are added to `sessions`."""
        self._tape = tape
        self._own = tape.writer
        self._fingerprint = fingerprint
        self._sessions = sessions
        self._metrics = metrics
        self._writers = OtherWriters(tape.directory, self._own)
        self._owners: dict[Key, Path] = {}  # the journals of the writers that took a rollout over
        self._taking: dict[Key, asyncio.Future[None]] = {}

    async def by_key(self, key: str) -> OpenSession | None:
        """Open the session of a key here and return it; None if the key opens no session.

        Raises ServedElsewhere if its gateway is alive, SessionEnded if it takes no more turns.
        """
        parsed = _KEY.fullmatch(key)
        path = None if parsed is None else self._writers.of_tag(parsed[1])
        if path is None:
            return None
        if is_alive(path):
            raise self._elsewhere(path, "that key")
        left = (await self._found(path, key_digest(key)))[-1:]
        return await self._served(left[0]) if left else None

    async def by_name(self, digest: str) -> list[OpenSession]:
        """Open the sessions here that dead gateways had open under a digest, and return them."""
        found = [one for path in self._writers.dead() for one in await self._found(path, digest)]
        served = []
        for one in found:
            try:
                served.append(await self._served(one))
            except (SessionEnded, ServedElsewhere):  # another gateway has it, or it has ended
                continue
        return served

    async def by_id(self, wanted: str) -> OpenSession:
        """Open a session here and return it; raises NoSuchSession, or ServedElsewhere if its gateway is alive."""
        parsed = _SESSION_ID.fullmatch(wanted)
        if parsed is None:
            raise NoSuchSession(f"no open session {wanted}; GET /sessions lists the open ones")
        try:
            return await self._served(LeftSession(parsed[1], int(parsed[2]), int(parsed[3]), None))
        except SessionEnded as error:
            raise NoSuchSession(f"no open session {wanted}: {error}") from error

    async def by_rollout(self, rollout: str) -> None:
        """Open the latest try of a rollout here, if it has not ended; raises ServedElsewhere in the same case."""
        latest = await asyncio.to_thread(self._tape.next_try, rollout) - 1
        if latest >= 0:
            with contextlib.suppress(SessionEnded):
                await self._served(LeftSession(rollout, latest, 0, None))

    async def _found(self, path: Path, digest: str) -> list[LeftSession]:
        left = self._writers.loaded(path)
        if left is None:
            left = await asyncio.to_thread(self._writers.left_open, path)
        return left.sessions.get(digest, [])

    async def _served(self, left: LeftSession) -> OpenSession:
        """Take over a session's rollout, unless another gateway has. Return the session once it is open here."""
        own_id = session_id(left.rollout, left.try_index, left.ordinal)
        for _ in range(_TRIES):
            taken_by = self._owners.get(left.key)
            if taken_by is not None and is_alive(taken_by):
                raise self._elsewhere(taken_by, f"session {own_id}")
            owner = await asyncio.to_thread(self._writers.owner, left.key)
            if owner is None or owner.ended:
                raise SessionEnded(f"session {own_id} has ended")
            if owner.writer == self._own:
                if left.key in self._taking:
                    await asyncio.wait({self._taking[left.key]})
                return self._opened(own_id)
            if is_alive(owner.path):
                self._owners[left.key] = owner.path
                continue
            if left.fingerprint not in (None, self._fingerprint):
                raise SessionEnded(f"session {own_id} was opened with another tokenizer or chat template")
            try:
                await self._take(left.key)
            except RecordError as error:
                log.info("session %s: %s", own_id, error)  # another gateway was faster, and is found in the next round
            else:
                forget_peer(self._tape.directory.path, owner.writer)
                return self._opened(own_id)
        raise ServedElsewhere(f"session {own_id} cannot be taken over now; ask again", None)

    def _opened(self, own_id: str) -> OpenSession:
        session = self._sessions.find(own_id)
        if session is None:
            raise SessionEnded(f"session {own_id} has ended")
        return session

    async def _take(self, key: Key) -> None:
        """Take over a rollout with all its sessions, once for all simultaneous requests."""
        taking = self._taking.get(key)
        if taking is None:
            taking = self._taking[key] = asyncio.ensure_future(self._taken(key))
            taking.add_done_callback(lambda _: self._taking.pop(key))
        await asyncio.shield(taking)

    async def _taken(self, key: Key) -> None:
        rollout, sessions = await asyncio.to_thread(self._rebuilt, key)
        for session in sessions:
            self._sessions.add(session)
            self._metrics.count("sessions_taken_over")
        log.warning("rollout %s (try %s): taken over with %s sessions", rollout.id, rollout.try_index, len(sessions))

    def _rebuilt(self, key: Key) -> tuple[RolloutRecorder, list[OpenSession]]:
        deliveries = self._writers.deliveries(key)
        rollout = self._tape.resume(*key)
        recorders = [one for one in rollout.sessions if one.head.extra.get(FOUND_BY)]
        return rollout, [_restored(rollout, recorder, deliveries) for recorder in recorders]

    def _elsewhere(self, path: Path, what: str) -> ServedElsewhere:
        peer = find_peer(self._tape.directory.path, path.stem)
        return ServedElsewhere(f"{what} is served by {described(path.stem)}; ask again", peer)


def mint_key(writer: str) -> str:
    """Make a random key. It begins with the tag of its writer, for the other gateways of the run."""
    return f"rts-{writer_tag(writer)}{secrets.token_urlsafe(24)}"


def _restored(rollout: RolloutRecorder, recorder: SessionRecorder, deliveries: dict[str, Delivery]) -> OpenSession:
    """Rebuild a session as it was after its last turn."""
    extra = recorder.head.extra
    spec = msgspec.convert(extra.get(_SPEC, {}), SessionSpec)
    session = OpenSession(spec, rollout, recorder, deliveries, digest=extra[FOUND_BY][0])
    session.opened_at = rollout.head.started_at_ns / 1e9
    unanswered: set[tuple[str, int]] = set()
    for turn in recorder.turns:
        request: tuple[str, int] = (turn.facts.extra.get("request", ""), turn.facts.extra.get("choice", 0))
        if turn.facts.auxiliary is None:
            session.history.restore(turn)
            is_repeat = request in unanswered
            session.turns += not is_repeat
            if session.task_instructions is None:
                session.task_instructions = instructions_of(turn.prompt_messages)
        if request[0]:
            is_given_up = turn.facts.finish in (Finish.ABORT, Finish.ERROR)
            (unanswered.add if is_given_up else unanswered.discard)(request)
            session.recent.add(bytes.fromhex(request[0]), request[1], turn)
    return session

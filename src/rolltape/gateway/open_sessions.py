"""Sessions that a request opens by itself (`--open`): which one it belongs to, and when it ends.

A request names its session in headers (`x-rolltape-session`, `x-rolltape-task`, …), in its path
(`/with/session=a,task=b/v1/…`) or in its body's `metadata` (`rolltape_session`, …). One that names none belongs to the
conversation that it goes on with. A conversation that goes on with none is a session and a rollout of its own.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple
from urllib.parse import unquote
from weakref import WeakValueDictionary

import msgspec

from rolltape.errors import BadRequest, RecordError, RolltapeError
from rolltape.gateway.finished import Ending
from rolltape.gateway.request import ChatRequest
from rolltape.gateway.sessions import OpenSession, SessionSpec, SessionWork, key_digest
from rolltape.gateway.turn.turn import Turns
from rolltape.records.ids import group_id, join_source, rollout_id
from rolltape.records.messages import content_text
from rolltape.tape.recording.tape import Tape
from rolltape.tape.run import Run

log = logging.getLogger("rolltape.gateway")

SOURCE = "open"  # of rollouts whose requests name none
_SESSION_HEADERS = ("x-session-id", "session-id")  # as verifiers, and as Codex call it
_FIELDS = ("session", "task", "step", "attempt", "group", "split", "source", "tags")
_MOST_TEXT = 512  # characters of one of them
_LIKE = 64  # conversations with the same beginning that are looked at, the latest first
_LOOKS_PER_IDLE = 10
_COUNTED = 10_000  # groups whose attempts are counted in memory; others are looked up


class Identity(NamedTuple):
    """What a request says about the session and the rollout that it belongs to; None: nothing."""

    session: str | None = None
    task: str | None = None
    step: int = 0
    attempt: int | None = None
    group: str | None = None
    split: str | None = None
    source: str | None = None
    tags: tuple[str, ...] = ()


def read_identity(headers: Mapping[str, str], path: str | None, metadata: Mapping[str, Any] | None) -> Identity:
    """What headers, path and metadata say, in this order; raises BadRequest for what makes no sense."""
    in_path = _read_path(path) if path else {}
    found: dict[str, str] = {}
    for field in _FIELDS:
        aliases = [headers.get(name) for name in _SESSION_HEADERS] if field == "session" else []
        given = (
            headers.get(f"x-rolltape-{field}"),
            in_path.get(field),
            (metadata or {}).get(f"rolltape_{field}"),
            *aliases,
        )
        value = next((one for one in given if one not in (None, "")), None)
        if value is None:
            continue
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        if len(text) > _MOST_TEXT:
            raise BadRequest(f"x-rolltape-{field} has {len(text)} characters; give at most {_MOST_TEXT}")
        if not text.isprintable():
            raise BadRequest(f"x-rolltape-{field} is {text[:40]!r}; give printable characters")
        found[field] = text
    session = found.get("session")
    return Identity(
        session=session,
        task=found.get("task"),
        step=_count(found, "step") or 0,
        attempt=_count(found, "attempt"),
        group=found.get("group"),
        split=found.get("split"),
        source=found.get("source"),
        tags=tuple(tag.strip() for tag in found.get("tags", "").split(",") if tag.strip()),
    )


def _read_path(path: str) -> dict[str, str]:
    """The pairs of a path's `session=a,task=b`, whose values are percent-encoded."""
    found: dict[str, str] = {}
    for pair in path.split(","):
        name, equals, value = pair.partition("=")
        if not equals or name not in _FIELDS or name in found:
            raise BadRequest(
                f"/with/{path[:80]}: {pair[:40]!r} is no NAME=VALUE; names are {', '.join(_FIELDS)}, once each"
            )
        found[name] = unquote(value)
    return found


def _count(found: Mapping[str, str], field: str) -> int | None:
    if (text := found.get(field)) is None:
        return None
    if not text.isdecimal() or len(text) > 15:
        raise BadRequest(f"x-rolltape-{field} is {text[:40]!r}; give a whole number")
    return int(text)


class _Entry(NamedTuple):
    """An open session, and under what it is found."""

    session: OpenSession
    key: str  # the API key that its requests carry
    name: str | bytes  # as its requests call it, or how its conversation begins
    opening: str  # the text of its first user message
    minted: list[str]  # ids that its replies were given
    said: list[bytes]  # digests of its conversations, up to and including a reply
    gone_on: set[str]  # turns that a request went on from


class Attempts:
    """Numbers the attempts of groups, after those that are on the tape, whichever gateway of the run opened them."""

    def __init__(self, tape: Tape, model: str) -> None:
        self._tape = tape
        self._model = model
        self._run: Run | None = None
        self._opening: asyncio.Future[Run] | None = None
        self._next: dict[str, int] = {}  # by group, for the latest groups

    async def prepare(self) -> None:
        """Have the run indexed, once, off the event loop; `next` then costs less than a thread would."""
        if self._run is not None:
            return
        if self._opening is None or self._opening.done():
            self._opening = asyncio.ensure_future(asyncio.to_thread(self._indexed))
        self._run = await asyncio.shield(self._opening)

    def _indexed(self) -> Run:
        run = self._tape.run()
        run.tape_index.advance()
        return run

    def next(self, *, task_id: str, step: int, source: str | None) -> int:
        """The number of the next attempt at a task."""
        assert self._run is not None
        name, task = self._tape.name, {"source": source, "task_id": task_id, "model": self._model, "agent": None}
        group = group_id(name, **task, task=None, step=step)
        attempt = self._next.pop(group, None)
        if attempt is None:
            attempt = self._run.tape_index.next_attempt(group)
        # The journals are asked, since the index may be behind: other workers number the same group.
        while self._tape.next_try(rollout_id(name, **task, task=None, step=step, attempt=attempt)):
            attempt += 1
        self._next[group] = attempt + 1
        while len(self._next) > _COUNTED:
            del self._next[next(iter(self._next))]
        return attempt


class OpenSessions:
    """The sessions that requests opened, by what the requests say and by how their conversations begin."""

    def __init__(
        self,
        turns: Turns,
        open_session: Callable[[SessionSpec, str], OpenSession],
        find_left: Callable[[str], Awaitable[list[OpenSession]]],
        attempts: Attempts,
    ) -> None:
        """`open_session` opens one that is found again by a digest, `find_left` those that dead gateways had so."""
        self._turns = turns
        self._open_session = open_session
        self._find_left = find_left
        self._entries: dict[str, _Entry] = {}  # by the session's id
        self._found: dict[tuple[str, str | bytes], list[OpenSession]] = defaultdict(list)  # by API key and name
        self._said: dict[tuple[str, bytes], list[OpenSession]] = defaultdict(list)  # by API key and conversation
        self._minted: dict[tuple[str, str], OpenSession] = {}  # by API key, and an id that a reply was given
        self._latest: dict[str, OpenSession] = {}  # by API key
        self._attempts = attempts
        self._works: WeakValueDictionary[str, SessionWork] = WeakValueDictionary()

    def __contains__(self, session: OpenSession) -> bool:
        return session.id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def work(self, key: str | None) -> SessionWork:
        """Where the bodies of a key's requests are read, before it is known whose they are."""
        found = self._works.get(key or "")
        if found is None:
            found = self._works[key or ""] = SessionWork()
        return found

    async def find(self, key: str | None, identity: Identity, request: ChatRequest, *, says_retry: bool) -> OpenSession:
        """The session that a request belongs to; it is opened where there is none."""
        await self._attempts.prepare()
        key, name = _name(key, identity, request)
        if isinstance(name, str):
            if not self._open_ones(key, name):
                await self._taken_over(key, name)
            named = self._open_ones(key, name)  # another request may have opened it meanwhile
            session = named[-1] if named else None
        else:
            session = await self._continued(key, name, request)
            goes_on = says_retry or any(message["role"] == "assistant" for message in request.messages)
            if session is None and goes_on and await self._taken_over(key, name):
                session = await self._continued(key, name, request)
        if session is None:
            session = self._opened(identity, request, _name_digest(key, name))
            self._add(session, key, name, _first_user_text(request))
        self._latest[key] = session
        return session

    def _add(self, session: OpenSession, key: str, name: str | bytes, opening: str = "") -> None:
        self._entries[session.id] = _Entry(session, key, name, opening, [], [], set())
        self._found[key, name].append(session)

    async def _taken_over(self, key: str, name: str | bytes) -> list[OpenSession]:
        """The sessions that dead gateways had under a name, with the ids that their replies were given."""
        found = [one for one in await self._find_left(_name_digest(key, name)) if one.id not in self._entries]
        for session in found:
            self._add(session, key, name)
            for turn in session.recorder.turns:
                if turn.reply is not None:
                    self.note_reply(session, turn.prompt_messages, turn.reply.to_dict())
        return found

    def note_reply(self, session: OpenSession, asked: Sequence[Mapping[str, Any]], message: Mapping[str, Any]) -> None:
        """Remember a reply by the conversation that it ends, and by the ids that it was given, which its echo has."""
        entry = self._entries.get(session.id)
        if entry is None:
            return
        conversation = _conversation((*asked, message))
        if conversation not in entry.said:
            entry.said.append(conversation)
            self._said[entry.key, conversation].append(session)
        entry.minted.extend(_ids(message))
        self._minted.update({(entry.key, one): session for one in _ids(message)})

    def _open_ones(self, key: str, name: str | bytes) -> list[OpenSession]:
        return [one for one in self._found.get((key, name), [])[-_LIKE:] if one.ended is None]

    async def _continued(self, key: str, beginning: bytes, request: ChatRequest) -> OpenSession | None:
        """The session whose conversation a request goes on with, or asks again for; None: there is none."""
        echoed = [message for message in request.messages if message["role"] == "assistant"]
        for found in (self._minted.get((key, one)) for message in reversed(echoed) for one in _ids(message)):
            if found is not None and found.ended is None:
                return found
        candidates = self._open_ones(key, beginning)
        for session in candidates:
            # Attempts at one task begin alike: whose retry it is shows only where nobody got the reply.
            if self._turns.find_repeated(session, request, says_retry=False) is not None:
                return session
        if request.prompt is not None:
            for session in reversed(candidates):
                if await self._turns.continues(session, request) and session.ended is None:
                    return session
            return None
        if echoed and (said := self._find_said(key, _conversation(request.messages))) is not None:
            return said
        if echoed and (matched := await self._best_match(candidates, request)) is not None:
            return matched
        return self._find_asker(key, request)

    def _find_said(self, key: str, conversation: bytes) -> OpenSession | None:
        """The session that gave a conversation's last reply; of several, one that nobody has gone on with yet."""
        known = [one for one in self._said.get((key, conversation), ()) if one.ended is None]
        if len(known) > 1:
            self._said[key, conversation] = known[1:] + known[:1]
        return known[0] if known else None

    def _find_asker(self, key: str, request: ChatRequest) -> OpenSession | None:
        """The session that a side request is about: a title's or a memory's text quotes what its user said."""
        text = "\n".join(content_text(one.get("content")) for one in request.messages if one["role"] == "user")
        latest = self._latest.get(key)
        if latest is None or not self._turns.is_auxiliary(latest, request):
            return None
        recent = itertools.islice(reversed(self._entries.values()), _LIKE)
        quoted = (one for one in recent if one.key == key and one.opening and one.opening in text)
        return next((one.session for one in quoted if one.session.ended is None), None)

    async def _best_match(self, candidates: list[OpenSession], request: ChatRequest) -> OpenSession | None:
        """The session that knows most of a conversation's replies; None: no session knows any.

        Attempts at one task may begin with equal replies. Of sessions that match alike, one is taken from whose last
        reply no request has gone on yet.
        """
        matches = [(session, await self._turns.place(session, request)) for session in candidates]
        known = [
            (len(match.replies), match.turn, entry)
            for session, match in matches
            if match.replies and (entry := self._entries.get(session.id)) is not None and session.ended is None
        ]
        if not known:
            return None
        _, turn, entry = max(known, key=lambda one: (one[0], one[1] is not None and one[1].id not in one[2].gone_on))
        if turn is not None:
            entry.gone_on.add(turn.id)
        return entry.session

    def _opened(self, identity: Identity, request: ChatRequest, digest: str) -> OpenSession:
        prompt = _beginning(request) if request.prompt is None else request.message_keys[0]
        task = identity.task or identity.group or f"prompt-{prompt.hex()[:16]}"
        source = identity.source or SOURCE
        attempt = identity.attempt
        if attempt is None:
            try:
                joined = join_source(source, identity.split)
            except RecordError as error:
                raise BadRequest(str(error)) from error
            attempt = self._attempts.next(task_id=task, step=identity.step, source=joined)
        spec = SessionSpec(
            task_id=task,
            step=identity.step,
            attempt=attempt,
            source=source,
            split=identity.split,
            tags=identity.tags,
            foreign_ids=() if identity.session is None else (identity.session,),
            extra={} if identity.group is None else {"group": identity.group},
            new_try=True,
        )
        return self._open_session(spec, digest)

    def forget(self, session: OpenSession) -> None:
        """Forget a session that has ended."""
        entry = self._entries.pop(session.id, None)
        if entry is None:
            return
        likes = self._found[entry.key, entry.name]
        likes.remove(session)
        if not likes:
            del self._found[entry.key, entry.name]
        for conversation in entry.said:
            known = self._said[entry.key, conversation]
            known.remove(session)
            if not known:
                del self._said[entry.key, conversation]
        for one in entry.minted:
            self._minted.pop((entry.key, one), None)
        if self._latest.get(entry.key) is session:
            del self._latest[entry.key]

    async def end_idle(self, finish: "Callable[[str, Ending], Any]", idle_s: float) -> None:
        """Finish sessions that had no request for so long, without a reward; for as long as the gateway runs."""
        while True:
            await asyncio.sleep(idle_s / _LOOKS_PER_IDLE)
            now = time.monotonic()
            for session in [entry.session for entry in self._entries.values()]:
                if not session.is_busy and now - session.used_at > idle_s:
                    # Its replies are on the tape; clients that do not take them are not waited for.
                    ending = Ending(reason=f"no request for {idle_s:g} s", samples=False, drain_s=0)
                    with contextlib.suppress(RolltapeError):  # somebody else has just ended it
                        await finish(session.id, ending)


def _beginning(request: ChatRequest) -> bytes:
    """A digest of what comes before the first reply in a conversation; of no messages, where a prompt is given."""
    return _beginning_digest(request.messages)


def _beginning_digest(messages: Sequence[Mapping[str, Any]]) -> bytes:
    digest = blake2b(digest_size=16)
    for message in itertools.takewhile(lambda one: one["role"] != "assistant", messages):
        digest.update(msgspec.json.encode(message))
    return digest.digest()


def _first_user_text(request: ChatRequest) -> str:
    texts = (content_text(message.get("content")) for message in request.messages if message["role"] == "user")
    return next(texts, "").strip()


def name_digest(key: str | None, identity: Identity, request: ChatRequest) -> str:
    """A digest of what a request says about its session, or of how its conversation begins."""
    return _name_digest(*_name(key, identity, request))


def _name(key: str | None, identity: Identity, request: ChatRequest) -> tuple[str, str | bytes]:
    """The API key and the name under which a session is found; one that requests name is found with any key."""
    return ("", identity.session) if identity.session is not None else (key or "", _beginning(request))


def _name_digest(key: str, name: str | bytes) -> str:
    """What is recorded of a session's name and the API key of its requests."""
    return key_digest(f"{key}\0{name if isinstance(name, str) else name.hex()}")


def _conversation(messages: Sequence[Mapping[str, Any]]) -> bytes:
    """A digest of a conversation: how it begins, and all that the model said, as clients send it back."""
    roles = [message["role"] for message in messages]
    digest = blake2b(_beginning_digest(messages), digest_size=16)
    for message in (one for one, role in zip(messages, roles, strict=True) if role == "assistant"):
        calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
        said = [
            content_text(message.get("content")),
            *(f"{call.get('name')} {call.get('arguments')}" for call in calls),
        ]
        digest.update(msgspec.json.encode(said))
    return digest.digest()


def _ids(message: Mapping[str, Any]) -> list[str]:
    """The ids that a message carries for itself and its calls."""
    given = [message.get("id"), *(call.get("id") for call in message.get("tool_calls") or ())]
    return [one for one in given if isinstance(one, str) and one]

"""Sessions that requests open themselves (`--open`): which session a request belongs to, and when a session ends.

A request may name its session (`identity.py`). Otherwise it belongs to the conversation that it continues. A new
conversation gets a session and a rollout of its own.
"""

import asyncio
import contextlib
import itertools
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from rolltape.errors import BadRequest, RecordError, ReplyNotFound, RolltapeError
from rolltape.gateway.finished import Ending
from rolltape.gateway.identity import (
    Attempts,
    Identity,
    digest_beginning,
    digest_conversation,
    digest_name,
    first_user_text,
    minted_ids,
    session_name,
)
from rolltape.gateway.request import ChatRequest, auxiliary_reason
from rolltape.gateway.sessions import OpenSession, SessionSpec, SessionWork
from rolltape.gateway.turn.endpoint_replies import EndpointReplies
from rolltape.gateway.turn.turn import Turns
from rolltape.records.ids import join_source
from rolltape.records.messages import content_text

SOURCE = "open"  # of rollouts whose requests name no source
_LIKE = 64  # conversations with the same beginning that are compared, the latest first
_LOOKS_PER_IDLE = 10


class _OpenedSession(NamedTuple):
    """An open session, and the keys by which it is found."""

    session: OpenSession
    key: str  # the API key of its requests
    name: str | bytes  # its name in requests, or the digest of its conversation's beginning
    opening: str  # the text of its first user message
    minted: list[str]  # the ids of its replies and calls
    conversations: list[bytes]  # digests of its conversations, each up to a reply
    gone_on: set[bytes]  # digests of its conversations that a request continued


class OpenSessions:
    """The sessions that requests opened, found by name, reply ids, or conversation."""

    def __init__(
        self,
        turns: Turns,
        open_session: Callable[[SessionSpec, str], OpenSession],
        find_left: Callable[[str], Awaitable[list[OpenSession]]],
        attempts: Attempts,
    ) -> None:
        """`open_session` opens a session under a digest; `find_left` takes over such sessions of dead gateways."""
        self._turns = turns
        self._open_session = open_session
        self._find_left = find_left
        self._entries: dict[str, _OpenedSession] = {}  # by session id
        self._found: dict[tuple[str, str | bytes], list[OpenSession]] = defaultdict(list)  # by API key and name
        self._by_conversation: dict[tuple[str, bytes], list[OpenSession]] = defaultdict(list)  # and by API key
        self._minted: dict[tuple[str, str], OpenSession] = {}  # by API key, and the id of a reply or a call
        self._latest: dict[str, OpenSession] = {}  # by API key
        # Replies of ended sessions, whose conversations may go on in others, the latest first; and their API keys.
        self._ended: deque[tuple[str, EndpointReplies]] = deque(maxlen=_LIKE)
        self._attempts = attempts
        self._works: WeakValueDictionary[str, SessionWork] = WeakValueDictionary()

    def __contains__(self, session: OpenSession) -> bool:
        return session.id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def work(self, key: str | None) -> SessionWork:
        """The worker that reads the bodies of a key's requests before their session is known."""
        found = self._works.get(key or "")
        if found is None:
            found = self._works[key or ""] = SessionWork()
        return found

    async def find(self, key: str | None, identity: Identity, request: ChatRequest, *, is_retry: bool) -> OpenSession:
        """Find the session of a request, or open one."""
        await self._attempts.prepare()
        key, name = session_name(key, identity, request)
        if isinstance(name, str):
            if not self._open_ones(key, name):
                await self._taken_over(key, name)
            named = self._open_ones(key, name)  # another request may have opened it meanwhile
            session = named[-1] if named else None
        else:
            session = await self._continued(key, name, request)
            goes_on = is_retry or any(message["role"] == "assistant" for message in request.messages)
            if session is None and goes_on and await self._taken_over(key, name):
                session = await self._continued(key, name, request)
        if session is None:
            session = self._opened(identity, request, digest_name(key, name))
            self._add(session, key, name, first_user_text(request))
            ids = [one for message in request.messages for one in minted_ids(message)]
            earlier = (replies for of, replies in self._ended if of == key and replies.knows(ids))
            if (latest := next(earlier, None)) is not None:
                session.endpoint_replies.add_earlier(latest)
        self._latest[key] = session
        return session

    def _add(self, session: OpenSession, key: str, name: str | bytes, opening: str = "") -> None:
        self._entries[session.id] = _OpenedSession(session, key, name, opening, [], [], set())
        self._found[key, name].append(session)

    async def _taken_over(self, key: str, name: str | bytes) -> list[OpenSession]:
        """Take over the sessions that dead gateways had under a name, and add their replies."""
        found = [one for one in await self._find_left(digest_name(key, name)) if one.id not in self._entries]
        for session in found:
            self._add(session, key, name)
            for turn in session.recorder.turns:
                if turn.reply is not None:
                    reply_id = turn.facts.extra.get("reply_id", "")
                    self.note_reply(session, turn.prompt_messages, turn.reply.to_dict(), reply_id)
        return found

    def note_reply(
        self, session: OpenSession, asked: Sequence[Mapping[str, Any]], message: Mapping[str, Any], reply_id: str
    ) -> None:
        """Index a reply by the conversation that it ends, and by its ids, which its echo contains."""
        entry = self._entries.get(session.id)
        if entry is None:
            return
        conversation = digest_conversation((*asked, message))
        if conversation not in entry.conversations:
            entry.conversations.append(conversation)
            self._by_conversation[entry.key, conversation].append(session)
        minted = dict.fromkeys((reply_id, *minted_ids(message)))
        entry.minted.extend(minted)
        self._minted.update({(entry.key, one): session for one in minted})

    def _open_ones(self, key: str, name: str | bytes) -> list[OpenSession]:
        return [one for one in self._found.get((key, name), [])[-_LIKE:] if one.ended is None]

    async def _continued(self, key: str, beginning: bytes, request: ChatRequest) -> OpenSession | None:
        """The session whose conversation a request continues or retries, or None."""
        echoed = [message for message in request.messages if message["role"] == "assistant"]
        minted = [one for message in reversed(echoed) for one in minted_ids(message)]
        after = [] if request.after_reply is None else [request.after_reply]
        for found in (self._minted.get((key, one)) for one in minted + after):
            if found is not None and found.ended is None:
                return found
        if request.after_reply is not None:
            raise ReplyNotFound(f"there is no open session with a reply {request.after_reply}; send the whole input")
        candidates = self._open_ones(key, beginning)
        for session in candidates:
            # Attempts at one task begin alike. A retry is certain only if no client got the reply.
            if self._turns.find_repeated(session, request, is_retry=False) is not None:
                return session
        if request.prompt is not None:
            for session in reversed(candidates):
                if await self._turns.continues(session, request) and session.ended is None:
                    return session
            return None
        if echoed:
            # Its replies name it, unless several sessions have the same ones. A client may change other messages.
            conversation = digest_conversation(request.messages)
            known = self._find_by_conversation(key, conversation)
            if len(known) == 1:
                self._entries[known[0].id].gone_on.add(conversation)
                return known[0]
            if (matched := await self._best_match(known[:_LIKE] or candidates, request, conversation)) is not None:
                return matched
            if known and (still_open := [one for one in known if one.ended is None]):
                return still_open[0]
        return self._find_asker(key, request)

    def _find_by_conversation(self, key: str, conversation: bytes) -> list[OpenSession]:
        """The sessions with a conversation's replies; the one that was first found least recently comes first."""
        sessions = self._by_conversation.get((key, conversation), [])
        known = [one for one in sessions if one.ended is None]
        if len(known) > 1:
            sessions.remove(known[0])
            sessions.append(known[0])
        return known

    def _find_asker(self, key: str, request: ChatRequest) -> OpenSession | None:
        """The session that a side request is about: a request for a title or a memory quotes the user's text."""
        text = "\n".join(content_text(one.get("content")) for one in request.messages if one["role"] == "user")
        latest = self._latest.get(key)
        if latest is None or auxiliary_reason(request, latest.task_instructions) is None:
            return None
        recent = itertools.islice(reversed(self._entries.values()), _LIKE)
        quoted = (one for one in recent if one.key == key and one.opening and one.opening in text)
        return next((one.session for one in quoted if one.session.ended is None), None)

    async def _best_match(
        self, candidates: list[OpenSession], request: ChatRequest, conversation: bytes
    ) -> OpenSession | None:
        """The session with the most replies of a conversation, or None if no session has any.

        Attempts at one task may begin with equal replies. Of sessions with equally many, one is taken whose last reply
        no request has continued yet.
        """
        matches = [(session, await self._turns.place(session, request)) for session in candidates]
        known = [
            (len(match.replies), entry)
            for session, match in matches
            if match.replies and (entry := self._entries.get(session.id)) is not None and session.ended is None
        ]
        if not known:
            return None
        _, entry = max(known, key=lambda one: (one[0], conversation not in one[1].gone_on))
        entry.gone_on.add(conversation)
        return entry.session

    def _opened(self, identity: Identity, request: ChatRequest, digest: str) -> OpenSession:
        prompt = digest_beginning(request.messages) if request.prompt is None else request.message_keys[0]
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
        """Remove a session that has ended."""
        entry = self._entries.pop(session.id, None)
        if entry is None:
            return
        likes = self._found[entry.key, entry.name]
        likes.remove(session)
        if not likes:
            del self._found[entry.key, entry.name]
        for conversation in entry.conversations:
            known = self._by_conversation[entry.key, conversation]
            known.remove(session)
            if not known:
                del self._by_conversation[entry.key, conversation]
        for one in entry.minted:
            self._minted.pop((entry.key, one), None)
        if self._latest.get(entry.key) is session:
            del self._latest[entry.key]
        if session.endpoint_replies.read(session.recorder.turns):
            self._ended.appendleft((entry.key, session.endpoint_replies))

    async def end_idle(self, finish: "Callable[[str, Ending], Any]", idle_s: float) -> None:
        """Finish sessions without a request for `idle_s`, without a reward. Runs as long as the gateway."""
        while True:
            await asyncio.sleep(idle_s / _LOOKS_PER_IDLE)
            now = time.monotonic()
            for session in [entry.session for entry in self._entries.values()]:
                if not session.is_busy and now - session.used_at > idle_s:
                    # The replies are on the tape, so it does not wait for clients that do not read them.
                    ending = Ending(reason=f"no request for {idle_s:g} s", samples=False, drain_s=0)
                    with contextlib.suppress(RolltapeError):  # another request has just ended it
                        await finish(session.id, ending)

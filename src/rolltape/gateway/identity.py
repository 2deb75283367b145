"""The identity of a request to an open gateway (`--open`): its session, its task, and the number of its attempt.

A request names its session in headers (`x-rolltape-session`, `x-rolltape-task`, …), in its path
(`/with/session=a,task=b/v1/…`) or in its body's `metadata` (`rolltape_session`, …). Otherwise it is recognized by the
beginning of its conversation, by the model's replies in it, and by the ids of these replies.
"""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec

from rolltape.errors import BadRequest
from rolltape.gateway.request import ChatRequest
from rolltape.gateway.sessions import SessionSpec, key_digest
from rolltape.records.ids import group_id, rollout_id
from rolltape.records.messages import canonical_message, content_text
from rolltape.tape.recording.tape import Tape
from rolltape.tape.run import Run

_SESSION_HEADERS = ("x-session-id", "session-id")  # of verifiers and of Codex
_FIELDS = ("session", "task", "step", "attempt", "group", "split", "source", "tags")
_MOST_TEXT = 512  # characters of one of them
_COUNTED = 10_000  # groups whose attempts are counted in memory; others are looked up on the tape


class Identity(NamedTuple):
    """The session and the rollout that a request names; None for what it does not name."""

    session: str | None = None
    task: str | None = None
    step: int = 0
    attempt: int | None = None
    group: str | None = None
    split: str | None = None
    source: str | None = None
    tags: tuple[str, ...] = ()


def read_identity(headers: Mapping[str, str], path: str | None, metadata: Mapping[str, Any] | None) -> Identity:
    """Read the identity from headers, path and metadata; the first has precedence. Raises BadRequest if invalid."""
    in_path = _read_path(path) if path else {}
    found: dict[str, str] = {}
    for field in _FIELDS:
        given = [headers.get(f"x-rolltape-{field}"), in_path.get(field), (metadata or {}).get(f"rolltape_{field}")]
        if field == "session":
            given += [headers.get(name) for name in _SESSION_HEADERS]
        value = next((one for one in given if one not in (None, "")), None)
        if value is None:
            continue
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        if len(text) > _MOST_TEXT:
            raise BadRequest(f"x-rolltape-{field} has {len(text)} characters; give at most {_MOST_TEXT}")
        if not text.isprintable():
            raise BadRequest(f"x-rolltape-{field} is {text[:40]!r}; give printable characters")
        found[field] = text
    step, attempt = (_count(found.pop(field, None), field) for field in ("step", "attempt"))
    tags = tuple(tag.strip() for tag in found.pop("tags", "").split(",") if tag.strip())
    return Identity(**found, step=step or 0, attempt=attempt, tags=tags)


def _read_path(path: str) -> dict[str, str]:
    """The pairs of a path's `session=a,task=b`, whose values are percent-encoded."""
    found: dict[str, str] = {}
    for pair in path.split(","):
        name, equals, value = pair.partition("=")
        if not equals or name not in _FIELDS or name in found:
            raise BadRequest(
                f"/with/{path[:80]}: {pair[:40]!r} is not NAME=VALUE; names are {', '.join(_FIELDS)}, once each"
            )
        found[name] = unquote(value)
    return found


def _count(text: str | None, field: str) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or len(text) > 15:
        raise BadRequest(f"x-rolltape-{field} is {text[:40]!r}; give a whole number")
    return int(text)


def contradictions(identity: Identity, spec: SessionSpec) -> tuple[str, ...]:
    """What a request names differently from its session, which keeps what it was opened with."""
    opened_with = {
        "task": spec.task_id,
        "step": spec.step,
        "attempt": spec.attempt,
        "split": spec.split,
        "source": spec.source,
    }
    given = {field: getattr(identity, field) for field in opened_with if getattr(identity, field)}
    return tuple(
        f"x-rolltape-{field} {ascii(value)[:80]}: the session was opened with {ascii(opened_with[field])[:80]}"
        for field, value in given.items()
        if value != opened_with[field]
    )


def digest_beginning(messages: Sequence[Mapping[str, Any]]) -> bytes:
    """A digest of the messages before the first reply of a conversation."""
    digest = blake2b(digest_size=16)
    for message in itertools.takewhile(lambda one: one["role"] != "assistant", messages):
        digest.update(msgspec.json.encode(canonical_message(message)))  # cache marks move, and turn a text into parts
    return digest.digest()


def first_user_text(request: ChatRequest) -> str:
    """The text of a conversation's first user message."""
    texts = (content_text(message.get("content")) for message in request.messages if message["role"] == "user")
    return next(texts, "").strip()


def session_name(key: str | None, identity: Identity, request: ChatRequest) -> tuple[str, str | bytes]:
    """The API key and the name by which a session is found; a session that requests name is found with any key."""
    return ("", identity.session) if identity.session is not None else (key or "", digest_beginning(request.messages))


def digest_name(key: str, name: str | bytes) -> str:
    """The recorded digest of a session's name and the API key of its requests."""
    return key_digest(f"{key}\0{name if isinstance(name, str) else name.hex()}")


def digest_conversation(messages: Sequence[Mapping[str, Any]]) -> bytes:
    """A digest of a conversation: of its beginning, and of the model's texts and calls as clients send them back."""
    digest = blake2b(digest_beginning(messages), digest_size=16)
    for message in (one for one in messages if one["role"] == "assistant"):
        calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
        named = (f"{call.get('name')} {call.get('arguments')}" for call in calls)
        digest.update(msgspec.json.encode([content_text(message.get("content")), *named]))
    return digest.digest()


def minted_ids(message: Mapping[str, Any]) -> list[str]:
    """The ids of a message and its calls."""
    given = [message.get("id"), *(call.get("id") for call in message.get("tool_calls") or ())]
    return [one for one in given if isinstance(one, str) and one]


class Attempts:
    """Numbers the attempts of groups, continuing after those on the tape of any gateway of the run."""

    def __init__(self, tape: Tape, model: str) -> None:
        self._tape = tape
        self._model = model
        self._run: Run | None = None
        self._opening: asyncio.Future[Run] | None = None
        self._next: dict[str, int] = {}  # by group, for the latest groups

    async def prepare(self) -> None:
        """Index the run once, off the event loop. Afterwards `next` costs less than a thread."""
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
        # Check the journals too: other workers number the same group, and the index may be behind.
        while self._tape.next_try(rollout_id(name, **task, task=None, step=step, attempt=attempt)):
            attempt += 1
        self._next[group] = attempt + 1
        while len(self._next) > _COUNTED:
            del self._next[next(iter(self._next))]
        return attempt

"""Messages: stored as they came, compared in a canonical form, and chained into conversations."""

import enum
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Any, Self

import msgspec

from rolltape.errors import NotJsonError, RecordError
from rolltape.records.jsonable import canonical_json, decode_json, encode_with_text_keys, is_deep, parse_strict


class Role(enum.StrEnum):
    """Who speaks. `developer` is `system` under another name, and compares equal to it."""

    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


# Fields that name a message on the wire or hint at caching, and are no part of what the model reads.
_WIRE_ONLY = frozenset({"id", "tool_call_id", "cache_control", "index", "status", "annotations"})
_MARKS = frozenset({"cache_control"})
_PART_IDS = frozenset({"id", "tool_use_id", "tool_call_id"})
_ROLES = {role.value: role for role in Role}
_DEEPEST_ARGUMENTS = 199  # levels; what is nested deeper is compared as text


class _WithRole(msgspec.Struct, gc=False):
    """The part of a message that is decoded at once."""

    role: Role


_decode_role = msgspec.json.Decoder(_WithRole).decode


class Message:
    """One message, snapshotted as JSON bytes when it is made; later changes by the caller do not reach it."""

    __slots__ = ("__dict__", "digest", "raw", "repaired", "role")

    def __init__(self, raw: bytes, role: Role, repaired: bool = False) -> None:
        self.raw = raw
        self.role = role
        self.repaired = repaired
        self.digest = blake2b(raw, digest_size=16).digest()

    @classmethod
    def snapshot(cls, value: object, where: str) -> Self:
        """Check and encode a caller's message; `where` names it in errors."""
        if isinstance(value, cls):
            return value
        if type(value) is not dict and not isinstance(value, Mapping):
            raise RecordError(f"{where} is a {type(value).__name__}; give an object with a role")
        role = value.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise RecordError(f"{where} has the role {role!r}; known are {', '.join(_ROLES)}")
        plain = value if type(value) is dict else dict(value)
        raw, repaired = encode_with_text_keys(plain, where)
        return cls(raw, _ROLES[role], repaired)

    @classmethod
    def stored(cls, raw: bytes) -> Self:
        """A message as read back from a tape."""
        try:
            role = _decode_role(raw).role
        except msgspec.DecodeError as error:
            raise NotJsonError(f"a stored message cannot be read: {error}") from None
        return cls(raw, role)

    def to_dict(self) -> dict[str, Any]:
        """The message as it came; a fresh dict on every call."""
        value: dict[str, Any] = decode_json(self.raw)
        return value

    @cached_property
    def canonical(self) -> bytes:
        """A digest under which messages that mean the same to the model are equal."""
        return _digest(canonical_json(canonical_message(self.to_dict())))

    @cached_property
    def canonical_with_ids(self) -> bytes:
        """As `canonical`, for models that sample and render tool-call ids themselves (Kimi K2)."""
        return _digest(canonical_json(canonical_message(self.to_dict(), keep_ids=True)))

    @cached_property
    def wire_ids(self) -> frozenset[str]:
        """The ids that this message carries for itself and its tool calls: an echo repeats them."""
        value = self.to_dict()
        found = [value.get("id"), *(call.get("id") for call in message_calls(value))]
        return frozenset(item for item in found if isinstance(item, str) and item)

    @property
    def text(self) -> str:
        """The readable content, parts joined, without tool calls and reasoning."""
        return content_text(self.to_dict().get("content"))

    @property
    def reasoning(self) -> str:
        """The thinking that came with the message, or ""."""
        return reasoning_text(self.to_dict())

    def __repr__(self) -> str:
        return f"Message({self.raw.decode()})"


class Root:
    """Tools and template options: part of every prompt, and so the start of every conversation's chain."""

    __slots__ = ("digest", "raw", "raw_digest")

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.raw_digest = _digest(raw)
        value = decode_json(raw)
        meaning = {key: _without_marks(item) for key, item in value.items() if item}
        self.digest = _digest(canonical_json(meaning))

    @classmethod
    def snapshot(cls, tools: object, template_options: Mapping[str, Any] | None, where: str) -> Self:
        """Check and encode a caller's tools (a list of objects, or None) and template options."""
        if tools is not None and not (
            isinstance(tools, Sequence) and not isinstance(tools, str) and all(isinstance(t, Mapping) for t in tools)
        ):
            raise RecordError(f"{where}: tools must be a list of objects, not {type(tools).__name__}")
        if template_options is not None and not isinstance(template_options, Mapping):
            raise RecordError(f"{where}: template_options is a {type(template_options).__name__}; give a mapping")
        value = {"tools": tools, "template_options": template_options}
        return cls(encode_with_text_keys(value, f"{where}: tools or template options")[0])

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """The tools as they came, or None if none were given."""
        tools: list[dict[str, Any]] | None = decode_json(self.raw).get("tools")
        return tools

    @property
    def template_options(self) -> dict[str, Any] | None:
        """The chat template's options as they came, or None if none were given."""
        options: dict[str, Any] | None = decode_json(self.raw).get("template_options")
        return options


def canonical_message(value: Mapping[str, Any], keep_ids: bool = False) -> dict[str, Any]:
    """The meaning of a message: without wire ids, cache marks and empty fields, and with arguments as objects."""
    dropped = _WIRE_ONLY - {"id", "tool_call_id"} if keep_ids else _WIRE_ONLY
    meaning: dict[str, Any] = {}
    for key, item in value.items():
        if key in dropped:
            continue
        if key == "role":
            meaning["role"] = "system" if item == "developer" else item
        elif key == "content":
            meaning["content"] = _canonical_content(item, keep_ids)
        elif key == "tool_calls" and isinstance(item, list):
            meaning["tool_calls"] = [_canonical_call(call, keep_ids) for call in item]
        elif key in ("reasoning", "reasoning_content"):
            meaning["reasoning_content"] = meaning.get("reasoning_content") or item
        else:
            meaning[key] = item
    return {key: item for key, item in meaning.items() if item is not None and item != [] and item != ""}


def _canonical_content(content: object, keep_ids: bool) -> object:
    if not isinstance(content, list):
        return content
    parts = [_without_marks(part, keep_ids) for part in content]
    if len(parts) == 1 and isinstance(parts[0], dict) and parts[0].keys() == {"type", "text"}:
        return parts[0]["text"]
    return parts


def _without_marks(value: object, keep_ids: bool = True) -> object:
    """A value without cache marks and empty fields and, unless `keep_ids`, without the ids that link parts."""
    if isinstance(value, list):
        return [_without_marks(item, keep_ids) for item in value]
    if not isinstance(value, dict):
        return value
    dropped = _MARKS if keep_ids else _MARKS | _PART_IDS
    return {k: _without_marks(item, keep_ids) for k, item in value.items() if k not in dropped and item is not None}


def _canonical_call(call: object, keep_ids: bool) -> object:
    if not isinstance(call, dict):
        return call
    function, custom = call.get("function"), call.get("custom")
    inner: dict[str, Any] = function if isinstance(function, dict) else custom if isinstance(custom, dict) else call
    meaning = {key: item for key, item in inner.items() if key not in ("id", "index", "type", "cache_control")}
    if "arguments" in inner or inner is function:
        meaning["arguments"] = _canonical_arguments(inner.get("arguments"))
    return {"id": call.get("id"), **meaning} if keep_ids else meaning


def _canonical_arguments(arguments: object) -> object:
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    if not arguments.strip():
        return {}
    try:
        value = parse_strict(arguments)
    except (ValueError, RecursionError):
        # A malformed call keeps the text that the model wrote.
        return arguments
    return arguments if is_deep(value, _DEEPEST_ARGUMENTS) else value


def message_calls(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tool calls of a message that are objects: a message may have anything there."""
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []


def call_parts(call: Mapping[str, Any]) -> tuple[Any, Any]:
    """The name and the arguments of a tool call: of a function, of a custom tool, or without an object around them."""
    inner = next((call[kind] for kind in ("function", "custom") if isinstance(call.get(kind), Mapping)), call)
    return inner.get("name"), inner.get("arguments", inner.get("input"))


def content_text(content: object) -> str:
    """The text of a content field: a string, or the text parts of a list joined."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = (part.get("text") if isinstance(part, dict) else part for part in content)
        return "".join(str(text) for text in texts if text is not None)
    return ""


def reasoning_text(message: Mapping[str, Any]) -> str:
    """The thinking that came with a message, or ""."""
    return content_text(message.get("reasoning_content") or message.get("reasoning"))


class MessageChain:
    """An immutable conversation: `parent[:keep]` followed by `own`. Sharing a parent only saves space."""

    __slots__ = ("keep", "own", "parent")

    parent: Self | None
    keep: int
    own: tuple[Message, ...]

    def __init__(self, own: Sequence[Message], parent: Self | None = None, keep: int = 0) -> None:
        while parent is not None and keep <= parent.keep:
            parent = parent.parent
        self.parent = parent
        self.keep = keep if parent is not None else 0
        self.own = tuple(own)

    def __len__(self) -> int:
        return self.keep + len(self.own)

    def backwards(self) -> Iterator[Message]:
        """Every message, last one first."""
        limit = len(self)
        link: MessageChain | None = self
        while link is not None:
            yield from reversed(link.own[: max(limit - link.keep, 0)])
            limit = min(limit, link.keep)
            link = link.parent

    def to_list(self) -> list[Message]:
        """Every message in order."""
        messages = list(self.backwards())
        messages.reverse()
        return messages

    def last(self) -> Message | None:
        """The last message, or None for an empty conversation."""
        return next(self.backwards(), None)


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()

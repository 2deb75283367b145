"""Shared by dialects: read a request's key, headers and fields, build messages in chat form, write server-sent events.

A request is read field by field; a wrong value is a BadRequest that names its JSON path. Images, documents and audio
become text in chat form.
"""

import codecs
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import msgspec

from rolltape.errors import BadRequest
from rolltape.gateway.request import ChatRequest
from rolltape.records.jsonable import decode_json, encode_json, is_deep, parse_strict, shown

# Python's JSON parsers block all other threads. Text of 32 MiB has fewer of these signs, and takes 0.1 s to parse.
_MOST_SIGNS = {b"[{": 200_000, b",": 3_000_000}
_CHUNK_BYTES = 2**18
_DEEPEST = 150  # levels, less than a record may have
_NAMED = 16  # unread fields
_LARGEST = sys.float_info.max
_PART = 2**16  # bytes decoded at once, before other threads may run
_MOST_LENIENT = 8 * 2**20  # bytes: lenient reading takes ten times as long, and mostly blocks other threads
_MOST_BETAS = 16
# Readers that split lines as str.splitlines does (httpx's iter_lines) break an event at these characters. JSON has them
# only within strings, where an escape means the same.
_BREAKS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))
SIGNATURE = "rolltape_"  # before the id of a reply, in signatures that clients send back
_HOLDERS = ("image_url", "video_url", "input_audio", "file", "source")  # the fields of a part that hold the medium
_CONTENTS = ("url", "image_url", "file_data", "data", "file_url")
_NAMES = ("filename", "title", "file_id")
_SHOWN = 80  # characters of a name, a type or an address
_T = TypeVar("_T")

Message = dict[str, Any]
Part = dict[str, Any]


class Fields:
    """An object of a request. It keeps track of the fields that were read, so that unread ones can be listed.

    A null counts as a missing field. Each method that reads a field raises BadRequest for a value of another type.
    """

    __slots__ = ("_read", "ignored_params", "media", "path", "value")

    def __init__(self, value: object, path: str, body: "Fields | None" = None) -> None:
        if not isinstance(value, dict):
            raise BadRequest(f"{path or 'the body'} is {shown(value)}; give an object")
        self.value: dict[str, Any] = value
        self.path = path
        # All objects of one body share these two lists.
        self.ignored_params: list[str] = [] if body is None else body.ignored_params
        self.media: list[str] = [] if body is None else body.media  # paths of images and the like
        self._read: set[str] = set()

    def at(self, name: str) -> str:
        """The path of a field, as errors name it: `messages[3].content`."""
        return f"{self.path}.{name}" if self.path else name

    def refuse(self, name: str, wanted: str) -> NoReturn:
        """Raise the BadRequest for a field, with its value and what it should be."""
        if self.value.get(name) is None:
            raise BadRequest(f"{self.at(name)} is missing; {wanted}")
        raise BadRequest(f"{self.at(name)} is {shown(self.value[name])}; {wanted}")

    def get(self, name: str) -> Any:
        """A field of any type."""
        self._read.add(name)
        return self.value.get(name)

    def skip(self, *names: str) -> None:
        """Count fields as read whose values do not matter here."""
        self._read.update(names)

    def unread(self) -> list[str]:
        """The names of the given fields that were not read."""
        return [name for name, value in self.value.items() if value is not None and name not in self._read]

    def ignore(self, what: str) -> None:
        """Add an entry to `ChatRequest.ignored_params`: a field, and what is done instead."""
        self.ignored_params.append(what)

    def all_ignored(self, *harmless: str) -> tuple[str, ...]:
        """All entries, including the unread fields of this object except `harmless` ones."""
        self.skip(*harmless)
        self.ignore_unread()
        return tuple(dict.fromkeys(self.ignored_params))

    def ignore_unread(self) -> None:
        """List the unread fields: at most 16, in a form that a header can hold."""
        names = [self.at(name) for name in self.unread()]
        for name in names[:_NAMED]:
            self.ignore(f"{printable(name)}: not known here; ignored")
        if len(names) > _NAMED:
            self.ignore(f"{len(names) - _NAMED} more fields: ignored")

    def _maybe(self, name: str, kind: type[_T], wanted: str) -> _T | None:
        value = self.get(name)
        return value if value is None or isinstance(value, kind) else self.refuse(name, wanted)

    def maybe_text(self, name: str) -> str | None:
        return self._maybe(name, str, "give a text")

    def text(self, name: str) -> str:
        """A required text, which may be empty."""
        value = self.maybe_text(name)
        return self.refuse(name, "give a text") if value is None else value

    def name(self, name: str = "name") -> str:
        """A required text that is not empty."""
        return self.text(name) or self.refuse(name, "give a text that is not empty")

    def maybe_flag(self, name: str) -> bool | None:
        return self._maybe(name, bool, "give true or false")

    def maybe_number(self, name: str, least: float = -_LARGEST, most: float = _LARGEST) -> float | None:
        """A number within bounds."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            self.refuse(name, f"give a number{_bounds(least, most)}")
        return float(value)

    def maybe_whole(self, name: str, least: int = -(2**63), most: int = 2**63 - 1) -> int | None:
        """An integer within bounds; `5.0` counts as one."""
        value = self.maybe_number(name)
        if value is None:
            return None
        given = self.value[name]
        if not value.is_integer() or not least <= given <= most:
            self.refuse(name, f"give a whole number{_bounds(least, most)}")
        return int(given)

    def maybe_one_of(self, name: str, *known: str) -> str | None:
        value = self.maybe_text(name)
        if value is not None and value not in known:
            self.refuse(name, f"known are {', '.join(known)}")
        return value

    def maybe_list(self, name: str) -> list[Any] | None:
        return self._maybe(name, list, "give a list")

    def maybe_texts(self, name: str) -> list[str] | None:
        """A list of texts."""
        values = self.maybe_list(name)
        for index, value in enumerate(values or ()):
            if not isinstance(value, str):
                raise BadRequest(f"{self.at(name)}[{index}] is {shown(value)}; give a text")
        return values

    def maybe_object(self, name: str) -> "Fields | None":
        value = self.get(name)
        return None if value is None else Fields(value, self.at(name), self)

    def object(self, name: str) -> "Fields":
        """A required object."""
        return self.maybe_object(name) or self.refuse(name, "give an object")

    def maybe_objects(self, name: str) -> "list[Fields] | None":
        """A list of objects."""
        values = self.maybe_list(name)
        if values is None:
            return None
        return [Fields(value, f"{self.at(name)}[{index}]", self) for index, value in enumerate(values)]

    def maybe_content(self, name: str, wanted: str) -> "str | list[Fields] | None":
        """A text, or a list of objects."""
        value = self.get(name)
        if value is None or isinstance(value, str):
            return value
        return self.objects(name) if isinstance(value, list) else self.refuse(name, wanted)

    def maybe_stops(self, name: str) -> tuple[str, ...] | None:
        """Stop strings, none of them empty."""
        stops = self.maybe_texts(name)
        if stops and "" in stops:
            self.refuse(name, "give texts that are not empty")
        return tuple(stops) if stops else None

    def objects(self, name: str) -> "list[Fields]":
        """A required list of objects."""
        values = self.maybe_objects(name)
        return self.refuse(name, "give a list of objects") if values is None else values


def read_body(body: bytes) -> tuple[Fields, bool]:
    """A body's object, and whether invalid Unicode was replaced in it."""
    try:
        value, repaired = msgspec.json.decode(body), False
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if len(body) > _MOST_LENIENT:
            raise BadRequest(f"the body is not JSON: {error}") from None
        value, repaired = _lenient(body)
    if is_deep(value, _DEEPEST):
        raise _too_deep()
    return Fields(value, ""), repaired


def check_structure(body: bytes) -> None:
    """Raise BadRequest for a body with more lists, objects and values than any conversation has."""
    if len(body) < _CHUNK_BYTES:
        return
    for signs, most in _MOST_SIGNS.items():
        found = 0
        for start in range(0, len(body), _CHUNK_BYTES):  # chunks let other threads run in between
            chunk = body[start : start + _CHUNK_BYTES]
            found += sum(chunk.count(sign) for sign in signs)
        if found > most:
            raise BadRequest(f"the body has {found:,} of {_shown(signs)}, and {most:,} are allowed; send less")


def _shown(signs: Sequence[int]) -> str:
    return " and ".join(repr(chr(sign)) for sign in signs)


def _lenient(body: bytes) -> tuple[object, bool]:
    """Read as `msgspec` does, but replace invalid Unicode."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    parts = [decoder.decode(body[start : start + _PART]) for start in range(0, len(body), _PART)]
    text = "".join([*parts, decoder.decode(b"", final=True)])
    try:
        value = parse_strict(text)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if is_deep(value, _DEEPEST):
        raise _too_deep()
    raw, repaired = encode_json(value, "the body")
    return decode_json(raw), repaired or text.encode() != body


def _too_deep() -> BadRequest:
    return BadRequest(f"the body is nested more than {_DEEPEST} levels deep; flatten it")


def printable(text: str) -> str:
    """A client's text as short ASCII, for a header."""
    return ascii(text)[1:-1][:80]


def _bounds(least: float, most: float) -> str:
    lower = f" of at least {least:g}" if abs(least) < 2**63 - 1 else ""
    upper = f" of at most {most:g}" if abs(most) < 2**63 - 1 else ""
    return f"{lower}{' and' if lower and upper else ''}{upper}"


def function_tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """A tool in chat form; None values are left out."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {field: value for field, value in function.items() if value is not None}}


def parse_arguments(arguments: str) -> dict[str, Any] | None:
    """The arguments of a call, or None if they are no JSON object."""
    try:
        value = parse_strict(arguments)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def plain_content(parts: list[Part]) -> str | list[Part]:
    """The content of a message: a single plain text part becomes its text."""
    return str(parts[0]["text"]) if len(parts) == 1 and parts[0].keys() == {"type", "text"} else parts


def user_messages(
    parts: Iterable[Fields], read_result: Callable[[Fields], Message | None], read_text: Callable[[Fields], Part]
) -> list[Message]:
    """A tool message for each result, and a user message for each run of other parts, in the order of the parts."""
    messages: list[Message] = []
    for part in parts:
        if (result := read_result(part)) is not None:
            messages.append(result)
        elif messages and messages[-1]["role"] == "user":
            messages[-1]["content"].append(read_text(part))
        else:
            messages.append({"role": "user", "content": [read_text(part)]})
    return messages


def assistant_message(
    content: str | list[Part], reasoning: str, signatures: Sequence[str], **fields: list[Any]
) -> Message:
    """An assistant's message without empty fields. A signature written by the gateway identifies the reply."""
    ours = [one for one in signatures if one.startswith(SIGNATURE)]
    given = {
        "id": ours[0].removeprefix(SIGNATURE) if ours else None,
        "reasoning_content": reasoning,
        "thinking_signatures": [one for one in signatures if one and one not in ours],
        **fields,
    }
    return {"role": "assistant", "content": content or None} | {name: value for name, value in given.items() if value}


def media_part(part: Fields, kind: str) -> Part:
    """The text part in place of a medium, with its kind, type and size. The medium is kept beside the text."""
    part.media.append(part.path)
    kept = kept_medium(part)
    return {"type": "text", "text": f"[{_description(kind, kept)}; this model reads text only]", "media": kept}


def kept_medium(part: Fields) -> dict[str, Any]:
    """A medium as it is recorded: without the cache mark, which moves from turn to turn."""
    return {name: value for name, value in part.value.items() if value is not None and name != "cache_control"}


def _description(kind: str, part: dict[str, Any]) -> str:
    holder = next((part[name] for name in _HOLDERS if part.get(name) is not None), part)
    held: dict[str, Any] = part | holder if isinstance(holder, dict) else part
    content = next((held[name] for name in _CONTENTS if isinstance(held.get(name), str)), "")
    media_type = held.get("media_type") or held.get("format")
    name = next((held[one] for one in _NAMES if isinstance(held.get(one), str)), None)
    facts = [name]
    if content.startswith(("http:", "https:")):
        facts += [media_type, content]
    elif content:
        head, comma, data = content.partition(",") if content.startswith("data:") else ("", "", content)
        size = len(data.rstrip("=")) * 3 // 4
        facts += [head.removeprefix("data:").partition(";")[0] if comma else media_type, f"{size:,} bytes"]
    texts = [one[:_SHOWN] for one in facts if isinstance(one, str) and one]
    return f"{kind}: {', '.join(texts)}" if texts else kind


def key_in(headers: Mapping[str, str], *names: str) -> str | None:
    """The bearer token of a request, or else the key in one of these headers, or None."""
    given = headers.get("Authorization", "")
    if given[:7].lower() == "bearer ":
        return given[7:].strip()
    return next((headers[name] for name in names if name in headers), None)


def with_headers(
    request: ChatRequest, headers: Mapping[str, str], betas: str, harmless: Collection[str]
) -> ChatRequest:
    """A request with the facts from its headers: its client, and the betas that are ignored."""
    names = [one.strip() for one in headers.get(betas, "").split(",") if one.strip()]
    ignored = [f"{betas} {printable(one)}: ignored" for one in names if not one.startswith(tuple(harmless))]
    ignored_params = tuple(dict.fromkeys((*request.ignored_params, *ignored[:_MOST_BETAS])))
    return msgspec.structs.replace(request, client=headers.get("User-Agent", ""), ignored_params=ignored_params)


def event(data: bytes, name: str | None = None) -> bytes:
    """One event; `data` is JSON (or a word such as `[DONE]`) on a single line."""
    for char, escape in _BREAKS:
        data = data.replace(char, escape)
    head = b"" if name is None else b"event: %s\n" % name.encode()
    return b"%sdata: %s\n\n" % (head, data)

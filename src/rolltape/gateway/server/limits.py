"""Limits of a request: of its body's size, time and structure, however it is encoded, of its prompt, and of the time
in which its client takes nothing of the reply.

What is too large is refused before it costs anything: a prompt's tokens are estimated from samples of its text.
"""

import asyncio
import logging
import random
import zlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Self

import msgspec
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from rolltape.errors import BadRequest, BodyTimeout, PromptTooLong
from rolltape.gateway.request import INLINE_BYTES, ChatRequest
from rolltape.gateway.settings import GatewaySettings
from rolltape.records.messages import content_text

log = logging.getLogger("rolltape.gateway")

# Python's JSON parsers keep all other threads waiting. Text of 32 MiB has fewer of these signs, and takes them 0.1 s.
_MOST_SIGNS = {b"[{": 200_000, b",": 3_000_000}
_CHUNK = 2**18
_PACKED = 2**16
_GZIP = 16 + zlib.MAX_WBITS

_CHEAP = 100_000  # characters, which are tokenized in some hundredths of a second
_CHARACTERS_A_TOKEN = 4  # of a text that is not looked at closely: at most four times the context is tokenized
_FAR = 2  # times the context: a prompt between the two ends its reply with `length`, as any that leaves no room
_MOST_STOPS = 64  # stop strings: each is looked for at every token
_MOST_BESIDES = 256 * 1024  # bytes of a field that is no part of the prompt: engine and tape are given it each turn
_WINDOWS, _WINDOW = 32, 256  # stretches of the text that are tokenized, and their characters

_LOOKS_PER_STALL = 4

# Runs long work off the event loop.
OffLoop = Callable[..., Awaitable[bytes]]


async def read_body(request: web.Request, settings: GatewaySettings, run: OffLoop) -> bytes:
    """The body, decompressed by `run`; raises HTTPRequestEntityTooLarge, BodyTimeout, or BadRequest.

    The application leaves bodies as they come. So one that cannot be decompressed has been read to its end, and the
    next request of its connection is found.
    """
    most = settings.max_body_mib * 2**20
    try:
        async with asyncio.timeout(settings.body_s):
            parts, size = await _parts(request, most)
    except TimeoutError:
        raise BodyTimeout(f"the body had not come within {settings.body_s:g} s; send it again") from None
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding in ("", "identity"):
        return b"".join(parts) if size < INLINE_BYTES else await run(b"".join, parts)
    return await run(unpack, b"".join(parts), encoding, most)


async def _parts(request: web.Request, most: int) -> tuple[list[bytes], int]:
    parts, size = [], request.content_length or 0
    if size <= most:
        size = 0
        async for part in request.content.iter_any():
            parts.append(part)
            size += len(part)
            if size > most:
                break
    if size > most:
        raise web.HTTPRequestEntityTooLarge(max_size=most, actual_size=size)
    return parts, size


def unpack(raw: bytes, encoding: str, most: int) -> bytes:
    """Decompress a body of at most so many bytes. It stops there: what a few bytes expand to is not made first."""
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise BadRequest(f"Content-Encoding is {encoding[:40]!r}; send gzip, deflate, or the body as it is")
    parts: list[bytes] = []
    room = most
    try:
        for part in _unpacked(raw, encoding):
            parts.append(part)
            room -= len(part)
            if room < 0:
                raise web.HTTPRequestEntityTooLarge(max_size=most, actual_size=most - room)
    except zlib.error as error:
        raise BadRequest(f"the body cannot be read: its headers say {encoding}: {error}") from None
    return b"".join(parts)


def _unpacked(raw: bytes, encoding: str) -> Iterator[bytes]:
    """Parts of what was compressed, none of them large. A gzip may consist of several."""
    # By the standard `deflate` has zlib's header, and some clients leave it out.
    bits = zlib.MAX_WBITS if raw[:1] and raw[0] & 0xF == zlib.DEFLATED else -zlib.MAX_WBITS
    unpacker = None
    for start in range(0, len(raw), _PACKED):
        rest = raw[start : start + _PACKED]
        while rest:
            if unpacker is None:
                unpacker = zlib.decompressobj(bits if encoding == "deflate" else _GZIP)
            yield unpacker.decompress(rest, _CHUNK)
            rest = unpacker.unused_data if unpacker.eof else unpacker.unconsumed_tail
            if unpacker.eof:
                unpacker = None
    if unpacker is not None:
        raise zlib.error("it is cut short")


def check_structure(body: bytes) -> None:
    """Raise BadRequest for a body with more lists, objects and values than any conversation has."""
    if len(body) < _CHUNK:
        return
    for signs, most in _MOST_SIGNS.items():
        found = 0
        for start in range(0, len(body), _CHUNK):  # other threads may run in between
            chunk = body[start : start + _CHUNK]
            found += sum(chunk.count(sign) for sign in signs)
        if found > most:
            raise BadRequest(f"the body has {found:,} of {_shown(signs)}, and {most:,} are allowed; send less")


def _shown(signs: Sequence[int]) -> str:
    return " and ".join(repr(chr(sign)) for sign in signs)


def check_request_size(ask: ChatRequest, max_messages: int, context: int | None, count: Callable[[str], int]) -> None:
    """Raise BadRequest for too many messages or too much besides, PromptTooLong for a prompt far beyond the context.

    `count` counts the tokens of a text; it is given samples of the request's.
    """
    if len(ask.messages) > max_messages:
        raise BadRequest(f"messages: there are {len(ask.messages):,}, and {max_messages:,} are allowed; send fewer")
    _check_besides(ask)
    if context is None:
        return
    given = len(ask.prompt.ids or ()) if ask.prompt is not None else 0
    if given > _FAR * context:
        raise PromptTooLong(
            f"prompt is too long: {given:,} tokens, and the maximum context length is {context:,}; send less"
        )
    texts = [text for text in _texts(ask) if text]
    characters = sum(map(len, texts))
    if characters <= max(context * _CHARACTERS_A_TOKEN, _CHEAP):
        return
    tokens = _estimate(texts, characters, count)
    if tokens > _FAR * context:
        raise PromptTooLong(
            f"prompt is too long: about {tokens:,} tokens, and the maximum context length is {context:,}; send less"
        )


def _check_besides(ask: ChatRequest) -> None:
    if len(ask.sampling.stop or ()) > _MOST_STOPS:
        count = len(ask.sampling.stop or ())
        raise BadRequest(f"stop strings: there are {count:,}, and {_MOST_STOPS} are allowed; send fewer")
    schema = ask.output_schema
    besides = {"metadata": ask.metadata, "stop strings": ask.sampling.stop, schema.field if schema else "": schema}
    for field, value in besides.items():
        size = len(msgspec.json.encode(value)) if value else 0
        if size > _MOST_BESIDES:
            raise BadRequest(f"{field}: {size:,} bytes, and {_MOST_BESIDES:,} are allowed; send less")


def _texts(ask: ChatRequest) -> Iterator[str]:
    """What of a request becomes part of the prompt."""
    if ask.prompt is not None:
        yield ask.prompt.text or ""
    for message in ask.messages:
        yield content_text(message.get("content"))
        if message["role"] == "assistant":
            yield content_text(message.get("reasoning_content"))
            for call in message.get("tool_calls") or ():
                yield content_text(call["function"].get("arguments"))
    if ask.tools:
        yield msgspec.json.encode(ask.tools).decode()


def _estimate(texts: list[str], characters: int, count: Callable[[str], int]) -> int:
    """Tokens by the rate of windows at random places, so that no text can be written to look short."""
    sampled, tokens = 0, 0
    for text in random.choices(texts, [len(text) for text in texts], k=_WINDOWS):
        start = random.randrange(max(len(text) - _WINDOW, 0) + 1)
        window = text[start : start + _WINDOW]
        sampled += len(window)
        tokens += count(window)
    return round(characters * tokens / sampled)


def drain_all(http: web.Request) -> None:
    """Have a write return when all of it is out of this process, however large it is."""
    if http.transport is not None:
        http.transport.set_write_buffer_limits(0)


class StallWatch:
    """Drops the connection if, within a `with` block, its client takes nothing for `stall_s` of what was written.

    A write that waits for that client then returns or raises, and its connection is seen to be closed.
    """

    def __init__(self, http: web.Request, writer: AbstractStreamWriter | None, stall_s: float) -> None:
        assert writer is not None  # the response is not sent yet
        self._http = http
        self._writer = writer
        self._stall_s = stall_s
        self._loop = asyncio.get_running_loop()
        self._taken = -1  # bytes
        self._since = self._loop.time()

    def __enter__(self) -> Self:
        self._look_later()
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()

    def _look_later(self) -> None:
        self._timer = self._loop.call_later(self._stall_s / _LOOKS_PER_STALL, self._look)

    def _look(self) -> None:
        transport = self._http.transport
        if transport is None:
            return
        waiting, now = transport.get_write_buffer_size(), self._loop.time()
        taken = self._writer.output_size - waiting
        if not waiting or taken != self._taken:
            self._taken, self._since = taken, now
        elif now - self._since >= self._stall_s:
            log.warning("a client has taken nothing of its reply for %g s: its connection is closed", self._stall_s)
            transport.abort()
            return
        self._look_later()

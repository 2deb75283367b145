"""Read the body of a request within limits of size, time and structure, however it is encoded."""

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Iterator, Sequence

from aiohttp import web

from rolltape.errors import BadRequest, BodyTimeout
from rolltape.gateway.request import INLINE_BYTES
from rolltape.gateway.settings import GatewaySettings

# Python's JSON parsers keep all other threads waiting. Text of 32 MiB has fewer of these signs, and takes them 0.1 s.
_MOST_SIGNS = {b"[{": 200_000, b",": 3_000_000}
_CHUNK = 2**18
_PACKED = 2**16
_GZIP = 16 + zlib.MAX_WBITS

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

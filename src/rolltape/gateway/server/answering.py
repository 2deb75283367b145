"""What all HTTP routes share: bodies are read within limits, a client that reads nothing is dropped, and errors are
answered in the API's own form and logged without keys."""

import asyncio
import logging
import math
import re
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Self

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.typedefs import Middleware

from rolltape.errors import (
    BadRequest,
    BodyTimeout,
    EncodingUnsupported,
    EngineError,
    EngineFailed,
    GatewayError,
    RolltapeError,
)
from rolltape.gateway.peers import ServedElsewhere
from rolltape.gateway.request import INLINE_BYTES
from rolltape.gateway.server.guard import ADMIN
from rolltape.gateway.service import Service
from rolltape.gateway.settings import GatewaySettings
from rolltape.gateway.wire import DIALECTS, describe_routes, dialect_of, likely_path
from rolltape.gateway.wire.protocol import Dialect

gateway_log = logging.getLogger("rolltape.gateway")
log = logging.getLogger("rolltape.access")
http_log = logging.getLogger("rolltape.http")  # for connections whose requests cannot be parsed

# Set on a request for the answer and the log line if it fails.
DIALECT: web.RequestKey[Dialect] = web.RequestKey("dialect", Dialect)
SESSION: web.RequestKey[str] = web.RequestKey("session", str)

_KEY_IN_PATH = re.compile(r"^/+s/+[^/]+")
_KEY = re.compile(r"(rts|rta)-[\w-]{32,}")  # a session's or the gateway's, anywhere in a request

_PACKED = 2**16  # compressed bytes per call of zlib
_UNPACKED = 2**18  # at most so many decompressed bytes per call
_GZIP = 16 + zlib.MAX_WBITS

_LOOKS_PER_STALL = 4

# Runs long work off the event loop.
OffLoop = Callable[..., Awaitable[bytes]]
# Forwards a request to the gateway that serves its session.
Forward = Callable[[web.Request, ServedElsewhere], Awaitable[web.StreamResponse]]
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _hide_bytes(record: logging.LogRecord) -> bool:
    """Remove the bytes that aiohttp could not parse, since they may contain a key. Drop records of clients that left,
    which are logged elsewhere."""
    left = record.exc_info is not None and isinstance(record.exc_info[1], ConnectionResetError)
    record.exc_info = record.exc_text = None
    return not left


http_log.addFilter(_hide_bytes)


def answering_with(service: Service, forward: Forward) -> Middleware:
    """Middleware for every request: errors are answered in their API's form and logged, without keys."""

    async def answer(request: web.Request, handler: _Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ServedElsewhere as error:
            return await forward(request, error)

    @web.middleware
    async def answering(request: web.Request, handler: _Handler) -> web.StreamResponse:
        began = time.monotonic()
        status: int | str = "gone"
        why = ""
        try:
            response = await answer(request, handler)
            status = response.status
            return response
        except StreamFailed as error:
            status, why = error.status, f"sent within the stream: {error}"
            return error.response
        except web.HTTPException as error:
            status, why = error.status, error.reason
            if error.status < 400:
                raise
            if error.status == 413:
                why = f"the body is larger than {service.settings.max_body_mib} MiB, which is the gateway's limit"
            message = f"{why}: {request.method} {_path(request)}"
            if isinstance(error, web.HTTPNotFound):
                meant = likely_path(request.path)
                served = f"the model replies at {describe_routes()}"
                message += f"; {served if meant is None else f'change the base URL so that its clients ask at {meant}'}"
            if isinstance(error, web.HTTPMethodNotAllowed):
                message += f"; send {' or '.join(sorted(error.allowed_methods))}"
            return _refusal(request, error.status, message, final=True)
        except web.RequestPayloadError as error:  # cut short
            status, why = 400, f"the body cannot be read: {' '.join(str(error).split())}"
            return _refusal(request, status, why, final=True)
        except GatewayError as error:
            status, why = error.status, str(error)
            message = message_for_agent(error)
            response = _refusal(request, error.status, message, final=error.final, code=error.code)
            if error.retry_after_s is not None:
                response.headers["Retry-After"] = f"{math.ceil(error.retry_after_s)}"
            if isinstance(error, EncodingUnsupported):
                response.headers["Accept-Encoding"] = "gzip, deflate"
            return response
        except RolltapeError as error:
            status, why = 500, str(error)
            if not isinstance(error, EngineError):  # which says all: an engine could not load weights
                log.exception("%s %s", request.method, _shown(request))
            message = f"{type(error).__name__}: {error}" if request.get(ADMIN) else message_for_agent(error)
            return _refusal(request, 500, message, final=False)
        except (ConnectionResetError, asyncio.CancelledError):
            why = "the client disconnected"
            raise
        except Exception:
            status, why = 500, "see the traceback"
            log.exception("%s %s", request.method, _shown(request))
            return _refusal(request, 500, "the gateway failed; its log has the error", final=False)
        finally:
            took_s = time.monotonic() - began
            failed = not isinstance(status, int) or status >= 400
            if isinstance(status, int) and status >= 400:
                service.metrics.count("errors", str(status))
                if status < 500 and SESSION in request:  # a failure of the gateway is recorded with its turn
                    service.refused(request[SESSION], status, _without_keys(request, why))
            if failed or took_s > service.settings.slow_s:
                what, who = f"{request.method} {_shown(request)}", request.get(SESSION, "-")
                log.warning("%s %s %.1f s %s: %s", what, status, took_s, who, _without_keys(request, why))

    return answering


def _refusal(request: web.Request, status: int, message: str, *, final: bool, code: str | None = None) -> web.Response:
    dialect = request.get(DIALECT) or dialect_of(request.path, request.headers, request.query)
    headers = {"x-should-retry": "false"} if final else {}
    body = dialect.error(status, message, code, final=final)
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


def _shown(request: web.Request) -> str:
    """A request's path for the log. If no route matches, only words of routes are shown: others may be keys."""
    path = _path(request)
    if request.match_info.http_exception is None:
        return path
    known = {word for route in request.app.router.resources() for word in route.canonical.split("/")}
    return "/".join(word if word in known else "…" for word in path.split("/"))


def _path(request: web.Request) -> str:
    """A request's raw path, without a key in it."""
    return _without_keys(request, _KEY_IN_PATH.sub("/s/…", request.rel_url.raw_path))


def _without_keys(request: web.Request, text: str) -> str:
    """A text without the keys of a request, and without anything else that looks like a key of a gateway."""
    for key in {dialect.find_key(request.headers, request.query) for dialect in DIALECTS}:
        if key:
            text = text.replace(key, "…")
    return _KEY.sub(r"\1-…", text)


def message_for_agent(error: Exception) -> str:
    """The message of an error for the agent. Only the log and the turn have addresses of engines and local paths."""
    if isinstance(error, EngineFailed):
        return error.agent_message
    return str(error) if isinstance(error, GatewayError) else "the gateway failed; its log has the error"


class StreamFailed(GatewayError):
    """An error that was sent as the end of a stream."""

    def __init__(self, status: int, message: str, response: web.StreamResponse) -> None:
        super().__init__(message)
        self.status = status
        self.response = response


async def read_body(request: web.Request, settings: GatewaySettings, run: OffLoop) -> bytes:
    """The body, decompressed by `run`; raises HTTPRequestEntityTooLarge, BodyTimeout, EncodingUnsupported, BadRequest.

    The application does not decompress bodies. So a damaged body is read to its end, and the next request of its
    connection can be read.
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
    """Decompress a body to at most `most` bytes. It stops there, so that a small body cannot fill the memory."""
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise EncodingUnsupported(f"Content-Encoding is {encoding[:40]!r}; send gzip, deflate, or the body as it is")
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
    """Yield small parts of the decompressed body. A gzip may consist of several members."""
    # By the standard, `deflate` has zlib's header. Some clients leave it out.
    bits = zlib.MAX_WBITS if raw[:1] and raw[0] & 0xF == zlib.DEFLATED else -zlib.MAX_WBITS
    unpacker = None
    for start in range(0, len(raw), _PACKED):
        rest = raw[start : start + _PACKED]
        while rest:
            if unpacker is None:
                unpacker = zlib.decompressobj(bits if encoding == "deflate" else _GZIP)
            yield unpacker.decompress(rest, _UNPACKED)
            rest = unpacker.unused_data if unpacker.eof else unpacker.unconsumed_tail
            if unpacker.eof:
                unpacker = None
    if unpacker is not None:
        raise zlib.error("it is cut short")


def drain_all(http: web.Request) -> None:
    """Make each write wait until all its bytes have left this process."""
    if http.transport is not None:
        http.transport.set_write_buffer_limits(0)


class StallWatch:
    """Drops the connection if, within a `with` block, its client reads nothing for `stall_s` although bytes wait.

    A write that waits for that client then returns or raises, and its connection is closed.
    """

    def __init__(self, http: web.Request, writer: AbstractStreamWriter | None, stall_s: float) -> None:
        assert writer is not None  # the response has been prepared, but not sent
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
            gateway_log.warning(
                "a client has read nothing of its reply for %g s; the gateway closes the connection", self._stall_s
            )
            transport.abort()
            return
        self._look_later()

"""A client of few instructions: bodies made beforehand, over HTTP/1.1 connections that stay open."""

import asyncio
import re
from typing import Self, cast

_STATUS = re.compile(rb"HTTP/1\.1 (\d{3})")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_LAST_CHUNK = b"\r\n0\r\n\r\n"


class RawConnection(asyncio.Protocol):
    """One connection, for one request at a time."""

    def __init__(self) -> None:
        self._came = bytearray()
        self._answered: asyncio.Future[bytes] | None = None

    @classmethod
    async def open(cls, url: str) -> Self:
        host, _, port = url.removeprefix("http://").partition(":")
        _, connection = await asyncio.get_running_loop().create_connection(cls, host, int(port))
        return connection

    async def post(self, path: str, body: bytes, key: str = "") -> bytes:
        """The body of the answer, chunks with their sizes; raises RuntimeError unless it is a whole one with 200."""
        self._answered = asyncio.get_running_loop().create_future()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
        self._transport.write(
            f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        )
        return await self._answered

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are of a class of their own

    def connection_lost(self, error: Exception | None) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(RuntimeError(f"the connection was lost: {error} after {self._came[-300:]!r}"))

    def data_received(self, data: bytes) -> None:
        self._came += data
        end = self._came.find(b"\r\n\r\n")
        if end < 0 or self._answered is None:
            return
        head = bytes(self._came[:end])
        length = _LENGTH.search(head)
        if length is not None:
            is_whole = len(self._came) >= end + 4 + int(length[1])
        else:
            is_whole = bool(_CHUNKED.search(head)) and self._came.endswith(_LAST_CHUNK)
        if is_whole:
            status, body = _STATUS.match(head), bytes(self._came[end + 4 :])
            self._came.clear()
            answered, self._answered = self._answered, None
            if status is not None and status[1] == b"200":
                answered.set_result(body)
            else:
                answered.set_exception(RuntimeError(f"{head[:80]!r}: {body[:300]!r}"))

"""Connections of a port that several workers share: each goes to the worker whose session is asked for.

The first bytes of a request mostly hold a session's key, and a key names its worker. The connection itself is handed
over with them, through a Unix socket, so that nobody stands in between. A client that shares connections among sessions
so has them handed to and fro. What cannot be handed over is forwarded (see `forwarding`).
"""

import array
import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import Callable
from typing import cast

from aiohttp import web

from rolltape.gateway.peers import Peer
from rolltape.tape.journal.left_open import writer_tag

log = logging.getLogger("rolltape.gateway")

_KEY = re.compile(rb"rts-([0-9a-f]{8})[\w-]{32}")
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\n(transfer-encoding|upgrade):", re.IGNORECASE)
_MOST_BYTES = 2**17  # of a first read that is handed over; the system takes about 200 KB at once
_ONE_FD = array.array("i", [0]).itemsize


class SharedPort:
    """Accepts connections of a shared port, hands over those of other workers' sessions, and takes theirs."""

    def __init__(self, server: web.Server, own: Peer, find_worker: Callable[[str], Peer | None]) -> None:
        """`find_worker` gives the worker whose keys begin so; None: it is this one, or none."""
        self._server = server
        self._find_worker = find_worker
        self._own_tag = writer_tag(own.writer).encode()
        self._path = _path(own)
        self._sending = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sending.setblocking(False)
        self._taking = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._taking.setblocking(False)
        self._tasks: set[asyncio.Task[object]] = set()

    async def start(self, listener: socket.socket, backlog: int) -> None:
        """Take connections, from the listener and from other workers."""
        loop = asyncio.get_running_loop()
        self._taking.bind(self._path)
        loop.add_reader(self._taking.fileno(), self._take)
        self._listening = await loop.create_server(lambda: _Connection(self), sock=listener, backlog=backlog)

    def close(self) -> None:
        """Take no more."""
        self._listening.close()
        asyncio.get_running_loop().remove_reader(self._taking.fileno())
        self._taking.close()
        self._sending.close()

    def make_handler(self) -> web.RequestHandler:
        """What serves a connection here."""
        return self._server()

    def hand_over(self, transport: asyncio.Transport, data: bytes) -> bool:
        """Give a connection, on which these bytes begin a request, to the worker whose session they name."""
        key = _KEY.search(data.partition(b"\r\n\r\n")[0])
        if key is None or key[1] == self._own_tag or len(data) > _MOST_BYTES:
            return False
        worker = self._find_worker(key[1].decode())
        if worker is None:
            return False
        handle = array.array("i", [transport.get_extra_info("socket").fileno()])
        try:
            self._sending.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, handle)], 0, _path(worker))
        except OSError:  # it has died, or is not fast enough: its requests are forwarded
            return False
        transport.abort()  # the connection stays open: the other worker holds it
        return True

    def _take(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                data, ancillary, _, _ = self._taking.recvmsg(_MOST_BYTES, socket.CMSG_SPACE(_ONE_FD))
                for _, _, handles in ancillary:
                    (handle,) = array.array("i", handles[:_ONE_FD])
                    task = asyncio.ensure_future(self._serve_taken(socket.socket(fileno=handle), data))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)

    async def _serve_taken(self, connection: socket.socket, data: bytes) -> None:
        connection.setblocking(False)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: _Connection(self, data), connection)
        except OSError as error:
            log.warning("a connection that another worker had accepted cannot be served: %s", error)
            connection.close()


class _Connection(asyncio.Protocol):
    """A connection, served here until a request on it is for a session of another worker."""

    def __init__(self, port: SharedPort, data: bytes = b"") -> None:
        """`data` is what another worker has read, who handed the connection over."""
        self._port = port
        self._data = data
        self._handler: web.RequestHandler | None = None
        self._left: int | None = 0  # bytes of the current request that have not come; None: unknown from now on

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are of a class of their own
        if self._data:
            self._serve(self._data)

    def data_received(self, data: bytes) -> None:
        if not self._is_between_requests() or not self._port.hand_over(self._transport, data):
            self._serve(data)
        elif self._handler is not None:
            self._handler.connection_lost(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self._handler is not None:
            self._handler.connection_lost(error)

    def pause_writing(self) -> None:
        if self._handler is not None:
            self._handler.pause_writing()

    def resume_writing(self) -> None:
        if self._handler is not None:
            self._handler.resume_writing()

    def _serve(self, data: bytes) -> None:
        if self._left == 0:
            self._left = _request_bytes(data)
        if self._left is not None:  # more than a request has: the next one is on its way, and begins in here
            self._left = self._left - len(data) if self._left >= len(data) else None
        if self._handler is None:
            self._handler = self._port.make_handler()
            self._handler.connection_made(self._transport)
        self._handler.data_received(data)

    def _is_between_requests(self) -> bool:
        """Whether nothing of an earlier request is left here; what aiohttp has no public word for is its `_waiter`."""
        if self._handler is None:
            return True
        is_waiting = self._left == 0 and getattr(self._handler, "_waiter", None) is not None
        return is_waiting and not self._transport.get_write_buffer_size()


def _request_bytes(data: bytes) -> int | None:
    """The length of the request that begins so; None: nobody knows yet."""
    head, end, _ = data.partition(b"\r\n\r\n")
    if not end or _CHUNKED.search(head):
        return None
    length = _LENGTH.search(head)
    return len(head) + len(end) + (0 if length is None else int(length[1]))


def _path(peer: Peer) -> str:
    return f"{peer.socket}-fds"

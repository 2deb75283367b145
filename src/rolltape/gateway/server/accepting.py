"""Connections of a port that several workers share: each goes to the worker whose session it is for.

The first bytes of a connection mostly hold a session's key, and a key names its worker. The connection itself is handed
over with them, through a Unix socket, so that nobody stands in between. A later request on it for a session of yet
another worker is forwarded (see `forwarding`).
"""

import array
import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import cast

from aiohttp import web

from rolltape.gateway.peers import Peer

log = logging.getLogger("rolltape.gateway")

_KEY = re.compile(rb"rts-([0-9a-f]{8})[\w-]{32}")
_MOST_BYTES = 2**17  # of a first read that is handed over; the system takes about 200 KB at once
_ONE_FD = array.array("i", [0]).itemsize


class SharedPort:
    """Accepts connections of a shared port, hands over those of other workers' sessions, and takes theirs."""

    def __init__(self, server: web.Server, own: Peer, find_worker: Callable[[str], Peer | None]) -> None:
        """`find_worker` gives the live worker whose keys begin so; None: it is this one, or none."""
        self._server = server
        self._find_worker = find_worker
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
        self._listening = await loop.create_server(lambda: _Beginning(self), sock=listener, backlog=backlog)

    def close(self) -> None:
        """Take no more."""
        self._listening.close()
        asyncio.get_running_loop().remove_reader(self._taking.fileno())
        self._taking.close()
        self._sending.close()

    def serve(self, transport: asyncio.Transport, data: bytes) -> None:
        """Serve a connection that begins with these bytes, here or, if it can be handed over, by its worker."""
        if not self._hand_over(transport, data):
            self.begin(transport, data)

    def begin(self, transport: asyncio.Transport, data: bytes) -> None:
        """Serve a connection here."""
        handler = self._server()
        transport.set_protocol(handler)
        handler.connection_made(transport)
        handler.data_received(data)

    def _hand_over(self, transport: asyncio.Transport, data: bytes) -> bool:
        key = _KEY.search(data.partition(b"\r\n\r\n")[0])
        worker = None if key is None or len(data) > _MOST_BYTES else self._find_worker(key[1].decode())
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
            await asyncio.get_running_loop().connect_accepted_socket(lambda: _Taken(self, data), connection)
        except OSError as error:
            log.warning("a connection that another worker had accepted cannot be served: %s", error)
            connection.close()


class _Beginning(asyncio.Protocol):
    """A connection that was accepted, until its first bytes come."""

    def __init__(self, port: SharedPort) -> None:
        self._port = port

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are of a class of their own

    def data_received(self, data: bytes) -> None:
        self._port.serve(self._transport, data)


class _Taken(asyncio.Protocol):
    """A connection that another worker accepted, and the bytes that it has read."""

    def __init__(self, port: SharedPort, data: bytes) -> None:
        self._port = port
        self._data = data

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._port.begin(cast("asyncio.Transport", transport), self._data)


def _path(peer: Peer) -> str:
    return str(Path(peer.socket).with_name("connections"))

"""Connections of a port that several workers share: each goes to the worker of the session that it asks for.

The first bytes of a request usually contain a session's key, and the key names its worker. The connection itself is
passed on with these bytes, through a Unix socket, so no worker relays the rest. Requests that cannot be passed on are
forwarded (see `forwarding`).

If a client shares a connection among sessions, the connection is passed back and forth. So a worker that passes it on
for the second time keeps its copy, with the parser, and reads it again when it comes back.

- One worker at a time reads a connection. When it is closed, that worker tells the others to close their copies.
- A worker that dies tells nothing. The workers that passed connections on to it close their copies and tell the others.
- The worker that reads a connection ignores such messages.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import re
import socket
from typing import cast

from aiohttp import web

from rolltape.gateway.peers import Peer, Siblings
from rolltape.gateway.server.links import Inlet, PassedOn, WorkerLink
from rolltape.tape.journal.left_open import writer_tag

log = logging.getLogger("rolltape.gateway")

_KEY = re.compile(rb"rts-([0-9a-f]{8})[\w-]{32}")
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\n(transfer-encoding|upgrade):", re.IGNORECASE)
_HEAD_END = b"\r\n\r\n"
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.0005, 0.05  # between checks whether the previous reply has ended


class SharedPort:
    """Accepts connections of a shared port, passes on those for other workers, and receives connections from them."""

    def __init__(self, server: web.Server, own: Peer, siblings: Siblings) -> None:
        self._server = server
        self._siblings = siblings
        self._own_tag = writer_tag(own.writer).encode()
        self._path = _path(own)
        self._numbers = itertools.count()
        self._links: dict[bytes, WorkerLink] = {}  # to other workers, by their tags
        self._copies: dict[bytes, _Connection] = {}  # of connections that other workers read, by name
        self._tasks: set[asyncio.Task[object]] = set()
        self._is_closed = False

    async def start(self, listener: socket.socket, backlog: int) -> None:
        """Start to accept connections, from the listener and from other workers."""
        self._inlet = Inlet(self._path, self._take, self._drop_copy)
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(lambda: _Connection(self), sock=listener, backlog=backlog)

    def close(self) -> None:
        """Stop accepting connections and passing them on."""
        self._is_closed = True
        self._listening.close()
        self._inlet.close()
        for link in self._links.values():
            link.close()

    def make_handler(self) -> web.RequestHandler:
        """Make aiohttp's handler for a connection that is served here."""
        return self._server()

    def new_name(self) -> bytes:
        """A name for a connection, unique among these workers."""
        return self._own_tag + next(self._numbers).to_bytes(4)

    def find_link(self, data: bytes) -> WorkerLink | None:
        """The link to the worker whose session a request names in its first bytes, or None to serve it here."""
        end = data.find(_HEAD_END)
        key = _KEY.search(data, 0, end if end >= 0 else len(data))
        return None if key is None or key[1] == self._own_tag else self._link_to(key[1])

    def _link_to(self, tag: bytes) -> WorkerLink | None:
        link = self._links.get(tag)
        if link is None and not self._is_closed and (peer := self._siblings.of_tag(tag.decode())) is not None:
            with contextlib.suppress(OSError):  # it has died
                link = self._links[tag] = WorkerLink(_path(peer), self._lose)
        return link

    def keep_copy(self, connection: "_Connection") -> None:
        """Keep a connection that another worker reads, until it comes back or is closed."""
        self._copies[connection.name] = connection

    def forget_copy(self, connection: "_Connection") -> None:
        """Forget a copy that is closed."""
        if self._copies.get(connection.name) is connection:
            del self._copies[connection.name]

    def report_closed(self, name: bytes) -> None:
        """Tell the other workers to close their copies."""
        for tag in self._siblings.other_tags():
            if (link := self._link_to(tag.encode())) is not None:
                with contextlib.suppress(OSError):  # it has died
                    link.send_closed(name)

    def _drop_copy(self, name: bytes) -> None:
        copy = self._copies.pop(name, None)
        if copy is not None:
            copy.let_go()

    def _lose(self, lost: WorkerLink) -> None:
        """Close the copies of all connections that were passed on to a worker that has died."""
        self._links = {tag: link for tag, link in self._links.items() if link is not lost}
        for name in [name for name, copy in self._copies.items() if copy.passed_to is lost]:
            self._drop_copy(name)
            self.report_closed(name)

    def _take(self, passed: PassedOn) -> None:
        copy = self._copies.pop(passed.name, None)
        if copy is not None and copy.come_back(passed.data):
            if passed.handle >= 0:
                os.close(passed.handle)
        elif passed.handle < 0:
            log.error("closed a connection that another worker passed on: this process has too many files open")
            self.report_closed(passed.name)
        else:
            task = asyncio.ensure_future(self._serve_taken(passed))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve_taken(self, passed: PassedOn) -> None:
        accepted = socket.socket(fileno=passed.handle)
        accepted.setblocking(False)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: _Connection(self, passed), accepted)
        except OSError as error:
            log.warning("a connection that another worker had accepted cannot be served: %s", error)
            accepted.close()


class _Connection(asyncio.Protocol):
    """A connection, served here until a request on it is for a session of another worker."""

    def __init__(self, port: SharedPort, passed: PassedOn | None = None) -> None:
        """`passed` is set if another worker has passed the connection on."""
        self._port = port
        self._data = b"" if passed is None else passed.data  # read, but neither served nor passed on yet
        self._has_copies = passed is not None and passed.has_copies
        self._handler: web.RequestHandler | None = None
        self._left: int | None = 0  # missing bytes of the current request; None: unknown from now on
        self._held: asyncio.TimerHandle | None = None  # passes a request on when the previous reply has ended
        self.name = b"" if passed is None else passed.name  # empty if it was never passed on
        self.passed_to: WorkerLink | None = None  # None if it is read here

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports have another class
        if self._data:
            self._serve(self._data)
            self._data = b""

    def data_received(self, data: bytes) -> None:
        if self._held is not None:  # aiohttp has resumed reading
            self._data += data
        elif self._left == 0 and (link := self._port.find_link(data)) is not None:
            self._data = data
            self._pass_on(link, _FIRST_LOOK_S)
        else:
            self._serve(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self._held is not None:
            self._held.cancel()
        if self._handler is not None:
            self._handler.connection_lost(error)
        if self.passed_to is not None:
            self._port.forget_copy(self)
        elif self._has_copies:
            # So the client sees it at once, and not only when the other workers have closed their copies.
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._fileno())) as copy:
                copy.shutdown(socket.SHUT_RDWR)
            self._port.report_closed(self.name)

    def pause_writing(self) -> None:
        if self._handler is not None:
            self._handler.pause_writing()

    def resume_writing(self) -> None:
        if self._handler is not None:
            self._handler.resume_writing()

    def come_back(self, data: bytes) -> bool:
        """Read the connection again, from the request that begins with `data`. Return False if it is closed here."""
        if self._transport.is_closing():
            return False
        self.passed_to = None
        self._transport.resume_reading()
        self._serve(data)
        return True

    def let_go(self) -> None:
        """Close this copy; the connection stays open where another worker reads it."""
        self._transport.abort()

    def _pass_on(self, link: WorkerLink, look_s: float) -> None:
        """Pass the connection with the bytes read to another worker, once its earlier requests are answered."""
        self._held = None
        if self._transport.is_closing():
            return
        if not self._is_idle():
            self._transport.pause_reading()
            self._held = asyncio.get_running_loop().call_later(
                look_s, self._pass_on, link, min(2 * look_s, _LONGEST_LOOK_S)
            )
            return
        data, self._data = self._data, b""
        is_shared = bool(self.name)
        self.name = self.name or self._port.new_name()
        try:
            link.pass_on(PassedOn(self.name, self._fileno(), data, is_shared))
        except OSError:  # that worker has died: its session continues here
            self._transport.resume_reading()
            self._serve(data)
            return
        self.passed_to = link
        if is_shared:
            self._has_copies = True
            self._transport.pause_reading()
            self._port.keep_copy(self)
        else:
            if self._handler is not None:
                self._handler.connection_lost(None)
            self.let_go()

    def _serve(self, data: bytes) -> None:
        if self._left == 0:
            self._left = _request_bytes(data)
        if self._left is not None:  # more bytes than the request has: the next one begins in them
            self._left = self._left - len(data) if self._left >= len(data) else None
        if self._handler is None:
            self._handler = self._port.make_handler()
            self._handler.connection_made(self._transport)
        self._handler.data_received(data)

    def _is_idle(self) -> bool:
        """Whether all earlier requests are answered. aiohttp has no public name for this, so its `_waiter` is read."""
        if self._handler is None:
            return True
        waiter: asyncio.Future[None] | None = getattr(self._handler, "_waiter", None)
        return waiter is not None and not waiter.done() and not self._transport.get_write_buffer_size()

    def _fileno(self) -> int:
        handle: int = self._transport.get_extra_info("socket").fileno()
        return handle


def _request_bytes(data: bytes) -> int | None:
    """The length of the request that begins with these bytes, or None if unknown."""
    end = data.find(_HEAD_END)
    if end < 0 or _CHUNKED.search(data, 0, end):
        return None
    length = _LENGTH.search(data, 0, end)
    return end + len(_HEAD_END) + (0 if length is None else int(length[1]))


def _path(peer: Peer) -> str:
    return f"{peer.socket}-fds"

"""Connections of a port that several workers share: each goes to the worker whose session is asked for.

The first bytes of a request mostly hold a session's key, and a key names its worker. The connection itself is passed on
with them, through a Unix socket, so that nobody stands in between. What cannot be passed on is forwarded (see
`forwarding`).

A client that shares connections among sessions has them passed to and fro. So a worker that passes one on for the
second time keeps its copy, with the parser, and reads it again when it comes back.

- One worker at a time reads a connection. When it is closed, that worker tells the others to let go of their copies.
- A worker that dies tells nothing. Whoever has passed a connection on to it lets go, and tells the others to.
- The worker that reads a connection lets nobody tell it to let go.
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
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.0005, 0.05  # whether the reply before a request that is to be passed on has ended


class SharedPort:
    """Accepts connections of a shared port, passes on those of other workers' sessions, and takes theirs."""

    def __init__(self, server: web.Server, own: Peer, siblings: Siblings) -> None:
        self._server = server
        self._siblings = siblings
        self._own_tag = writer_tag(own.writer).encode()
        self._path = _path(own)
        self._numbers = itertools.count()
        self._links: dict[bytes, WorkerLink] = {}  # to other workers, by their tags
        self._copies: dict[bytes, _Connection] = {}  # of connections that others read, by their names
        self._tasks: set[asyncio.Task[object]] = set()
        self._is_closed = False

    async def start(self, listener: socket.socket, backlog: int) -> None:
        """Take connections, from the listener and from other workers."""
        self._inlet = Inlet(self._path, self._take, self._drop_copy)
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(lambda: _Connection(self), sock=listener, backlog=backlog)

    def close(self) -> None:
        """Take no more, and pass nothing on."""
        self._is_closed = True
        self._listening.close()
        self._inlet.close()
        for link in self._links.values():
            link.close()

    def make_handler(self) -> web.RequestHandler:
        """What serves a connection here."""
        return self._server()

    def new_name(self) -> bytes:
        """A name for a connection that no other of these workers has."""
        return self._own_tag + next(self._numbers).to_bytes(4)

    def find_link(self, data: bytes) -> WorkerLink | None:
        """The way to the worker whose session the beginning of a request names; None: serve it here."""
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
        """This copy is closed."""
        if self._copies.get(connection.name) is connection:
            del self._copies[connection.name]

    def say_closed(self, name: bytes) -> None:
        """Have the other workers let go of their copies."""
        for tag in self._siblings.other_tags():
            if (link := self._link_to(tag.encode())) is not None:
                with contextlib.suppress(OSError):  # it has died
                    link.say_closed(name)

    def _drop_copy(self, name: bytes) -> None:
        copy = self._copies.pop(name, None)
        if copy is not None:
            copy.let_go()

    def _lose(self, lost: WorkerLink) -> None:
        """Let go of all connections that were passed on to a worker that has died."""
        self._links = {tag: link for tag, link in self._links.items() if link is not lost}
        for name in [name for name, copy in self._copies.items() if copy.passed_to is lost]:
            self._drop_copy(name)
            self.say_closed(name)

    def _take(self, passed: PassedOn) -> None:
        copy = self._copies.pop(passed.name, None)
        if copy is not None and copy.come_back(passed.data):
            if passed.handle >= 0:
                os.close(passed.handle)
        elif passed.handle < 0:
            log.error("a connection that another worker passed on is closed: this process has too many files open")
            self.say_closed(passed.name)
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
        """`passed`: another worker has passed it on."""
        self._port = port
        self._data = b"" if passed is None else passed.data  # what was read and is neither served nor passed on
        self._has_copies = passed is not None and passed.has_copies
        self._handler: web.RequestHandler | None = None
        self._left: int | None = 0  # bytes of the current request that have not come; None: unknown from now on
        self._held: asyncio.TimerHandle | None = None  # a request is to be passed on when the reply before it has ended
        self.name = b"" if passed is None else passed.name  # empty: it was never passed on
        self.passed_to: WorkerLink | None = None  # None: it is read here

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are of a class of their own
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
            # The client is to see it at once, and not when the other workers have let go.
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._fileno())) as copy:
                copy.shutdown(socket.SHUT_RDWR)
            self._port.say_closed(self.name)

    def pause_writing(self) -> None:
        if self._handler is not None:
            self._handler.pause_writing()

    def resume_writing(self) -> None:
        if self._handler is not None:
            self._handler.resume_writing()

    def come_back(self, data: bytes) -> bool:
        """Read it again, from the request on that begins with `data`; False: it was closed here meanwhile."""
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
        """Give the connection to another worker, together with what was read, once nothing of it is left to do here."""
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
        except OSError:  # it has died: its session goes on here
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
        if self._left is not None:  # more than a request has: the next one is on its way, and begins in here
            self._left = self._left - len(data) if self._left >= len(data) else None
        if self._handler is None:
            self._handler = self._port.make_handler()
            self._handler.connection_made(self._transport)
        self._handler.data_received(data)

    def _is_idle(self) -> bool:
        """Whether nothing of an earlier request is left here; what aiohttp has no public word for is its `_waiter`."""
        if self._handler is None:
            return True
        waiter: asyncio.Future[None] | None = getattr(self._handler, "_waiter", None)
        return waiter is not None and not waiter.done() and not self._transport.get_write_buffer_size()

    def _fileno(self) -> int:
        handle: int = self._transport.get_extra_info("socket").fileno()
        return handle


def _request_bytes(data: bytes) -> int | None:
    """The length of the request that begins so; None: nobody knows yet."""
    end = data.find(_HEAD_END)
    if end < 0 or _CHUNKED.search(data, 0, end):
        return None
    length = _LENGTH.search(data, 0, end)
    return end + len(_HEAD_END) + (0 if length is None else int(length[1]))


def _path(peer: Peer) -> str:
    return f"{peer.socket}-fds"

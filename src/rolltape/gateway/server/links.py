"""Messages between the workers of a shared port: a connection is passed on, or a connection was closed.

They go through Unix sockets (SOCK_SEQPACKET), which keep messages separate and in order, carry file descriptors, and
close when a worker dies.
"""

import array
import asyncio
import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

# A message begins with the connection's name, whether other workers may hold copies of it, and the number of request
# bytes that follow, in this message and the next ones. The number 0 means that the connection was closed.
_HEADER = struct.Struct("!12s?I")
_PIECE = 2**16  # bytes of a request in one message; the system accepts about 200 KB at once
_ONE_FD = array.array("i", [0]).itemsize


class PassedOn(NamedTuple):
    """A connection that another worker has passed on."""

    name: bytes
    handle: int  # negative if this process has too many open files to receive it
    data: bytes  # the beginning of a request that was read from it
    has_copies: bool  # whether other workers may hold copies of it


class WorkerLink:
    """Sends messages to another worker."""

    def __init__(self, path: str, on_lost: Callable[["WorkerLink"], None]) -> None:
        """`on_lost` is called when that worker dies; raises OSError if it has."""
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[bytes, int | None]] = deque()  # for room, with duplicates of their connections
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        try:
            self._socket.connect(path)
        except OSError:
            self._socket.close()
            raise
        self._on_lost = on_lost
        self._loop.add_reader(self._socket.fileno(), self._lose)  # nothing is ever sent back: readable means closed

    def pass_on(self, given: PassedOn) -> None:
        """Pass a connection on; raises OSError if that worker has died, or the system cannot carry more connections."""
        header, data = _HEADER.pack(given.name, given.has_copies, len(given.data)), given.data
        self._send(header + data[:_PIECE], given.handle)
        for start in range(_PIECE, len(data), _PIECE):
            self._send(data[start : start + _PIECE])

    def send_closed(self, name: bytes) -> None:
        """Report that a connection was closed; raises OSError if that worker has died."""
        self._send(_HEADER.pack(name, False, 0))

    def _send(self, message: bytes, handle: int | None = None) -> None:
        if not self._waiting:
            if self._has_sent(message, handle):
                return
            self._loop.add_writer(self._socket.fileno(), self._send_waiting)
        self._waiting.append((message, None if handle is None else os.dup(handle)))

    def _has_sent(self, message: bytes, handle: int | None) -> bool:
        """Send a message if there is room. Return whether it was sent."""
        along = [] if handle is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [handle]))]
        try:
            self._socket.sendmsg([message], along)
        except BlockingIOError:
            return False
        return True

    def _send_waiting(self) -> None:
        with contextlib.suppress(OSError):  # retried until `on_lost` is called
            while self._waiting and self._has_sent(*self._waiting[0]):
                _, handle = self._waiting.popleft()
                if handle is not None:
                    os.close(handle)
        if not self._waiting:
            self._loop.remove_writer(self._socket.fileno())

    def _lose(self) -> None:
        self.close()
        self._on_lost(self)

    def close(self) -> None:
        """Close the link. Messages that still wait are not sent."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
        for _, handle in self._waiting:
            if handle is not None:
                os.close(handle)
        self._waiting.clear()


class Inlet:
    """Receives the messages of all other workers, at a path."""

    def __init__(self, path: str, on_passed: Callable[[PassedOn], None], on_closed: Callable[[bytes], None]) -> None:
        self._on_passed = on_passed
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._accepted: set[socket.socket] = set()
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.setblocking(False)
        self._listening.bind(path)
        self._listening.listen(1024)
        self._loop.add_reader(self._listening.fileno(), self._accept)

    def close(self) -> None:
        """Stop receiving."""
        for one in (self._listening, *self._accepted):
            self._loop.remove_reader(one.fileno())
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            accepted, _ = self._listening.accept()
            accepted.setblocking(False)
            self._accepted.add(accepted)
            self._loop.add_reader(accepted.fileno(), self._take, accepted, _Coming())

    def _take(self, accepted: socket.socket, coming: "_Coming") -> None:
        with contextlib.suppress(BlockingIOError):
            while accepted.fileno() >= 0:
                try:
                    size, along, _, _ = accepted.recvmsg_into(
                        [coming.room], socket.CMSG_SPACE(_ONE_FD), socket.MSG_CMSG_CLOEXEC
                    )
                except ConnectionError:
                    size = 0
                if not size:  # that worker has died
                    self._loop.remove_reader(accepted.fileno())
                    self._accepted.discard(accepted)
                    accepted.close()
                    coming.drop()
                    return
                for _, _, handle in along:
                    (coming.handle,) = array.array("i", handle[:_ONE_FD])
                if (passed := coming.add(size)) is not None:
                    if passed.data:
                        self._on_passed(passed)
                    else:
                        self._on_closed(passed.name)


class _Coming:
    """Collects the successive messages about one connection."""

    def __init__(self) -> None:
        self.room = bytearray(_HEADER.size + _PIECE)  # for the next message
        self.handle = -1
        self._name, self._has_copies = b"", False
        self._pieces: list[bytes] = []
        self._missing = 0  # bytes

    def add(self, size: int) -> PassedOn | None:
        """Add a message of `size` bytes. Return the connection if that was its last message."""
        start = 0
        if not self._missing:
            self._name, self._has_copies, self._missing = _HEADER.unpack_from(self.room)
            start = _HEADER.size
        self._pieces.append(bytes(memoryview(self.room)[start:size]))
        self._missing -= size - start
        if self._missing:
            return None
        passed = PassedOn(self._name, self.handle, b"".join(self._pieces), self._has_copies)
        self._pieces.clear()
        self.handle = -1
        return passed

    def drop(self) -> None:
        """Close a connection whose last message will not come."""
        if self.handle >= 0:
            os.close(self.handle)

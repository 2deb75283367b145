"""Messages between the workers of a shared port."""

import os
import socket
from pathlib import Path

import pytest

from gateways import eventually
from rolltape.gateway.server.links import Inlet, PassedOn, WorkerLink


async def test_more_than_the_system_takes_at_once_arrives_in_order_with_its_connections(tmp_path: Path) -> None:
    passed: list[PassedOn] = []
    closed: list[tuple[bytes, int]] = []
    inlet = Inlet(f"{tmp_path}/i", passed.append, lambda name: closed.append((name, len(passed))))
    lost: list[WorkerLink] = []
    link = WorkerLink(f"{tmp_path}/i", lost.append)
    pairs = [socket.socketpair() for _ in range(8)]
    names = [b"%012d" % number for number in range(8)]
    for number, (_, given) in enumerate(pairs):  # nobody takes them meanwhile
        link.pass_on(PassedOn(names[number], given.fileno(), b"%d" % number * 150_000, number % 2 == 0))
        given.close()
    link.send_closed(b"closed after")
    await eventually(lambda: bool(closed))
    assert closed == [(b"closed after", 8)]
    assert [(one.name, one.data[:1] * 150_000 == one.data, one.has_copies) for one in passed] == [
        (name, True, number % 2 == 0) for number, name in enumerate(names)
    ]
    for (kept, _), one in zip(pairs, passed, strict=True):
        os.write(one.handle, one.name)
        os.close(one.handle)
        assert kept.recv(100) == one.name
        assert kept.recv(100) == b""  # no other copy is left
        kept.close()
    inlet.close()
    await eventually(lambda: lost == [link])
    with pytest.raises(OSError, match="Bad file descriptor"):
        link.send_closed(names[0])
    with pytest.raises(OSError, match="refused"):
        WorkerLink(f"{tmp_path}/i", lost.append)

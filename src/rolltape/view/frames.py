"""What server and worker say to each other: MessagePack, each with its length before it."""

from typing import Protocol

import msgspec

from rolltape.view.reports import Report, Wanted


class Watch(msgspec.Struct, frozen=True, tag="watch"):
    """Follow a run from these marks on."""

    run: str
    location: str
    folder: str  # of its cache
    created: float | None  # when the run was made: another one at the same place has another
    marks: bytes
    trainer_marks: dict[int, str]


class Read(msgspec.Struct, frozen=True, tag="read"):
    """Read rollouts for what is wanted of them."""

    run: str
    wanted: list[Wanted]


class Told(msgspec.Struct, frozen=True):
    """Reports about a run."""

    run: str
    index: str | None  # the search index that this worker writes; None: it writes none
    reports: list[Report]


Order = Watch | Read


class Stream(Protocol):
    """A read gives all that was asked for, unless the other side is gone."""

    def read(self, size: int, /) -> bytes: ...


LENGTH_BYTES = 4
encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(Order).decode
decode_told = msgspec.msgpack.Decoder(Told).decode


def framed(message: Order | Told) -> bytes:
    """A message as it goes over the pipe."""
    raw = encode(message)
    return len(raw).to_bytes(LENGTH_BYTES, "big") + raw


def read_frame(stream: Stream) -> bytes | None:
    """The next message; None: the other side is gone."""
    size = stream.read(LENGTH_BYTES)
    if len(size) < LENGTH_BYTES:
        return None
    raw = stream.read(int.from_bytes(size, "big"))
    return raw if len(raw) == int.from_bytes(size, "big") else None

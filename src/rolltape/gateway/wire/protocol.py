"""The protocol of a wire API: parse requests, write replies, server-sent events and errors."""

from collections.abc import Iterator
from typing import Protocol

from rolltape.gateway.exchange import Api, Ask, Draft, Reply


class Dialect(Protocol):
    """One API's form of requests, replies, events and errors."""

    api: Api
    keepalive: bytes  # an event that its clients pass over, sent while the engine works

    def read(self, body: bytes) -> Ask:
        """A request's body; raises BadRequest, naming the field, for what is malformed or cannot be honored."""

    def whole(self, ask: Ask, reply: Reply) -> bytes:
        """The body of a reply that is not streamed."""

    def opening(self, ask: Ask, draft: Draft) -> bytes:
        """The events with which a streamed reply starts at once."""

    def closing(self, ask: Ask, reply: Reply) -> Iterator[bytes]:
        """All further events; with the opening they say what `whole` says. The last one ends the reply."""

    def error(self, status: int, message: str) -> bytes:
        """The body of a refusal."""

    def error_event(self, status: int, message: str, draft: Draft | None = None) -> bytes:
        """An error within a stream that has begun; `draft` is what it was opened with."""


COMMENT = b": keepalive\n\n"  # no event at all; readers pass over it
# Readers that split lines as str.splitlines does (httpx's iter_lines) break an event at these; they stand in JSON
# only within strings, where an escape means the same.
_BREAKS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def event(data: bytes, name: str | None = None) -> bytes:
    """One event; `data` is JSON (or a word such as `[DONE]`) on a single line."""
    for char, escape in _BREAKS:
        data = data.replace(char, escape)
    head = b"" if name is None else b"event: %s\n" % name.encode()
    return b"%sdata: %s\n\n" % (head, data)

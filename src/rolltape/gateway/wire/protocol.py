"""What each API's file does: its bodies in, its bodies and events out. Nothing of an API is known elsewhere."""

from collections.abc import Iterator, Mapping
from typing import Protocol

from rolltape.gateway.exchange import Api, Ask, Draft, Reply


class Wire(Protocol):
    """One API's form of requests, replies, events and errors."""

    api: Api
    keepalive: bytes  # an event that its clients pass over, sent while the engine works

    def read(self, body: bytes, headers: Mapping[str, str]) -> Ask:
        """A request's body; raises BadRequest, naming the field, for what is malformed or cannot be honoured."""

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

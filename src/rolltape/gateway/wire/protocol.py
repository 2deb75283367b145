"""The protocol of a wire API: parse requests, write replies, server-sent events and errors."""

from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

import msgspec

from rolltape.gateway.request import Api, ChatRequest, Draft, Reply

NO_HEADERS: Mapping[str, str] = {}


class Dialect(Protocol):
    """One API's form of requests, replies, events and errors."""

    api: Api

    def read(self, body: bytes, headers: Mapping[str, str] = NO_HEADERS) -> ChatRequest:
        """A request; raises BadRequest, naming the field, for what is malformed or cannot be honored."""

    def keepalive(self, ask: ChatRequest) -> bytes:
        """An event that its clients pass over, sent while the engine works."""

    def whole(self, ask: ChatRequest, reply: Reply) -> bytes:
        """The body of a reply that is not streamed."""

    def opening(self, ask: ChatRequest, draft: Draft) -> bytes:
        """The events with which a streamed reply starts at once."""

    def closing(self, ask: ChatRequest, reply: Reply) -> Iterator[bytes]:
        """All further events; with the opening they say what `whole` says. The last one ends the reply."""

    def error(self, status: int, message: str, code: str | None = None) -> bytes:
        """The body of a refusal; `code` in the words of OpenAI, for an API that has codes."""

    def error_event(self, status: int, message: str, draft: Draft | None = None) -> bytes:
        """An error within a stream that has begun; `draft` is what it was opened with."""


_MOST_BETAS = 16
COMMENT = b": keepalive\n\n"  # no event at all; readers pass over it
# Readers that split lines as str.splitlines does (httpx's iter_lines) break an event at these; they stand in JSON
# only within strings, where an escape means the same.
_BREAKS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def with_headers(ask: ChatRequest, headers: Mapping[str, str], betas: str, harmless: Collection[str]) -> ChatRequest:
    """A request with what its headers say: who sent it, and which betas are asked for that mean nothing here."""
    asked = [one.strip() for one in headers.get(betas, "").split(",") if one.strip()]
    ignored = [f"{betas} {ascii(one)[1:-1][:80]}: ignored" for one in asked if not one.startswith(tuple(harmless))]
    told = tuple(dict.fromkeys((*ask.ignored_params, *ignored[:_MOST_BETAS])))
    return msgspec.structs.replace(ask, client=headers.get("User-Agent", ""), ignored_params=told)


def event(data: bytes, name: str | None = None) -> bytes:
    """One event; `data` is JSON (or a word such as `[DONE]`) on a single line."""
    for char, escape in _BREAKS:
        data = data.replace(char, escape)
    head = b"" if name is None else b"event: %s\n" % name.encode()
    return b"%sdata: %s\n\n" % (head, data)

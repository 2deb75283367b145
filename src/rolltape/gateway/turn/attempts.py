"""One request in progress, shared by a client and its retries, so that it becomes one turn."""

import asyncio
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from rolltape.gateway.request import ChatRequest
from rolltape.gateway.turn.generate import Caller
from rolltape.records.turn import Delivery

if TYPE_CHECKING:
    from rolltape.gateway.turn.turns import Begun, Taken

_REMEMBERED = 16  # requests of a session that a retry may still come for
_encode = msgspec.json.Encoder(order="deterministic").encode


def request_digest(ask: ChatRequest) -> bytes:
    """Under which a request is known again, when it comes with its fields in another order or wants no stream."""
    # Codex (0.166) shuffles fields each time; Claude Code (2.1) asks without a stream once one has broken.
    as_told = {"client": "", "body_bytes": 0, "stream": False, "include_usage": True, "ignored_params": ()}
    rest = msgspec.structs.replace(ask, messages=[], message_keys=(), **as_told)
    return blake2b(b"".join((*ask.message_keys, _encode(rest))), digest_size=16).digest()


class Attempt:
    """One turn in the making, and those who wait for it."""

    def __init__(self, over: Callable[["Attempt"], None]) -> None:
        self.caller = Caller()
        self.begun: asyncio.Future[Begun] = asyncio.get_running_loop().create_future()
        self.taken: asyncio.Task[Taken] | None = None
        self.delivery = Delivery.UNKNOWN
        self._over = over  # called when it has ended and nobody waits any more
        self._waiting = 0

    def run(self, task: "asyncio.Task[Taken]") -> None:
        self.taken = task
        task.add_done_callback(lambda _: self._settle())
        # Whoever waits is told through the task; nobody need be left who looks at this one.
        self.begun.add_done_callback(lambda done: done.cancelled() or done.exception())

    def join(self) -> None:
        self._waiting += 1

    def leave(self) -> None:
        """One who waited has the reply, or is gone; the last to go before the end has the engine stop."""
        self._waiting -= 1
        assert self.taken is not None
        if self._waiting == 0 and not self.taken.done():
            self.caller.leave()
        self._settle()

    def outcome(self) -> "Taken | None":
        """The turn, if it has been taken."""
        ended = self.taken is not None and self.taken.done() and not self.taken.cancelled()
        return self.taken.result() if ended and self.taken and self.taken.exception() is None else None

    async def ended(self) -> "Taken | None":
        """The turn, when it has been taken; None: there is none, or not in full."""
        assert self.taken is not None
        await asyncio.wait({self.taken})
        return self.outcome()

    @property
    def has_reply(self) -> bool:
        """Whether there is a reply to be had, now or when it has come; not if it failed, or everybody has left."""
        assert self.taken is not None
        if not self.taken.done():
            return not self.caller.gone
        taken = self.outcome()
        return taken is not None and taken.reply is not None

    @property
    def undelivered(self) -> bool:
        """Nobody got its reply, and nobody waits for it."""
        return self._waiting == 0 and self.delivery is not Delivery.DELIVERED

    def _settle(self) -> None:
        if self._waiting == 0 and self.taken is not None and self.taken.done():
            if not self.taken.cancelled():
                self.taken.exception()  # looked at, whether or not somebody waits
            self._over(self)


class Attempts:
    """The latest requests of a session, by what they ask."""

    def __init__(self) -> None:
        self._latest: dict[bytes, Attempt] = {}

    def again(self, digest: bytes, headers: Mapping[str, str]) -> Attempt | None:
        """The attempt that a request repeats: by its own word (a retry header), or since nobody got the reply."""
        found = self._latest.get(digest)
        if found is None:
            return None
        retried = headers.get("x-stainless-retry-count", "0") not in ("", "0")
        return found if retried or found.undelivered else None

    def clear(self) -> None:
        """Forget all: they hold their session, and it holds them."""
        self._latest.clear()

    def forget(self, attempt: Attempt) -> None:
        """Let nobody ask for this one again."""
        self._latest = {digest: one for digest, one in self._latest.items() if one is not attempt}

    def remember(self, digest: bytes, attempt: Attempt) -> None:
        self._latest.pop(digest, None)
        self._latest[digest] = attempt
        while len(self._latest) > _REMEMBERED:
            del self._latest[next(iter(self._latest))]

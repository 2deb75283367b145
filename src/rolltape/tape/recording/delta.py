"""Which earlier turn a whole prompt is best coded against. A choice of storage alone: any answer is correct."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from rolltape.records.messages import Message
from rolltape.records.turn import Ids, Turn, common_prefix


class Parent(NamedTuple):
    """The turn to code against, and how much of it the new prompt shares."""

    turn: Turn | None
    keep_messages: int = 0
    keep_tokens: int = 0


class _Whole(NamedTuple):
    """A turn with its conversation and ids spelled out, to compare the next whole prompt with."""

    turn: Turn
    digests: list[bytes]
    ids: Ids


class DeltaCoder:
    """Finds, for a prompt given whole, the turn that it shares most with: the latest, or one found by conversation."""

    def __init__(self) -> None:
        self._latest: _Whole | None = None
        self._by_conversation: dict[bytes, Turn] = {}
        self._ends: list[bytes] = []  # by sequence: the hash of each turn's conversation, reply included
        self._whole_prompt: tuple[list[bytes], Ids] | None = None

    def best_parent(self, messages: Sequence[Message], ids: Ids) -> Parent:
        """The best of the latest turn and the one that holds the longest beginning of the conversation."""
        digests = [message.digest for message in messages]
        self._whole_prompt = (digests, ids)
        parent = Parent(None)
        if self._latest is not None:
            parent = _shared(self._latest, digests, ids)
            if parent.keep_messages == len(self._latest.digests):
                return parent
        # A turn that was given as what is new is spelled out only if this conversation goes on from it.
        other = self._longest_beginning(digests)
        if other is not None and other is not parent.turn:
            parent = max(_shared(_spelled_out(other), digests, ids), parent, key=lambda found: found.keep_tokens)
        return parent

    def accepted(self, turn: Turn, parent: Turn | None, keep_messages: int, *, given_whole: bool) -> None:
        """Remember a turn; one that was given whole is at hand for the next comparison."""
        digests = [message.digest for message in turn.prompt.own]
        start = b""
        if parent is not None and keep_messages == len(parent.messages):
            start = self._ends[parent.sequence]  # only what is new is hashed: what comes before has its hash
        elif self._whole_prompt is not None:
            digests = self._whole_prompt[0]
        elif parent is not None:
            digests = [message.digest for message in turn.prompt.to_list()]
        self._latest = None
        if given_whole and self._whole_prompt is not None:
            reply = [turn.reply.digest] if turn.reply else []
            whole, ids = self._whole_prompt
            self._latest = _Whole(turn, whole + reply, np.concatenate([ids, turn.sampled_ids]))
        self._whole_prompt = None
        end = _hashes(start, digests)[-1] if digests else start
        self._by_conversation[end] = turn
        if turn.reply is not None:
            end = _hashes(end, [turn.reply.digest])[-1]
            self._by_conversation[end] = turn
        self._ends.append(end)

    def look_at(self, turn: Turn) -> None:
        """Have an accepted turn at hand for the next comparison."""
        self._latest = _spelled_out(turn)

    def take_back(self, count: int) -> None:
        """Forget all turns but the first `count`. A conversation that one of them shared with an earlier turn may be
        forgotten too; the next prompt is then coded against another one."""
        del self._ends[count:]
        self._by_conversation = {end: turn for end, turn in self._by_conversation.items() if turn.sequence < count}
        if self._latest is not None and self._latest.turn.sequence >= count:
            self._latest = None

    def _longest_beginning(self, digests: list[bytes]) -> Turn | None:
        for end in reversed(_hashes(b"", digests)):
            if end in self._by_conversation:
                return self._by_conversation[end]
        return None


def _shared(whole: _Whole, digests: list[bytes], ids: Ids) -> Parent:
    keep = 0
    for held, new in zip(whole.digests, digests, strict=False):
        if held != new:
            break
        keep += 1
    return Parent(whole.turn, keep, common_prefix(whole.ids, ids))


def _spelled_out(turn: Turn) -> _Whole:
    return _Whole(turn, [message.digest for message in turn.messages.to_list()], turn.tokens.to_numpy())


def _hashes(start: bytes, digests: Sequence[bytes]) -> list[bytes]:
    """The hash of a conversation after each of its next messages, from the hash of what comes before them."""
    hashes = []
    for digest in digests:
        start = blake2b(start + digest, digest_size=16).digest()
        hashes.append(start)
    return hashes

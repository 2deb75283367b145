"""Which earlier turn a whole prompt is best coded against. A choice of storage alone: any answer is correct."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from rolltape.records.messages import Message
from rolltape.records.tokens import Ids, common_prefix
from rolltape.records.turn import Turn


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
        self._hashed: list[bytes] = []  # by sequence: the hash of each turn's conversation, reply included
        self._whole_prompt: tuple[list[bytes], Ids] | None = None

    def best_parent(self, turns: Sequence[Turn], messages: Sequence[Message], ids: Ids) -> Parent:
        """The best of the latest turn and the one that holds the longest beginning of the conversation."""
        digests = [message.digest for message in messages]
        self._whole_prompt = (digests, ids)
        if not turns:
            return Parent(None)
        if self._latest is None or self._latest.turn is not turns[-1]:
            self._latest = _spelled_out(turns[-1])
        parent = _shared(self._latest, digests, ids)
        if parent.keep_messages < len(self._latest.digests):
            other = self._longest_beginning(turns, digests)
            if other is not None and other is not turns[-1]:
                parent = max(_shared(_spelled_out(other), digests, ids), parent, key=lambda p: p.keep_tokens)
        return parent

    def accepted(self, turn: Turn, *, given_whole: bool) -> None:
        """Remember a stored turn; one that was given whole is at hand for the next comparison."""
        if not given_whole or self._whole_prompt is None:
            self._latest = None
            return
        digests, ids = self._whole_prompt
        reply = [turn.reply.digest] if turn.reply else []
        self._latest = _Whole(turn, digests + reply, np.concatenate([ids, turn.sampled_ids]))
        self._whole_prompt = None

    def _longest_beginning(self, turns: Sequence[Turn], digests: list[bytes]) -> Turn | None:
        for turn in turns[len(self._hashed) :]:
            hashes = _prefix_hashes([message.digest for message in turn.messages.to_list()])
            self._hashed.append(hashes[-1] if hashes else b"")
            for tip in hashes[len(turn.prompt) - 1 :] if len(turn.prompt) else hashes:
                self._by_conversation[tip] = turn
        for tip in reversed(_prefix_hashes(digests)):
            if tip in self._by_conversation:
                return self._by_conversation[tip]
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


def _prefix_hashes(digests: Sequence[bytes]) -> list[bytes]:
    hashes, running = [], blake2b(digest_size=16)
    for digest in digests:
        running.update(digest)
        hashes.append(running.digest())
    return hashes

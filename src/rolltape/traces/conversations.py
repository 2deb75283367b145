"""Find what is new in a prompt: the hash of every beginning of every conversation so far is known."""

import marshal
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from rolltape.records.jsonable import encode_numbers


class PlacedPrompt(NamedTuple):
    """A prompt split into the beginning of an earlier step's conversation and the messages that follow it."""

    messages_from: int | None  # None: it stands alone
    kept_messages: int
    new: list[Any]
    ends: list[bytes]  # the hash of the conversation after each message


class Conversations:
    """The conversations of a rollout's steps. Several may grow side by side, as in a game of several seats."""

    def __init__(self) -> None:
        self._step_of: dict[bytes, int] = {}  # by the hash of a beginning: the first step that held it

    def place(self, prompt: Sequence[Any], where: str) -> PlacedPrompt:
        """Find the longest beginning of a prompt that an earlier step has."""
        ends: list[bytes] = []
        for message in prompt:
            ends.append(_hash_after(ends, message, where))
        # With a conversation all its beginnings are known, so the first unknown one ends the search.
        kept = next((count for count, end in enumerate(ends) if end not in self._step_of), len(ends))
        step = self._step_of[ends[kept - 1]] if kept else None
        return PlacedPrompt(step, kept, list(prompt[kept:]), ends)

    def add(self, step: int, placed: PlacedPrompt, response: object, where: str) -> None:
        """Remember the conversation of a step: its prompt, and its response unless that is None."""
        ends = placed.ends if response is None else [*placed.ends, _hash_after(placed.ends, response, where)]
        for end in ends[placed.kept_messages :]:
            self._step_of.setdefault(end, step)

    def forget(self) -> None:
        """Forget all conversations: what later prompts would refer to may not be on the tape."""
        self._step_of.clear()


def _hash_after(ends: Sequence[bytes], message: object, where: str) -> bytes:
    """The hash of a conversation that ends in `message`."""
    try:
        # A tenth of the cost of JSON. Version 2: the same value gives the same bytes, whoever else refers to it.
        data = marshal.dumps(message, 2)  # type: ignore[arg-type]
    except ValueError:
        data = b"json" + encode_numbers(message, where)
    return blake2b((ends[-1] if ends else b"") + data, digest_size=16).digest()

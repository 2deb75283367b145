"""Prompts given whole → what is new in them: every beginning of every conversation so far is known by its hash."""

import marshal
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from rolltape.records.jsonable import encode_numbers


class Placed(NamedTuple):
    """A prompt as what follows the beginning of an earlier step's conversation."""

    messages_from: int | None  # None: it stands alone
    kept_messages: int
    new: list[Any]
    ends: list[bytes]  # the hash of the conversation after each message


class Conversations:
    """The conversations of a rollout's steps. Several may grow side by side, as in a game of several seats."""

    def __init__(self) -> None:
        self._step_of: dict[bytes, int] = {}  # by the hash of a beginning: the first step that held it

    def place(self, prompt: Sequence[Any], where: str) -> Placed:
        """What is new in a prompt."""
        ends: list[bytes] = []
        for message in prompt:
            ends.append(_after(ends, message, where))
        # With a conversation all its beginnings are known, so the first unknown one ends the search.
        kept = next((count for count, end in enumerate(ends) if end not in self._step_of), len(ends))
        step = self._step_of[ends[kept - 1]] if kept else None
        return Placed(step, kept, list(prompt[kept:]), ends)

    def add(self, step: int, placed: Placed, response: object, where: str) -> None:
        """Remember the conversation of a step: its prompt, and its response unless that is None."""
        ends = placed.ends if response is None else [*placed.ends, _after(placed.ends, response, where)]
        for end in ends[placed.kept_messages :]:
            self._step_of.setdefault(end, step)

    def forget(self) -> None:
        """Know nothing again: what later prompts would refer to may not be on the tape."""
        self._step_of.clear()


def _after(ends: Sequence[bytes], message: object, where: str) -> bytes:
    """The hash of a conversation that ends in `message`."""
    try:
        # A tenth of the cost of JSON. Version 2: the same value gives the same bytes, whoever else refers to it.
        spelled = marshal.dumps(message, 2)  # type: ignore[arg-type]
    except ValueError:
        spelled = b"json" + encode_numbers(message, where)
    return blake2b((ends[-1] if ends else b"") + spelled, digest_size=16).digest()

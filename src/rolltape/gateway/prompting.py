"""Build the prompt's ids: held ids extended by the new messages, or the whole conversation rendered."""

import asyncio
from typing import Any, NamedTuple

import numpy as np

from rolltape.gateway.history import HistoryMatch
from rolltape.gateway.prompts import BridgeRefusal, ChatPrompts, PromptIds
from rolltape.records.turn import NO_IDS, Ids, Turn

# Rendering less than this takes about a millisecond, which is less than a thread costs; more is kept off the loop.
_INLINE_CHARS = 4096


class Prompt(NamedTuple):
    """The ids to continue, and how they were come by."""

    ids: Ids
    after: Turn | None  # the turn whose ids it extends; None: rendered in full
    new: PromptIds  # what follows that turn's ids, or all of them
    prefix_miss: str | None  # why it does not extend held ids; None: it does

    @property
    def held_tokens(self) -> int:
        return len(self.ids) - len(self.new.ids)


async def build_prompt(
    place: HistoryMatch, prompts: ChatPrompts, tools: list[dict[str, Any]] | None, thinking: bool | None
) -> Prompt:
    """The prompt for a history; raises BadRequest for messages that cannot be rendered."""
    miss: str | None = place.prefix_miss
    if place.turn is not None:
        turn = place.turn
        new = place.messages[len(place.messages) - place.new :]
        size = sum(len(message.raw) for message in new)
        messages = [message.to_dict() for message in new]
        bridged = await _run(size, prompts.bridge, turn.prompt_tokens, turn.sampled_ids, messages, tools, thinking)
        if not isinstance(bridged, BridgeRefusal):
            return Prompt(np.concatenate([turn.tokens.to_numpy(), bridged.ids]), turn, bridged, None)
        miss = bridged
    size = sum(len(message.raw) for message in place.messages)
    messages = [message.to_dict() for message in place.messages]
    rendered = await _run(size, prompts.render, messages, tools, thinking)
    return Prompt(rendered.ids, None, rendered, miss)


def resume_prompt(interrupted: Turn) -> Prompt:
    """The prompt and what was sampled of a reply that nobody waited for, to go on from."""
    nothing = PromptIds(ids=NO_IDS, message_starts=())
    return Prompt(interrupted.tokens.to_numpy(), interrupted, nothing, None)


async def _run(size: int, work: Any, *args: Any) -> Any:
    return work(*args) if size < _INLINE_CHARS else await asyncio.to_thread(work, *args)

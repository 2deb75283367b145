"""Build the prompt's ids: held ids extended by the new messages, or the whole conversation rendered."""

import asyncio
from typing import Any, NamedTuple

import numpy as np

from rolltape.gateway.history import HistoryMatch
from rolltape.gateway.prompts import BridgeRefusal, ChatPrompts
from rolltape.records.turn import NO_IDS, Ids, Turn

# Rendering less than this takes about a millisecond, which is less than a thread costs; more is kept off the loop.
_INLINE_CHARS = 4096


class Prompt(NamedTuple):
    """The ids to continue, and how they were come by."""

    ids: Ids
    after: Turn | None  # the turn whose ids it extends; None: rendered in full
    new_ids: Ids  # those after that turn's
    message_starts: tuple[int, ...] | None  # of the new messages, in the new ids
    prefix_miss: str | None  # why it does not extend held ids; None: it does
    special_text: int  # special tokens spelled out in the text of new messages
    folded: bool  # a system message was folded into its neighbor

    @property
    def held_tokens(self) -> int:
        return len(self.ids) - len(self.new_ids)


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
            ids = np.concatenate([turn.tokens.to_numpy(), bridged.ids])
            starts = bridged.message_starts
            return Prompt(ids, turn, bridged.ids, starts, None, bridged.special_text, bool(bridged.folded))
        miss = bridged
    size = sum(len(message.raw) for message in place.messages)
    messages = [message.to_dict() for message in place.messages]
    rendered = await _run(size, prompts.render, messages, tools, thinking)
    starts = rendered.message_starts
    return Prompt(rendered.ids, None, rendered.ids, starts, miss, rendered.special_text, bool(rendered.folded))


def resume_prompt(interrupted: Turn) -> Prompt:
    """The prompt and what was sampled of a reply that nobody waited for, to go on from."""
    return Prompt(interrupted.tokens.to_numpy(), interrupted, NO_IDS, (), None, 0, False)


async def _run(size: int, work: Any, *args: Any) -> Any:
    return work(*args) if size < _INLINE_CHARS else await asyncio.to_thread(work, *args)

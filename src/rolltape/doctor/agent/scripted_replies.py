"""Replies that nobody sampled: messages written as a model of any family would sample them."""

from typing import Any

import numpy as np

from rolltape.gateway.prompts import ChatPrompts
from rolltape.gateway.prompts.families import Tools
from rolltape.records.turn import Ids

Message = dict[str, Any]
_ASKED: Message = {"role": "user", "content": "Go on."}


def write_reply(prompts: ChatPrompts, reply: Message, tools: Tools, thinking: bool | None = None) -> Ids | None:
    """The ids of a reply with the id that ends it; None: the template does not render it after its prompt.

    The ids are those that a conversation with this reply has where the reply stands.
    """
    before = prompts.render([_ASKED], tools, thinking).ids
    whole = prompts.render([_ASKED, reply], tools, thinking, opens_reply=False).ids
    start = len(before)
    if not np.array_equal(whole[:start], before):
        return None
    stops = np.flatnonzero(np.isin(whole[start:], prompts.stop_ids))
    return whole[start : start + int(stops[0]) + 1] if len(stops) else None


def split_unusually(prompts: ChatPrompts, ids: Ids) -> Ids:
    """The same text in other ids, as a model samples now and then: the longest word comes in two parts."""
    texts = [prompts.decode(ids[at : at + 1]) for at in range(len(ids))]
    words = [at for at, text in enumerate(texts) if len(text) > 3 and text.strip().isalpha()]
    for at in sorted(words, key=lambda at: -len(texts[at])):
        parts = [prompts.encode(part, add_special_tokens=False) for part in (texts[at][:2], texts[at][2:])]
        split = np.concatenate([ids[:at], *parts, ids[at + 1 :]]).astype(np.int32)
        if prompts.decode(split) == prompts.decode(ids):
            return split
    return ids

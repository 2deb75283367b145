"""Scripted replies: the ids of messages as a model of the family would sample them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rolltape.errors import BadRequest
from rolltape.gateway.prompts import ChatPrompts
from rolltape.gateway.prompts.families import THINK_END, Tools
from rolltape.gateway.prompts.reply_form import Thinking
from rolltape.records.turn import Ids

Message = dict[str, Any]
_ASKED: Message = {"role": "user", "content": "Go on."}


def write_reply(prompts: ChatPrompts, reply: Message, tools: Tools, thinking: bool | None = None) -> Ids | None:
    """The ids of a reply with the stop id, or None if this model's form cannot express it after its prompt.

    The ids are those of the reply within a rendered conversation. Templates that leave earlier thinking out do not
    render a reply with thinking; without calls it is then written as text.
    """
    before = prompts.render([_ASKED], tools, thinking).ids
    try:
        whole = prompts.render([_ASKED, reply], tools, thinking, opens_reply=False).ids
    except BadRequest:
        return None
    if np.array_equal(whole[: len(before)], before):
        return _up_to_stop(prompts, whole[len(before) :])
    if reply.get("tool_calls"):
        return None
    thought = reply.get("reasoning_content") or ""
    opened = prompts.thinking_at(before, thinking) is Thinking.BEGUN
    text = f"{thought}\n{THINK_END}\n\n{reply['content']}" if opened else reply["content"]
    return _up_to_stop(prompts, prompts.encode(text, add_special_tokens=False))


def _up_to_stop(prompts: ChatPrompts, ids: Ids) -> Ids:
    """Ids up to the first stop id; in some templates, such as GLM's, only the next message writes one."""
    stops = np.flatnonzero(np.isin(ids, prompts.stop_ids))
    if len(stops):
        return ids[: int(stops[0]) + 1]
    return np.append(ids, np.int32(prompts.stop_ids[0]))


def write_first(
    prompts: ChatPrompts, replies: Sequence[Message], tools: Tools, thinking: bool | None = None
) -> Ids | None:
    """The ids of the first of these replies that this model's form can express."""
    written = (write_reply(prompts, one, tools, thinking) for one in replies)
    return next((ids for ids in written if ids is not None), None)


def split_unusually(prompts: ChatPrompts, ids: Ids) -> Ids:
    """The same text in other ids, which models sample sometimes: the longest word is split into two parts."""
    texts = [prompts.decode(ids[at : at + 1]) for at in range(len(ids))]
    words = [at for at, text in enumerate(texts) if len(text) > 3 and text.strip().isalpha()]
    for at in sorted(words, key=lambda at: -len(texts[at])):
        parts = [prompts.encode(part, add_special_tokens=False) for part in (texts[at][:2], texts[at][2:])]
        split = np.concatenate([ids[:at], *parts, ids[at + 1 :]]).astype(np.int32)
        if prompts.decode(split) == prompts.decode(ids):
            return split
    return ids

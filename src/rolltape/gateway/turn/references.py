"""Fill in the replies that a request refers to by id.

A Responses request may name the reply that it continues (`previous_response_id`) and send only new items. The AI SDK
(6.0) sends an `item_reference` for each reasoning item and each text, since OpenAI stores replies by default. The tool
runner of Anthropic's SDKs (2.10) continues a thread, and sends neither system prompt nor tools again.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rolltape.errors import ReplyNotFound
from rolltape.gateway.request import REFERENCES, ChatRequest
from rolltape.gateway.turn.history import keyed
from rolltape.records.turn import Turn

Message = dict[str, Any]


def fill_in(request: ChatRequest, turns: Sequence[Turn]) -> ChatRequest:
    """The request with the whole conversation, as if its client had sent it; raises ReplyNotFound."""
    known = {turn.facts.extra.get("reply_id", ""): turn for turn in turns if turn.reply is not None}
    messages = [_without_references(message, known) for message in request.messages]
    if request.after_reply is not None:
        turn = _find(request.after_reply, known)
        # Instructions apply to one reply only: a request that continues it has its own instructions, or none.
        before = turn.prompt_messages[1 if turn.facts.extra.get("instructed") else 0 :]
        own = 1 if request.instructed else 0
        messages = [*messages[:own], *before, _reply(turn), *messages[own:]]
        if request.in_thread:
            request = msgspec.structs.replace(request, tools=turn.root.tools)
    return keyed(msgspec.structs.replace(request, messages=messages), request.body_bytes)


def _without_references(message: Message, known: Mapping[str, Turn]) -> Message:
    """An assistant's message, with the parts of a reply that it refers to filled in."""
    references = message.get(REFERENCES)
    if references is None:
        return message
    reply = _reply(_find(message["id"], known))
    filled = {field: value for field, value in message.items() if field != REFERENCES}
    filled |= {field: reply[field] for field in references if field in reply}
    made = reply.get("tool_calls") or []
    calls = [made[place] for place in references if isinstance(place, int) and place < len(made)]
    if calls:
        filled["tool_calls"] = calls + filled.get("tool_calls", [])
    return filled


def _find(reply_id: str, known: Mapping[str, Turn]) -> Turn:
    turn = known.get(reply_id)
    if turn is None:
        raise ReplyNotFound(f"there is no reply {reply_id} in this session; send the whole input")
    return turn


def _reply(turn: Turn) -> Message:
    assert turn.reply is not None
    return turn.reply.to_dict()
